"""Others open a store without this package, and importing it stays cheap."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import torchlens
from torchlens.storage import ArraySpec, RunSpec, open_run

BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torchlens":
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Block())
try:
    import torchlens
except ImportError:
    pass
else:
    raise SystemExit("torchlens can be imported")
import numpy as np
"""


def run_alone(code: str, *arguments: object) -> str:
    """Run code where torchlens cannot be imported."""
    result = subprocess.run(
        [sys.executable, "-c", BLOCK + code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_plain_zarr_reads_a_store(
    finished: Path, sample: ModuleType, tmp_path: Path
) -> None:
    np.save(tmp_path / "conv.npy", sample.make_rows("conv", 0, 150))
    np.save(tmp_path / "fc.npy", sample.make_rows("fc[0]", 0, 150))
    code = """
import zarr
group = zarr.open_group(sys.argv[1] + "/data.zarr", mode="r")
assert sorted(group) == ["conv", "fc~5b0~5d"], sorted(group)
conv, fc = group["conv"], group["fc~5b0~5d"]
assert np.array_equal(conv[:], np.load(sys.argv[2] + "/conv.npy"))
assert np.array_equal(fc[:], np.load(sys.argv[2] + "/fc.npy"))
assert fc.attrs["torchlens"] == {"layer": "fc[0]", "dtype": "float16"}
assert np.isnan(conv.fill_value)
print(conv.metadata.dimension_names)
"""
    out = run_alone(code, finished, tmp_path)
    assert out.strip() == "('sample', 'conv_0', 'conv_1')"


def test_xarray_reads_a_store(
    finished: Path, sample: ModuleType, tmp_path: Path
) -> None:
    np.save(tmp_path / "conv.npy", sample.make_rows("conv", 0, 150))
    code = """
import xarray
data = xarray.open_zarr(sys.argv[1] + "/data.zarr")
conv = np.load(sys.argv[2] + "/conv.npy")
assert np.array_equal(data["conv"].values, conv)
assert data.sizes["sample"] == 150
mean = data["conv"].mean("sample").values
assert np.allclose(mean, conv.mean(0), atol=1e-6)
"""
    run_alone(code, finished, tmp_path)


def test_dask_and_pandas_read_a_store(finished: Path) -> None:
    code = """
import dask.array, pandas, zarr
array = zarr.open_group(sys.argv[1] + "/data.zarr", mode="r")["conv"]
assert dask.array.from_array(array, chunks=array.shards).sum().compute() != 0
frame = pandas.read_parquet(sys.argv[1] + "/samples.parquet")
assert list(frame.columns) == ["sample", "id", "label"] and len(frame) == 150
"""
    run_alone(code, finished)


def test_plain_readers_see_nothing_of_an_unfinished_store(
    tmp_path: Path, sample: ModuleType
) -> None:
    writer = open_run(tmp_path / "s", sample.make_spec())
    for block in writer.missing()[:-1]:
        sample.write_block(writer, block)
    code = """
import zarr
try:
    zarr.open_group(sys.argv[1] + "/data.zarr", mode="r")
except FileNotFoundError:
    print("nothing there")
"""
    assert run_alone(code, tmp_path / "s").strip() == "nothing there"


def test_plain_zarr_reads_bfloat16_once_the_type_is_registered(tmp_path: Path) -> None:
    bits = np.arange(64, dtype="uint16").reshape(32, 2) + 0x3F80
    spec = RunSpec(32, {"a": ArraySpec((2,), "bfloat16")}, block_rows=32)
    writer = open_run(tmp_path, spec)
    block = writer.block(0)
    block.write("a", bits)
    block.commit([str(i) for i in range(32)])
    writer.consolidate()
    import zarr

    import torchlens.storage.zarr_bfloat16  # noqa: F401  # registers the type

    array = zarr.open_group(tmp_path / "data.zarr", mode="r")["a"]
    values = np.asarray(array[:])
    assert values.dtype.name == "bfloat16"
    np.testing.assert_array_equal(values.view("uint16"), bits)
    assert float(values[0, 0]) == 1.0
    with pytest.raises(AssertionError, match="bfloat16"):
        run_alone(
            "import zarr; zarr.open_group(sys.argv[1] + '/data.zarr')['a']", writer.url
        )


def test_importing_storage_imports_no_optional_package() -> None:
    code = """
import sys
import torchlens.storage
heavy = {"zarr", "pyarrow", "pandas", "dask", "xarray", "fsspec", "ml_dtypes"}
before = set(sys.modules)
print(sorted(heavy & {name for name in before if "." not in name} - set(sys.argv)))
"""
    root = str(Path(torchlens.__file__).parents[1])
    parent = "import sys, torchlens; print(*sorted(sys.modules))"
    runs = [
        subprocess.run(
            [sys.executable, "-c", text, *extra],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONPATH": root, "PATH": ""},
        ).stdout
        for text, extra in ((parent, []), (code, []))
    ]
    already = set(runs[0].split())
    assert set(eval(runs[1])) <= already


def test_storage_cannot_be_imported_under_its_bare_name() -> None:
    root = Path(torchlens.storage.__file__).resolve().parents[1]
    result = subprocess.run(
        [sys.executable, "-c", "import storage"],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(root), "PATH": ""},
    )
    assert "This folder is imported as torchlens.storage." in result.stderr

"""Places that fail: full, read-only, gone, out of descriptors; clocks that are wrong.

After each of them whole blocks are there, nothing else counts, and running again works.
"""

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import torchlens
from torchlens.errors import StoreError
from torchlens.storage import RunSpec, StoreWriter, open_run, open_store
from torchlens.storage.layer_paths import layer_path

IS_ROOT = os.geteuid() == 0


def in_child(code: str, *arguments: object) -> str:
    """Run code in a process of its own, after `write_store.py`; return its output."""
    root = Path(torchlens.__file__).parents[1]
    beside = Path(__file__).parent
    result = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{beside}"},
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def assert_whole_blocks_only(folder: Path, spec: RunSpec, sample: ModuleType) -> int:
    """Check that committed rows are right; return how many blocks are missing."""
    with pytest.raises(StoreError, match="unfinished"):
        open_store(folder)
    assert not (folder / "data.zarr" / "zarr.json").exists()
    store = open_store(folder, allow_partial=True)
    for name in store.layers:
        rows = store[name].row_numbers
        expected = np.concatenate(
            [sample.make_rows(name, row, row + 1) for row in rows]
            or [sample.make_rows(name, 0, 0)]
        )
        np.testing.assert_array_equal(store[name][:], expected)
    assert store.verify(deep=True).ok
    assert list((folder / "_run" / "tmp").iterdir()) == []
    return len(open_run(folder, spec).missing())


def write_until_it_fails(
    writer: StoreWriter, sample: ModuleType, match: str
) -> tuple[str, int]:
    """Write blocks until one fails; return the message and the block."""
    for block in writer.missing():
        try:
            sample.write_block(writer, block)
        except StoreError as error:
            assert match in str(error)
            return str(error), block
    pytest.fail("nothing failed")


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a file system of one MiB."""
    if not IS_ROOT:
        pytest.skip("mounting a small file system needs root")
    folder = tmp_path / "tiny"
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", "size=1m", "tmpfs"]
    made = subprocess.run(["mount", *options, folder], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_a_disk_that_fills_up_leaves_whole_blocks(
    tiny_disk: Path, sample: ModuleType, finished: Path
) -> None:
    spec = sample.make_spec()
    folder = tiny_disk / "store"
    writer = open_run(folder, spec)
    ballast = tiny_disk / "ballast"
    with open(ballast, "wb") as file:
        file.write(bytes(os.statvfs(tiny_disk).f_bavail * 4096 - 24 * 4096))
    message, block = write_until_it_fails(writer, sample, "No space left on device")
    assert 0 < block < 19
    assert "Make room, then run the same command again." in message
    assert str(folder) in message
    assert assert_whole_blocks_only_when_full(folder, sample) == block
    ballast.unlink()
    assert assert_whole_blocks_only(folder, spec, sample) == 19 - block
    sample.write_all(open_run(folder, spec))
    assert written(folder) == written(finished)


def assert_whole_blocks_only_when_full(folder: Path, sample: ModuleType) -> int:
    """Read what is there while nothing can be written; return the committed blocks."""
    store = open_store(folder, allow_partial=True)
    rows = store["conv"][:]
    np.testing.assert_array_equal(rows, sample.make_rows("conv", 0, len(rows)))
    return len(rows) // 8


def test_files_that_may_not_grow_are_named(tmp_path: Path, sample: ModuleType) -> None:
    """The limit of the process stands for a quota; anyone can set it."""
    code = """
import resource, sys
import write_store as sample
from torchlens.storage import open_run
from torchlens.storage.sample_table import encode_part
encode_part(0, ["x"], {})
writer = open_run(sys.argv[1], sample.make_spec())
sample.write_block(writer, 0)
resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
try:
    sample.write_block(writer, 1)
except OSError as error:
    print(type(error).__name__, error)
"""
    out = in_child(code, tmp_path / "s")
    assert out.startswith("StoreError Cannot write ") and "File too large" in out
    assert "ulimit -f" in out
    spec = sample.make_spec()
    assert assert_whole_blocks_only(tmp_path / "s", spec, sample) == 18
    sample.write_all(open_run(tmp_path / "s", spec))
    assert open_store(tmp_path / "s").verify(deep=True).ok


def test_a_directory_that_became_read_only_is_named(
    tmp_path: Path, sample: ModuleType
) -> None:
    code = """
import os, sys
import write_store as sample
from torchlens.storage import open_run
from torchlens.storage.sample_table import encode_part
encode_part(0, ["x"], {})
writer = open_run(sys.argv[1], sample.make_spec())
sample.write_block(writer, 0)
for folder, _, _ in os.walk(sys.argv[1]):
    os.chmod(folder, 0o555)
if os.geteuid() == 0:
    os.seteuid(65534)  # root may write anywhere
try:
    sample.write_block(writer, 1)
except OSError as error:
    print(type(error).__name__, error)
"""
    folder = tmp_path / "s"
    try:
        tmp_path.chmod(0o755)
        out = in_child(code, folder)
    finally:
        for path, _, _ in os.walk(folder):
            os.chmod(path, 0o755)
    assert out.startswith("StoreError Cannot write ") and "Permission denied" in out
    assert "Change its permissions, or choose another place." in out
    spec = sample.make_spec()
    assert assert_whole_blocks_only(folder, spec, sample) == 18
    sample.write_all(open_run(folder, spec))
    assert open_store(folder).verify(deep=True).ok


def test_a_read_only_file_system_is_named(tiny_disk: Path, sample: ModuleType) -> None:
    writer = open_run(tiny_disk / "s", sample.make_spec())
    sample.write_block(writer, 0)
    remount = ["mount", "-o", "remount,{}", str(tiny_disk)]
    subprocess.run([part.format("ro") for part in remount], check=True)
    with pytest.raises(StoreError, match="Its file system is read-only; choose"):
        sample.write_block(writer, 1)
    with pytest.raises(StoreError, match="read-only"):
        open_run(tiny_disk / "t", sample.make_spec())
    assert len(open_store(tiny_disk / "s", allow_partial=True)["conv"]) == 8
    subprocess.run([part.format("rw") for part in remount], check=True)
    assert sample.write_block(writer, 1)


@pytest.mark.parametrize("gone", [".", "_run"])
def test_a_directory_removed_under_the_run_is_not_made_again(
    tmp_path: Path, sample: ModuleType, gone: str
) -> None:
    folder = tmp_path / "s"
    writer = open_run(folder, sample.make_spec())
    sample.write_block(writer, 0)
    shutil.rmtree(folder / gone)
    with pytest.raises(
        StoreError, match="or was removed. Check that the place is moun"
    ):
        sample.write_block(writer, 1)
    assert not writer.consolidate()
    assert not (folder / "_run").exists()
    if gone == ".":
        sample.write_all(open_run(folder, sample.make_spec()))
        assert open_store(folder).verify(deep=True).ok
    else:
        with pytest.raises(StoreError, match="that no run of ours made. Move it away"):
            open_run(folder, sample.make_spec())


def test_data_removed_under_the_run_is_named_before_publication(
    tmp_path: Path, sample: ModuleType
) -> None:
    folder = tmp_path / "s"
    writer = open_run(folder, sample.make_spec())
    sample.write_block(writer, 0)
    shutil.rmtree(folder / "data.zarr")
    with pytest.raises(StoreError, match="'data.zarr/conv/c.0.0.0' .* is gone"):
        sample.write_all(writer)
    assert not (folder / "data.zarr" / "zarr.json").exists()


def test_a_limit_of_open_files_is_named(tmp_path: Path, sample: ModuleType) -> None:
    spec = sample.make_spec()
    writer = open_run(tmp_path / "s", spec)
    sample.write_block(writer, 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir("/dev/fd"))) + 1
    taken: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used, hard))
        while True:
            try:
                taken.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                break
        with pytest.raises(StoreError, match=r"Raise the limit of open files \(ulimit"):
            sample.write_block(writer, 1)
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert assert_whole_blocks_only(tmp_path / "s", spec, sample) == 18
    sample.write_all(writer)
    assert open_store(tmp_path / "s").verify(deep=True).ok


def test_a_path_too_long_is_named(tmp_path: Path, sample: ModuleType) -> None:
    place = tmp_path / ("x" * 300)
    with pytest.raises(StoreError, match="File name too long. Choose a place with a"):
        open_run(place, sample.make_spec())


def test_a_layer_of_any_name_fits(tmp_path: Path, sample: ModuleType) -> None:
    name = "block." * 200
    spec = sample.make_spec(num_rows=8, arrays={name: sample.ARRAYS["fc[0]"]})
    with open_run(tmp_path, spec) as writer:
        block = writer.block(0)
        block.write(name, sample.make_rows("fc[0]", 0, 8))
        block.commit(sample.make_ids(0, 8))
        assert writer.consolidate()
    assert open_store(tmp_path).layers == (name,)
    assert (tmp_path / "data.zarr" / layer_path(name)).is_dir()


@pytest.mark.multiprocess
@pytest.mark.parametrize("shift", [-3e8, 3e8])
def test_a_wrong_clock_changes_nothing(
    tmp_path: Path, sample: ModuleType, finished: Path, shift: float
) -> None:
    """Years early or late: what another writer is just writing is left alone."""
    code = """
import sys, time
real, steady, shift = time.time, time.monotonic, float(sys.argv[2])
import write_store as sample
from torchlens.storage import open_run
writer = open_run(sys.argv[1], sample.make_spec())
sample.write_block(writer, 0)
time.time = lambda: real() + shift
time.monotonic = lambda: steady() + shift
sample.write_all(writer)
"""
    folder = tmp_path / "s"
    (folder / "_run" / "tmp").mkdir(parents=True)
    living = folder / "_run" / "tmp" / "another-writer"
    living.write_bytes(b"half of a shard")
    in_child(code, folder, shift)
    assert living.exists()
    assert written(folder) == written(finished)
    assert open_store(folder).verify(deep=True).ok
    assert all(commit.seconds == 1.0 for commit in open_store(folder).commits)


def test_a_clock_set_back_within_a_block_gives_no_negative_time(
    tmp_path: Path, sample: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    writer = open_run(tmp_path, sample.make_spec())
    real = time.time
    block = writer.block(0)
    monkeypatch.setattr(time, "time", lambda: real() - 3600.0)
    for name in writer.arrays:
        block.write(name, sample.make_rows(name, 0, 8))
    block.commit(sample.make_ids(0, 8))
    (commit,) = open_store(tmp_path, allow_partial=True).commits
    assert commit.seconds is not None and 0.0 <= commit.seconds < 600.0


def written(folder: Path) -> dict[str, bytes]:
    """Return every file of a store but those of its runs."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.relative_to(folder).parts[0] != "_run"
    }

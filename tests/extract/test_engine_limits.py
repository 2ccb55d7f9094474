"""Limits of the machine: broken disks, bounded memory, devices, real architectures."""

import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from torchlens.errors import StoreError
from torchlens.extract import extract_dataset
from torchlens.extract.config import Settings
from torchlens.extract.engine import run_extraction
from torchlens.extract.job import DataOptions
from torchlens.storage import open_store
from torchlens.storage.local_objects import LocalObjects

ROOT = Path(__file__).resolve().parents[2]


def quiet(*args: Any, **options: Any) -> Any:
    return extract_dataset(*args, **{"progress": False, **options})


class Counted(nn.Module):
    """Counts full batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.batches = 0

    def forward(self, x: Tensor) -> Tensor:
        self.batches += len(x) == 4
        return self.layer(x) + 0


@pytest.mark.parametrize("shard", [0, 3])
def test_full_disk_stops_the_run_and_commits_nothing_partial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard: int
) -> None:
    put_new = LocalObjects.put_new
    seen: list[int] = []
    model = Counted()

    def put(self: LocalObjects, key: str, parts: Any) -> bool:
        if "data.zarr/layer/c" in key:
            if int(key.split("c.")[1].split(".")[0]) == shard:
                seen.append(model.batches)
                raise OSError(errno.ENOSPC, "No space left on device")
        return put_new(self, key, parts)

    monkeypatch.setattr(LocalObjects, "put_new", put)
    options: dict[str, Any] = {"batch_size": 4, "block_rows": 4}
    data = torch.randn(400, 8)
    with pytest.raises(StoreError, match="No space left") as caught:
        quiet(model, data, ["layer"], output_dir=tmp_path / "s", **options)
    place = "".join(getattr(caught.value, "__notes__", [])) + str(caught.value)
    assert f"block {shard} (rows {4 * shard} to {4 * shard + 3})" in place
    # The writer had at most one more block in its queue when the model went on.
    assert model.batches - seen[0] <= 3
    partial = open_store(tmp_path / "s", allow_partial=True)
    assert len(partial.ids) == 4 * shard and not partial.complete
    monkeypatch.undo()
    store = quiet(model, data, ["layer"], output_dir=tmp_path / "s", **options)
    with torch.no_grad():
        wanted = torch.cat([model.layer(batch) for batch in data.split(4)])
    np.testing.assert_array_equal(store["layer"][:], wanted.numpy())


def test_place_that_cannot_be_written_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError):
        quiet(Counted(), torch.zeros(8, 8), ["layer"], output_dir=tmp_path / "file/s")


def test_forecast_is_what_is_written(
    cnn: nn.Module, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = torch.randn(200, 3, 24, 24)
    place = tmp_path / "s"
    extract_dataset(cnn, data, ["0", "1", "3"], output_dir=place, batch_size=16)
    line = capsys.readouterr().err.splitlines()[0]
    assert line.startswith("forecast: 200 rows x 3 layers")
    files = [path for path in place.rglob("*") if path.is_file()]
    told = int(line.split(" in ")[1].split()[0])
    assert 0.8 * len(files) <= told <= 1.2 * len(files)
    stored = sum(p.stat().st_size for p in files if "data.zarr" in p.parts)
    settings = Settings(output_dir=None, progress=False)
    _, summary = run_extraction(cnn, data, ["0", "1", "3"], settings, DataOptions())
    assert summary.bytes_done <= stored <= 1.05 * summary.bytes_done


@pytest.mark.slow
@pytest.mark.multiprocess
def test_peak_memory_does_not_grow_with_the_dataset() -> None:
    peaks = []
    for rows in (512, 12_800):
        command = [sys.executable, str(ROOT / "benchmarks" / "memory.py"), "--child"]
        result = subprocess.run(
            [*command, "--rows", str(rows), "--block-rows", "128"],
            env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert result.returncode == 0, result.stderr
        peaks.append(json.loads(result.stdout))
    assert peaks[1] <= 1.05 * peaks[0]


def test_nothing_of_the_run_stays_in_memory(mlp: nn.Module) -> None:
    import gc

    data = torch.randn(64, 8)

    def live() -> int:
        gc.collect()
        return sum(issubclass(type(item), Tensor) for item in gc.get_objects())

    quiet(mlp, data, ["0", "2"], output_dir=None)
    before = live()
    for _ in range(3):
        quiet(mlp, data, ["0", "2"], output_dir=None)
    assert live() == before


def test_token_dicts_go_to_a_transformer_by_name() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50)
    torch.manual_seed(0)
    model = transformers.GPT2Model(config).eval()
    tokens = torch.randint(50, (9, 6))
    items = [
        {"id": f"t{n}", "input_ids": row, "attention_mask": torch.ones_like(row)}
        for n, row in enumerate(tokens)
    ]
    store = quiet(model, items, ["h.0.mlp", "h.1"], output_dir=None, batch_size=4)
    seen: dict[str, list[Tensor]] = {"h.0.mlp": [], "h.1": []}

    def keep(layer: str) -> Any:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            seen[layer].append((out[0] if isinstance(out, tuple) else out).clone())

        return hook

    for layer in seen:
        model.get_submodule(layer).register_forward_hook(keep(layer))
    with torch.no_grad():
        for batch in tokens.split(4):
            model(input_ids=batch, attention_mask=torch.ones_like(batch))
    assert store.ids == tuple(f"t{n}" for n in range(9))
    for layer, parts in seen.items():
        np.testing.assert_array_equal(store[layer][:], torch.cat(parts).numpy())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [None, "float16"])
def test_model_on_a_device_is_captured_there_and_not_moved(
    cnn: nn.Module, tmp_path: Path, dtype: str | None
) -> None:
    cnn.cuda()
    data = torch.randn(150, 3, 33, 33)
    store = quiet(
        cnn,
        data,
        ["0", "3"],
        output_dir=tmp_path / "s",
        batch_size=16,
        block_rows=64,
        dtype=dtype,
    )
    seen: list[Tensor] = []
    cnn.eval()
    cnn[0].register_forward_hook(lambda m, a, out: seen.append(out.clone().cpu()))
    with torch.no_grad():
        for block in data.split(64):
            for batch in block.split(16):
                cnn(batch.cuda())
    wanted = torch.cat(seen)
    if dtype is not None:
        wanted = wanted.to(getattr(torch, dtype))
    np.testing.assert_array_equal(store["0"][:], wanted.numpy())
    assert all(parameter.is_cuda for parameter in cnn.parameters())

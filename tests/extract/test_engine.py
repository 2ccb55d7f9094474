"""The engine against plain hooks: values, order, resume, refusal, policies."""

import os
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from torchlens.errors import (
    BudgetError,
    DataError,
    InputError,
    ModelError,
    NonFiniteError,
    PathDivergenceError,
    ResumeError,
    StoreError,
    TorchLensWarning,
)
from torchlens.extract import RequeueExit, extract_dataset
from torchlens.extract.config import Settings
from torchlens.extract.engine import run_extraction
from torchlens.extract.job import DataOptions
from torchlens.planner import plan
from torchlens.storage import open_store


def quiet(*args: Any, **options: Any) -> Any:
    return extract_dataset(*args, **{"progress": False, **options})


def cut(data: Tensor, block_rows: int, batch_size: int) -> list[Tensor]:
    """Return the batches of a run: cut from the start of each block."""
    return [
        batch for block in data.split(block_rows) for batch in block.split(batch_size)
    ]


def files_of(root: Path) -> dict[str, bytes]:
    """Return every file of a store outside `_run`."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.relative_to(root).parts[0] != "_run"
    }


class Dicts(Dataset[Any]):
    def __init__(self, data: Tensor, broken: frozenset[int] = frozenset()) -> None:
        self.data = data
        self.broken = broken

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, row: int) -> dict[str, Any]:
        if row in self.broken:
            raise OSError("torn file")
        # In lexical order im10 comes before im2.
        return {"id": f"im{row + 1}", "half": row // 2, "x": self.data[row]}


# ---------------------------------------------------------------- values and order


@pytest.mark.parametrize("batch_size", [4, 5, 16])
@pytest.mark.parametrize("output", ["disk", "memory"])
def test_rows_equal_plain_hooks_bit_for_bit(
    cnn: nn.Module, hooked: Any, tmp_path: Path, batch_size: int, output: str
) -> None:
    data = torch.randn(37, 3, 9, 9)
    layers = ["0", "1", "3"]
    store = quiet(
        cnn,
        data,
        layers,
        output_dir=tmp_path / "s" if output == "disk" else None,
        batch_size=batch_size,
        block_rows=16,
    )
    wanted = hooked(cnn, cut(data, 16, batch_size), layers)
    assert store.layers == tuple(layers) and store.complete
    for layer in layers:
        assert store[layer].dtype == "float32"
        np.testing.assert_array_equal(store[layer][:], wanted[layer])
    # The convolution is kept as it was before the ReLU wrote over it.
    assert (store["0"][:] < 0).any() and (store["1"][:] >= 0).all()


def test_arrays_open_with_plain_zarr(
    mlp: nn.Module, hooked: Any, tmp_path: Path
) -> None:
    data = torch.randn(20, 8)
    store = quiet(mlp, data, ["2"], output_dir=tmp_path / "s", batch_size=20)
    array = zarr.open_group(store.zarr_path, mode="r")["2"]
    np.testing.assert_array_equal(array[:], hooked(mlp, [data], ["2"])["2"])


def test_model_is_in_eval_mode_and_left_as_found(cnn: nn.Module, hooked: Any) -> None:
    cnn[3].eval()
    modes = [module.training for module in cnn.modules()]
    state = {name: value.clone() for name, value in cnn.state_dict().items()}
    data = torch.randn(6, 3, 9, 9)
    rng = torch.get_rng_state()
    alone = [
        quiet(cnn, data[i : i + 1], ["3"], output_dir=None)["3"][:] for i in (0, 5)
    ]
    together = quiet(cnn, data, ["3"], output_dir=None)["3"][:]
    np.testing.assert_allclose(together[[0, 5]], np.concatenate(alone), atol=1e-5)
    assert [module.training for module in cnn.modules()] == modes
    assert all(torch.equal(cnn.state_dict()[name], state[name]) for name in state)
    assert torch.equal(torch.get_rng_state(), rng)
    assert not any(module._forward_hooks for module in cnn.modules())


def test_ids_and_metadata_come_in_dataset_order(mlp: nn.Module, hooked: Any) -> None:
    data = torch.randn(12, 8)
    loader = DataLoader(Dicts(data), batch_size=5)
    store = quiet(mlp, loader, ["2"], output_dir=None, metadata=["half"])
    assert store.ids == tuple(f"im{n}" for n in range(1, 13))
    assert store.metadata["half"].tolist() == [n // 2 for n in range(12)]
    wanted = hooked(mlp, data.split(5), ["2"])["2"]
    np.testing.assert_array_equal(store["2"].rows(["im10", "im2"]), wanted[[9, 1]])


def test_shuffling_loader_does_not_move_a_row(mlp: nn.Module, hooked: Any) -> None:
    data = torch.randn(12, 8)
    loader = DataLoader(Dicts(data), batch_size=4, shuffle=True)
    with pytest.warns(TorchLensWarning, match="shuffles"):
        store = quiet(mlp, loader, ["2"], output_dir=None, metadata=["half"])
    np.testing.assert_array_equal(store["2"][:], hooked(mlp, data.split(4), ["2"])["2"])


@pytest.mark.multiprocess
def test_workers_change_nothing(mlp: nn.Module, tmp_path: Path) -> None:
    data = Dicts(torch.randn(33, 8))
    options: dict[str, Any] = {"batch_size": 4, "block_rows": 8, "metadata": ["half"]}
    quiet(mlp, data, ["0", "2"], output_dir=tmp_path / "one", **options)
    quiet(mlp, data, ["0", "2"], output_dir=tmp_path / "two", num_workers=2, **options)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")


def test_stream_is_stored_like_the_rows_it_gives(mlp: nn.Module, hooked: Any) -> None:
    data = torch.randn(11, 8)

    class Stream(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            return iter(data)

    store = quiet(mlp, Stream(), ["2"], output_dir=None, batch_size=4, block_rows=4)
    np.testing.assert_array_equal(store["2"][:], hooked(mlp, data.split(4), ["2"])["2"])
    assert store.ids == tuple(map(str, range(11)))


def test_folder_of_images_is_stored_by_file_name(
    cnn: nn.Module, hooked: Any, tmp_path: Path
) -> None:
    from PIL import Image

    folder = tmp_path / "images"
    (folder / "b").mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 255, (3, 9, 9, 3), dtype=np.uint8)
    for values, name in zip(pixels, ["c.png", "b/x.png", "a.png"], strict=True):
        Image.fromarray(values).save(folder / name)

    def prepare(image: Any) -> Tensor:
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous() / 255.0

    store = quiet(cnn, folder, ["3"], output_dir=None, transform=prepare)
    assert store.ids == ("a.png", "b/x.png", "c.png")
    batch = torch.from_numpy(pixels[[2, 1, 0]]).permute(0, 3, 1, 2).contiguous() / 255
    np.testing.assert_array_equal(store["3"][:], hooked(cnn, [batch], ["3"])["3"])


def test_dict_items_become_keyword_arguments() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Identity()

        def forward(self, a: Tensor, *, b: Tensor) -> Tensor:
            return self.out(a + 10 * b) + 1

    items = [
        {"id": n, "b": torch.ones(2) * n, "a": torch.zeros(2) + 1} for n in range(5)
    ]
    store = quiet(Sum(), items, ["out"], output_dir=None)
    assert store["out"][:, 0].tolist() == [1, 11, 21, 31, 41]


def test_labels_of_tuple_items_are_left_out(mlp: nn.Module, hooked: Any) -> None:
    data = torch.randn(6, 8)
    items = [(row, label) for label, row in enumerate(data)]
    store = quiet(mlp, items, ["2"], output_dir=None)
    np.testing.assert_array_equal(store["2"][:], hooked(mlp, [data], ["2"])["2"])


def test_ambiguous_items_ask_for_inputs() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Identity()

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return self.out(x if mask is None else x * mask) + 0

    items = [(torch.ones(2) * n, torch.zeros(2)) for n in range(3)]
    with pytest.raises(InputError, match="Say it with inputs=0"):
        quiet(Masked(), items, ["out"], output_dir=None)
    first = quiet(Masked(), items, ["out"], output_dir=None, inputs=0)
    both = quiet(Masked(), items, ["out"], output_dir=None, inputs=(0, 1))
    assert first["out"][:, 0].tolist() == [0, 1, 2] and not both["out"][:].any()


def test_names_and_ready_plans_are_taken_as_layers(mlp: nn.Module, hooked: Any) -> None:
    data = torch.randn(9, 8)
    wanted = hooked(mlp, [data], ["0"])["0"]
    named = quiet(mlp, data, {"first": "0"}, output_dir=None)
    planned = quiet(mlp, data, plan(mlp, data[:3], ["linear_1_1"]), output_dir=None)
    np.testing.assert_array_equal(named["first"][:], wanted)
    np.testing.assert_array_equal(planned["linear_1_1"][:], wanted)


class EightOnly(nn.Module):
    """Takes batches of eight samples and no other."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x.reshape(8, 3)) + 0


def test_model_of_one_batch_size_is_run_in_such_batches() -> None:
    data, model = torch.randn(20, 3), EightOnly()
    options: dict[str, Any] = {"output_dir": None, "allow": ("fixed_batch",)}
    store = quiet(model, data, ["out"], batch_size=8, **options)
    with torch.no_grad():
        wanted = model.out(torch.cat([data, data[-1:].expand(4, 3)]))[:20]
    np.testing.assert_allclose(store["out"][:], wanted.numpy(), rtol=1e-5)


class Centred(nn.Module):
    """Mixes the samples of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x - x.mean(0)) + 0


def test_batch_size_belongs_to_the_identity_only_where_samples_mix(
    mlp: nn.Module, tmp_path: Path
) -> None:
    data = torch.randn(16, 8)
    options: dict[str, Any] = {"output_dir": tmp_path / "a", "allow": ("mixing",)}
    quiet(Centred(), data, ["out"], batch_size=8, **options)
    with pytest.raises(ResumeError, match="identity.batch_size: stored 8, now 4"):
        quiet(Centred(), data, ["out"], batch_size=4, **options)
    quiet(mlp, data, ["2"], output_dir=tmp_path / "b", batch_size=8)
    quiet(mlp, data, ["2"], output_dir=tmp_path / "b", batch_size=4)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_tiny_datasets_work(mlp: nn.Module, hooked: Any, length: int) -> None:
    data = torch.randn(length, 8)
    store = quiet(mlp, data, ["2"], output_dir=None)
    np.testing.assert_array_equal(store["2"][:], hooked(mlp, [data], ["2"])["2"])


def test_wide_rows_take_several_pieces_and_any_batch_size(
    hooked: Any, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(4, 50_000), nn.Linear(50_000, 2))
    data = torch.randn(150, 4)
    store = quiet(
        model, data, ["0", "1"], output_dir=tmp_path / "s", batch_size=48, block_rows=64
    )
    wanted = hooked(model, cut(data, 64, 48), ["0", "1"])
    for layer in ("0", "1"):
        np.testing.assert_array_equal(store[layer][:], wanted[layer])


# --------------------------------------------------------------------------- resume


def fail_at(model: nn.Module, call: int) -> Any:
    """Make the model fail in its n-th forward of full batches."""
    calls = [0]

    def fail(module: nn.Module, args: Any) -> None:
        if len(args[0]) == 4:
            calls[0] += 1
            if calls[0] == call:
                raise RuntimeError("the node went away")

    return model.register_forward_pre_hook(fail)


def test_finished_store_is_returned_without_a_forward(
    mlp: nn.Module,
    count_forwards: Callable[[nn.Module], list[int]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = torch.randn(20, 8)
    first = quiet(mlp, data, ["2"], output_dir=tmp_path / "s", batch_size=4)
    sizes = count_forwards(mlp)
    again = extract_dataset(mlp, data, ["2"], output_dir=tmp_path / "s")
    assert sizes == []
    assert "nothing to do: 5 of 5 blocks committed" in capsys.readouterr().err
    np.testing.assert_array_equal(first["2"][:], again["2"][:])


def test_resume_does_what_is_left_and_repeats_bit_for_bit(
    cnn: nn.Module, count_forwards: Callable[[nn.Module], list[int]], tmp_path: Path
) -> None:
    data = torch.randn(40, 3, 9, 9)
    options: dict[str, Any] = {"batch_size": 4, "block_rows": 8}
    quiet(cnn, data, ["0", "3"], output_dir=tmp_path / "whole", **options)
    handle = fail_at(cnn, 6)
    with pytest.raises(RuntimeError, match="the node went away"):
        quiet(cnn, data, ["0", "3"], output_dir=tmp_path / "parts", **options)
    handle.remove()
    with pytest.raises(StoreError, match="unfinished"):
        open_store(tmp_path / "parts")
    done = len(open_store(tmp_path / "parts", allow_partial=True).ids) // 8
    assert 0 < done < 5
    sizes = count_forwards(cnn)
    quiet(cnn, data, ["0", "3"], output_dir=tmp_path / "parts", **options)
    assert sizes == [4] * 2 * (5 - done)
    assert files_of(tmp_path / "whole") == files_of(tmp_path / "parts")


def test_resume_takes_the_blocks_that_are_there_with_another_batch_size(
    mlp: nn.Module, hooked: Any, tmp_path: Path
) -> None:
    data = torch.randn(40, 8)
    handle = fail_at(mlp, 6)
    with pytest.raises(RuntimeError, match="the node went away"):
        quiet(mlp, data, ["2"], output_dir=tmp_path / "s", batch_size=4, block_rows=8)
    handle.remove()
    store = quiet(
        mlp, data, ["2"], output_dir=tmp_path / "s", batch_size=32, num_workers=1
    )
    np.testing.assert_allclose(
        store["2"][:], hooked(mlp, [data], ["2"])["2"], atol=1e-6
    )
    sizes = [commit.batches["rows"] for commit in store.commits]
    assert sizes[0] == [4, 4] and sizes[-1] == [8]


def test_adding_layers_computes_only_those(
    cnn: nn.Module, hooked: Any, tmp_path: Path
) -> None:
    data = torch.randn(10, 3, 9, 9)
    quiet(cnn, data, ["0"], output_dir=tmp_path / "s", batch_size=5, block_rows=16)
    before = {name: content for name, content in files_of(tmp_path / "s").items()}
    deep: list[int] = []
    handle = cnn[3].register_forward_hook(lambda *args: deep.append(len(args[1][0])))
    store = quiet(
        cnn, data, ["0", "3"], output_dir=tmp_path / "s", batch_size=5, block_rows=16
    )
    handle.remove()
    assert sum(size == 5 for size in deep) == 2
    wanted = hooked(cnn, data.split(5), ["0", "3"])
    assert set(store.layers) == {"0", "3"}
    for layer in ("0", "3"):
        np.testing.assert_array_equal(store[layer][:], wanted[layer])
    after = files_of(tmp_path / "s")
    changed = [name for name in before if after[name] != before[name]]
    assert changed == ["data.zarr/zarr.json"]


def changed_model(model: nn.Module) -> dict[str, Any]:
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1
    return {}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (changed_model, "(?s)identity.model.weights.*the model has other weights"),
        (
            lambda model: {"dataset": torch.randn(20, 8)},
            "(?s)fingerprint.*items.*others",
        ),
        (lambda model: {"dataset": torch.zeros(21, 8)}, "num_rows: stored 20, now 21"),
        (lambda model: {"ids": [f"x{n}" for n in range(20)]}, "identity.dataset.ids"),
        (lambda model: {"dtype": "float16"}, "stored_dtype.*float32.*float16"),
        (
            lambda model: {"preprocess": {"size": 3}},
            "preprocess.description: stored null, now",
        ),
        (lambda model: {"inputs": lambda batch: batch * 2}, "identity.inputs"),
        (lambda model: {"nonfinite": "saturate"}, "identity.overflow"),
        (lambda model: {"layers": {"2": "0"}}, "layer '2'"),
    ],
    ids=[
        "weights",
        "data",
        "length",
        "ids",
        "dtype",
        "preprocess",
        "inputs",
        "overflow",
        "layer",
    ],
)
@pytest.mark.parametrize("finished", [True, False])
def test_other_values_are_refused_and_the_field_named(
    mlp: nn.Module, tmp_path: Path, change: Any, field: str, finished: bool
) -> None:
    options: dict[str, Any] = {"dataset": torch.zeros(20, 8), "layers": ["2"]}
    options |= {"output_dir": tmp_path / "s", "batch_size": 4, "progress": False}
    if finished:
        extract_dataset(mlp, **options)
    else:
        handle = fail_at(mlp, 4)
        with pytest.raises(RuntimeError):
            extract_dataset(mlp, **options)
        handle.remove()
    with pytest.raises(ResumeError, match=f"(?s){field}"):
        extract_dataset(mlp, **(options | change(mlp)))
    with pytest.raises(ResumeError, match="overwrite=True"):
        extract_dataset(mlp, **(options | change(mlp)))
    store = extract_dataset(mlp, **(options | change(mlp)), overwrite=True)
    assert store.complete


def test_changed_code_is_noticed_behind_equal_weights(tmp_path: Path) -> None:
    def model_with(line: str) -> nn.Module:
        file = tmp_path / "net.py"
        file.write_text(
            "import torch\nfrom torch import nn\n"
            "class Net(nn.Module):\n"
            "    def __init__(self):\n"
            "        super().__init__()\n"
            "        self.out = nn.Identity()\n"
            "    def forward(self, x):\n"
            f"        x = {line}\n"
            "        return self.out(x) + 0\n"
        )
        namespace: dict[str, Any] = {"__name__": "net"}
        exec(compile(file.read_text(), str(file), "exec"), namespace)
        model: nn.Module = namespace["Net"]()
        return model

    data = torch.randn(6, 4)
    quiet(model_with("x * 2"), data, ["out"], output_dir=tmp_path / "s")
    with pytest.raises(ResumeError, match="'out' identity.graph"):
        quiet(model_with("torch.relu(x)"), data, ["out"], output_dir=tmp_path / "s")


def test_foreign_folder_is_left_alone(mlp: nn.Module, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(StoreError, match="not a store of ours"):
        quiet(mlp, torch.zeros(4, 8), ["2"], output_dir=tmp_path, overwrite=True)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


# ------------------------------------------------------------------- stopping early


class Signalling(Dicts):
    """Sends this process a signal when a row is read."""

    def __getitem__(self, row: int) -> dict[str, Any]:
        if row == 9:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().__getitem__(row)


def test_sigterm_finishes_the_block_and_asks_for_a_requeue(
    mlp: nn.Module, tmp_path: Path
) -> None:
    data = torch.randn(40, 8)
    options: dict[str, Any] = {"batch_size": 4, "block_rows": 8, "metadata": ["half"]}
    options["fingerprint"] = "the same data"
    with pytest.raises(RequeueExit, match="SIGTERM was received: 2 of 5 blocks"):
        quiet(mlp, Signalling(data), ["2"], output_dir=tmp_path / "s", **options)
    partial = open_store(tmp_path / "s", allow_partial=True)
    assert partial.ids == tuple(f"im{n}" for n in range(1, 17))
    assert quiet(mlp, Dicts(data), ["2"], output_dir=tmp_path / "s", **options).complete


class WorkerKilled(Dicts):
    """Stands for a scheduler that signals the run and its worker processes alike."""

    def __getitem__(self, row: int) -> dict[str, Any]:
        if row == 17:
            os.kill(os.getppid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(row)


@pytest.mark.multiprocess
def test_sigterm_that_takes_the_workers_asks_for_a_requeue_too(
    mlp: nn.Module, tmp_path: Path
) -> None:
    data = torch.randn(40, 8)
    options: dict[str, Any] = {"batch_size": 4, "block_rows": 8, "metadata": ["half"]}
    options |= {"fingerprint": "the same data", "output_dir": tmp_path / "s"}
    with pytest.raises(RequeueExit, match="SIGTERM was received: [012] of 5 blocks"):
        quiet(mlp, WorkerKilled(data), ["2"], num_workers=1, **options)
    assert quiet(mlp, Dicts(data), ["2"], **options).complete


def test_time_limit_stops_with_whole_blocks(mlp: nn.Module, tmp_path: Path) -> None:
    import time

    data = torch.randn(400, 8)
    handle = mlp.register_forward_pre_hook(
        lambda module, args: time.sleep(0.05 if len(args[0]) == 4 else 0)
    )
    options: dict[str, Any] = {"batch_size": 4, "block_rows": 8}
    with pytest.raises(RequeueExit, match="time limit of 2 s is near.*go on"):
        quiet(mlp, data, ["2"], output_dir=tmp_path / "s", time_limit=2, **options)
    handle.remove()
    partial = open_store(tmp_path / "s", allow_partial=True)
    assert 0 < len(partial.ids) < 400 and len(partial.ids) % 8 == 0
    assert quiet(mlp, data, ["2"], output_dir=tmp_path / "s", **options).complete


def test_stopping_before_the_first_block_says_what_to_do(
    mlp: nn.Module, tmp_path: Path
) -> None:
    with pytest.raises(RequeueExit, match="smaller block_rows"):
        quiet(mlp, torch.zeros(4, 8), ["2"], output_dir=tmp_path / "s", time_limit=1e-9)


# ------------------------------------------------------------------------- policies


class Hot(nn.Module):
    """Rows with a large first feature come out large, with a negative one as NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.where(x < 0, torch.nan, x * 7e4)) + 0


def hot_data() -> Tensor:
    data = torch.full((8, 3), 0.5)
    data[2], data[5, 1] = 1.0, -1.0
    return data


def test_nonfinite_and_overflow_are_counted_with_ids(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ids = [f"s{n}" for n in range(8)]
    store = extract_dataset(
        Hot(), hot_data(), ["out"], output_dir=None, ids=ids, dtype="float16"
    )
    assert store["out"].dtype == "float16"
    rows = store["out"][:]
    assert np.isinf(rows[2]).all() and np.isnan(rows[5, 1])
    (commit,) = store.commits
    counts = commit.counters["out"]
    assert counts["overflowed_values"] == 3 and counts["overflowed_ids"] == ["s2"]
    assert counts["nonfinite_ids"] == ["s2", "s5"]
    text = capsys.readouterr().err
    assert "out: 3 values in 1 rows did not fit the dtype: s2" in text


def test_nonfinite_raises_by_policy_and_commits_nothing(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match="'out' has 1 values that are NaN.*'5'"):
        quiet(Hot(), hot_data(), ["out"], output_dir=tmp_path, nonfinite="raise")
    assert open_store(tmp_path, allow_partial=True).ids == ()


def test_saturation_keeps_rows_finite() -> None:
    store = quiet(
        Hot(),
        hot_data(),
        ["out"],
        output_dir=None,
        dtype=torch.float16,
        nonfinite="saturate",
    )
    assert (store["out"][2] == 65504).all() and np.isnan(store["out"][5, 1])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_cast_rows_equal_torchs_cast(mlp: nn.Module, hooked: Any, dtype: str) -> None:
    data = torch.randn(21, 8)
    store = quiet(
        mlp, data, ["0", "2"], output_dir=None, dtype=dtype, batch_size=4, block_rows=8
    )
    wanted = hooked(mlp, cut(data, 8, 4), ["0", "2"])
    for layer in ("0", "2"):
        cast = torch.from_numpy(wanted[layer]).to(getattr(torch, dtype))
        found = store[layer][:].astype("float64")
        np.testing.assert_array_equal(found, cast.double().numpy())


def test_unreadable_items_are_skipped_and_recorded(
    mlp: nn.Module, hooked: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    data = torch.randn(12, 8)
    dataset = Dicts(data, frozenset({3, 8, 9, 10, 11}))
    with pytest.raises(DataError, match="Item 3 .*OSError: torn file"):
        quiet(mlp, dataset, ["2"], output_dir=None, metadata=["half"])
    store = extract_dataset(
        mlp,
        dataset,
        ["2"],
        output_dir=None,
        batch_size=4,
        block_rows=4,
        metadata=["half"],
        on_error="skip",
    )
    assert store.metadata["half"].isna().sum() == 5
    assert store.failed == (3, 8, 9, 10, 11)
    assert store.ids[3] == "unreadable-3" and store.ids[4] == "im5"
    assert np.isnan(store["2"][[3, 8, 9, 10, 11]]).all()
    wanted = hooked(mlp, [data[:3], data[4:8]], ["2"])["2"]
    np.testing.assert_array_equal(store["2"][[0, 1, 2, 4, 5, 6, 7]], wanted)
    assert "skipped, unreadable: unreadable-3" in capsys.readouterr().err


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.small, self.large = (nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.always(x) * 0 + x
        branch = self.small if x.max() < 10 else self.large
        return branch(x)


def test_divergence_raises_with_the_ids_by_default() -> None:
    data = torch.zeros(8, 3)
    data[6] = 100
    with pytest.raises(PathDivergenceError, match="'4', '5', '6', '7'"):
        quiet(Branching(), data, ["small"], output_dir=None, batch_size=4)


def test_divergence_can_leave_rows_empty_and_say_so() -> None:
    data = torch.zeros(8, 3)
    data[6] = 100
    model = Branching()
    store = quiet(
        model,
        data,
        ["always", "small"],
        output_dir=None,
        batch_size=4,
        on_divergence="retrace",
    )
    with torch.no_grad():
        np.testing.assert_array_equal(store["always"][:], model.always(data).numpy())
        np.testing.assert_array_equal(store["small"][:4], model.small(data[:4]).numpy())
    assert np.isnan(store["small"][4:]).all()
    missing = [commit.batches["missing"] for commit in store.commits]
    assert {"small": [4, 5, 6, 7]} in missing


# ------------------------------------------------------------- refusals before work


def test_store_that_is_too_large_is_refused_before_anything_is_written(
    mlp: nn.Module, count_forwards: Callable[[nn.Module], list[int]], tmp_path: Path
) -> None:
    sizes = count_forwards(mlp)
    with pytest.raises(BudgetError, match="max_bytes permits 1000"):
        quiet(
            mlp,
            torch.zeros(500, 8),
            ["0"],
            output_dir=tmp_path / "s",
            max_bytes=1000,
            batch_size=50,
        )
    assert max(sizes) <= 3  # the probes of the plan, no batch
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch_size": 0}, InputError, "batch_size must be a number above zero"),
        ({"on_error": "ignore"}, InputError, "on_error must be one of 'raise', 'skip'"),
        ({"nonfinite": "drop"}, InputError, "nonfinite must be one of"),
        ({"dtype": "half precision"}, InputError, "no torch dtype"),
        ({"device": "meta"}, ModelError, r"the model is on \"cpu\", .* never moved"),
        ({"block_rows": 48}, DataError, "power of two"),
        ({"ids": ["a"] * 4}, DataError, "'a' belongs to row 0 and to row 1"),
    ],
)
def test_bad_settings_are_refused(
    mlp: nn.Module, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        quiet(mlp, torch.zeros(4, 8), ["2"], **{"output_dir": None, **options})


def test_ids_that_repeat_across_batches_are_refused(mlp: nn.Module) -> None:
    items = [{"id": n % 6, "x": torch.zeros(8)} for n in range(8)]
    with pytest.raises(DataError, match="'0' belongs to row 0 and to row 6"):
        quiet(mlp, items, ["2"], output_dir=None, batch_size=4)


def test_error_of_the_model_comes_with_the_samples(mlp: nn.Module) -> None:
    handle = fail_at(mlp, 2)
    with pytest.raises(RuntimeError, match="the node went away") as caught:
        quiet(mlp, torch.zeros(12, 8), ["2"], output_dir=None, batch_size=4)
    handle.remove()
    assert "'4', '5', '6', '7'" in "".join(caught.value.__notes__)


# -------------------------------------------------------------------------- summary


def test_stage_seconds_add_up_to_the_wall(mlp: nn.Module, tmp_path: Path) -> None:
    settings = Settings(output_dir=str(tmp_path / "s"), batch_size=16, progress=False)
    data = torch.randn(4000, 8)
    _, summary = run_extraction(mlp, data, ["0", "2"], settings, DataOptions())
    assert summary.rows_done == 4000 and summary.bytes_done == 4000 * 20 * 4
    total = sum(summary.stage_seconds.values())
    assert 0.9 * summary.wall_seconds <= total <= 1.001 * summary.wall_seconds
    assert summary.blocks_done == summary.blocks


def test_nothing_is_shown_when_not_wanted(
    mlp: nn.Module, capsys: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet(mlp, torch.zeros(4, 8), ["2"], output_dir=None)
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == ""

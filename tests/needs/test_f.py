"""Rows F3, F5, F6, F8, F9: which row is which, whatever reads and whoever dies."""

import copy
import hashlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

import torchlens as tl

from .recipes import MLP, OK, WIDTH, CallCounter, D, E, R, num_hooks

# F3: the order is the dataset's, whatever the ids look like.


class Named(D):
    """Items im1, im2 ... whose ids sort another way than they come."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "id": f"im{index + 1}"}


def test_f3_rows_keep_the_order_of_the_dataset(tmp_path: Path) -> None:
    data, model = Named(12), MLP()
    ids = [f"im{i + 1}" for i in range(12)]
    assert sorted(ids) != ids
    E(model, data, "first", tmp_path / "store", block_rows=4)
    store = tl.open_store(tmp_path / "store")
    OK(store, R(model, data, ["first"]), ids=ids)
    assert list(store.metadata["id"]) == ids
    assert list(store.metadata["sample"]) == list(range(12))


def test_f3_a_row_is_found_by_its_id() -> None:
    data, model = Named(12), MLP()
    store, reference = E(model, data, "first"), R(model, data, ["first"])["first"]
    rows = store["first"].rows(ids=["im10", "im2", "im1"])
    np.testing.assert_array_equal(rows, reference[[9, 1, 0]])


def test_f3_ids_given_beside_the_data_are_not_sorted() -> None:
    names = [f"im{i}" for i in (3, 12, 1, 11, 2, 10)]
    x = torch.stack([D(6)[i]["x"] for i in range(6)])
    model = MLP()
    store = E(model, x, "first", ids=names)
    OK(store, R(model, D(6), ["first"]), ids=names)


@pytest.mark.multiprocess
def test_f3_workers_that_finish_out_of_order_change_nothing() -> None:
    class Uneven(Named):
        def __getitem__(self, index: int) -> dict[str, Any]:
            time.sleep(0.02 if index < 4 else 0.0)
            return super().__getitem__(index)

    model, data = MLP(), Uneven(16)
    store = E(model, data, "first", num_workers=2)
    ids = [f"im{i + 1}" for i in range(16)]
    OK(store, R(model, Named(16), ["first"]), ids=ids)


# F5: samplers. Shuffling is ignored and said; what changes the rows is refused.


def test_f5_a_shuffling_loader_gives_dataset_order_and_says_so() -> None:
    model, data = MLP(), D(14)
    with pytest.warns(tl.TorchLensWarning, match="The DataLoader shuffles") as caught:
        store = E(model, DataLoader(data, batch_size=4, shuffle=True), "first")
    assert len(caught) == 1
    reference = R(model, data, ["first"])
    OK(store, reference)
    rows = store["first"].rows(ids=["s9", "s3"])
    np.testing.assert_array_equal(rows, reference["first"][[9, 3]])


def test_f5_two_runs_of_a_shuffling_loader_are_equal(tmp_path: Path) -> None:
    model, data = MLP(), D(14)
    for name, seed in (("one", 1), ("two", 2)):
        generator = torch.Generator().manual_seed(seed)
        shuffled = DataLoader(data, batch_size=4, shuffle=True, generator=generator)
        with pytest.warns(tl.TorchLensWarning, match="shuffles"):
            E(model, shuffled, "first", tmp_path / name)
    one, two = (tl.open_store(tmp_path / name) for name in ("one", "two"))
    assert one.ids == two.ids
    np.testing.assert_array_equal(one["first"][:], two["first"][:])


def test_f5_the_random_state_of_a_loader_and_of_torch_is_not_touched() -> None:
    generator = torch.Generator().manual_seed(1)
    before, torch_before = generator.get_state(), torch.get_rng_state()
    shuffled = DataLoader(D(8), batch_size=4, shuffle=True, generator=generator)
    model = nn.Sequential(nn.Flatten())
    with pytest.warns(tl.TorchLensWarning, match="shuffles"):
        E(model, shuffled, "0")
    assert torch.equal(generator.get_state(), before)
    assert torch.equal(torch.get_rng_state(), torch_before)


def test_f5_a_plain_loader_is_taken_as_it_is() -> None:
    model, data = MLP(), D(14)
    store = E(model, DataLoader(data, batch_size=5), "first")
    OK(store, R(model, data, ["first"]), tolerance=1e-6)
    sizes = [size for commit in store.commits for size in commit.batches["rows"]]
    assert max(sizes) == 5


def test_f5_drop_last_is_ignored_and_said() -> None:
    model, data = MLP(), D(14)
    with pytest.warns(tl.TorchLensWarning, match="every row is extracted"):
        store = E(model, DataLoader(data, batch_size=4, drop_last=True), "first")
    OK(store, R(model, data, ["first"]))


def test_f5_a_subset_is_the_way_to_another_order() -> None:
    model, order = MLP(), [11, 2, 7, 0]
    data = Subset(D(14), order)
    store = E(model, DataLoader(data, batch_size=4), "first")
    OK(store, R(model, data, ["first"]), ids=[f"s{i}" for i in order])


def test_f5_a_subset_that_repeats_a_row_is_refused_by_id() -> None:
    with pytest.raises(tl.DataError, match="'s2' belongs to row 1 and to row 3"):
        E(MLP(), Subset(D(14), [11, 2, 7, 2]), "first")


def test_f5_a_plain_batch_sampler_is_understood() -> None:
    model, data = MLP(), D(14)
    batches = BatchSampler(SequentialSampler(data), 3, drop_last=False)
    store = E(model, DataLoader(data, batch_sampler=batches), "first")
    OK(store, R(model, data, ["first"]), tolerance=1e-6)
    shuffled = BatchSampler(RandomSampler(data), 3, drop_last=False)
    with pytest.warns(tl.TorchLensWarning, match="shuffles"):
        E(model, DataLoader(data, batch_sampler=shuffled), "first")


class Backwards(Sampler[int]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        return iter(reversed(range(self.n)))

    def __len__(self) -> int:
        return self.n


class ByLength(Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        return iter([[3, 1], [0, 2]])

    def __len__(self) -> int:
        return 2


@pytest.mark.parametrize(
    "sampler",
    [
        Backwards(8),
        [5, 3, 1],
        SubsetRandomSampler([1, 2, 3]),
        WeightedRandomSampler([1.0] * 8, 8),
        RandomSampler(range(8), replacement=True),
        RandomSampler(range(8), num_samples=5),
        RandomSampler(range(8), num_samples=16),
        SequentialSampler(range(5)),
        RandomSampler(range(5)),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_f5_samplers_that_change_the_rows_are_refused(sampler: Any) -> None:
    with pytest.raises(tl.DataError) as caught:
        E(MLP(), DataLoader(D(8), batch_size=4, sampler=sampler), "first")
    text = str(caught.value)
    assert type(sampler).__name__ in text
    assert "leaves out, repeats or reorders rows" in text
    assert "torch.utils.data.Subset(dataset, indices)" in text


def test_f5_a_custom_batch_sampler_is_refused() -> None:
    with pytest.raises(tl.DataError, match="groups rows with ByLength"):
        E(MLP(), DataLoader(D(4), batch_sampler=ByLength()), "first")


def test_f5_a_loader_without_batches_is_refused() -> None:
    with pytest.raises(tl.DataError, match="batch_size=None"):
        E(MLP(), DataLoader(D(4), batch_size=None), "first")


def test_f5_the_collate_function_of_the_loader_is_used() -> None:
    def doubled(items: list[dict[str, Any]]) -> dict[str, Tensor]:
        return {"x": 2 * torch.stack([item["x"] for item in items])}

    model, data = MLP(), D(10)
    loader = DataLoader(data, batch_size=4, collate_fn=doubled)
    OK(E(model, loader, "first"), R(model, loader, ["first"]))


# F6: what workers of an iterable dataset repeat is found before the model runs.


class Stream(IterableDataset[dict[str, Any]]):
    """The items of D(n), the same in every worker unless `split`."""

    def __init__(self, n: int, *, split: bool = False, ids: bool = True) -> None:
        self.n = n
        self.split = split
        self.ids = ids

    def order(self) -> list[int]:
        return list(range(self.n))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        step, first = (info.num_workers, info.id) if info and self.split else (1, 0)
        for index in self.order()[first::step]:
            item = D(self.n)[index]
            yield item if self.ids else {"x": item["x"]}


class Shuffled(Stream):
    """Every worker goes through all items, in an order of its own."""

    def order(self) -> list[int]:
        info = get_worker_info()
        generator = torch.Generator().manual_seed(info.id if info else 0)
        order: list[int] = torch.randperm(self.n, generator=generator).tolist()
        return order


class WithLength(Stream):
    def __len__(self) -> int:
        return self.n


@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", [Stream, Shuffled, WithLength])
@pytest.mark.parametrize("ids", [True, False], ids=["ids", "no ids"])
def test_f6_items_that_workers_repeat_are_refused_with_advice(
    kind: type[Stream], ids: bool
) -> None:
    model = MLP()
    counter = CallCounter(model)
    with pytest.raises(tl.DataError) as caught:
        E(model, DataLoader(kind(10, ids=ids), batch_size=4, num_workers=2), "first")
    text = str(caught.value)
    assert "torch.utils.data.get_worker_info()" in text
    assert "num_workers=0" in text
    assert counter.calls == 0


@pytest.mark.multiprocess
def test_f6_workers_that_split_the_items_are_fine() -> None:
    model, data = MLP(), Stream(10, split=True)
    store = E(model, DataLoader(data, batch_size=4, num_workers=2), "first")
    assert sorted(store.ids) == sorted(f"s{i}" for i in range(10))
    reference = R(model, D(10), ["first"])["first"]
    rows = store["first"].rows(ids=[f"s{i}" for i in range(10)])
    np.testing.assert_allclose(rows, reference, rtol=0, atol=1e-6)


@pytest.mark.multiprocess
def test_f6_truly_repeated_content_under_its_own_ids_is_fine() -> None:
    class Same(Stream):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            for item in super().__iter__():
                yield {**item, "x": torch.ones(WIDTH)}

    data = Same(10, split=True)
    store = E(MLP(), DataLoader(data, batch_size=4, num_workers=2), "first")
    assert store["first"].shape == (10, WIDTH)


def test_f6_without_workers_an_iterable_dataset_is_as_good_as_any() -> None:
    model = MLP()
    OK(E(model, Stream(10), "first"), R(model, D(10), ["first"]))


def test_f6_a_length_that_is_not_true_is_refused() -> None:
    class Short(Stream):
        def __len__(self) -> int:
            return self.n + 2

    with pytest.raises(tl.DataError, match="says it has 12 items, but gives 10"):
        E(MLP(), Short(10), "first")


def test_f6_a_stream_that_repeats_an_id_is_refused_by_row() -> None:
    class Twice(Stream):
        def order(self) -> list[int]:
            return [0, 1, 2, 3, 1]

    with pytest.raises(tl.DataError, match="'s1' belongs to row 1 and to row 4"):
        E(MLP(), Twice(5), "first")


# F8: a killed run goes on, and its store equals that of a run left alone, bit by bit.

CHILD = '''
import sys, time
import torch, torchlens as tl
from torch import nn


class Half(nn.Module):
    """Half precision and batch norm's kin: values that a batch's size may change."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(64, 96).bfloat16()
        self.last = nn.Linear(96, 32).bfloat16()

    def forward(self, x):
        time.sleep(float(sys.argv[2]))
        return self.last(torch.tanh(self.first(x)))


class Items(torch.utils.data.Dataset):
    def __len__(self):
        return 90

    def __getitem__(self, i):
        x = torch.randn(64, generator=torch.Generator().manual_seed(i))
        return {"id": f"s{i}", "x": x.bfloat16(), "name": f"item {i}"}


torch.set_num_threads(1)
tl.extract_dataset(
    Half(), Items(), ["first", "last"], output_dir=sys.argv[1], metadata=["name"],
    batch_size=int(sys.argv[3]), block_rows=8, progress=False,
)
'''


def begin(folder: Path, store: str, pause: float, batch: int) -> Any:
    """Start an extraction in a process of its own."""
    script = folder / "child.py"
    script.write_text(CHILD)
    arguments = [str(script), str(folder / store), str(pause), str(batch)]
    return subprocess.Popen([sys.executable, *arguments], cwd=Path(__file__).parents[2])


def commits(store: Path) -> int:
    return len(list(store.glob("_run/*/commits/*")))


def wait_for(number: int, store: Path, child: Any) -> None:
    while commits(store) < number:
        assert child.poll() is None, "the child ended before it could be killed"
        time.sleep(0.005)


def content(store: Path) -> dict[str, str]:
    """Return a digest of every file of a store but its run records."""
    return {
        str(file.relative_to(store)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(store.rglob("*"))
        if file.is_file() and "_run" not in file.parts
    }


@pytest.mark.multiprocess
@pytest.mark.slow
def test_f8_killed_runs_end_bitwise_as_one_left_alone(tmp_path: Path) -> None:
    whole = begin(tmp_path, "whole", 0.0, 4)
    for number in (2, 6):
        child = begin(tmp_path, "killed", 0.1, 4)
        wait_for(number, tmp_path / "killed", child)
        child.kill()
        assert child.wait() == -9
        assert number <= commits(tmp_path / "killed") < 12
    with pytest.raises(tl.StoreError):
        tl.open_store(tmp_path / "killed")
    partial = tl.open_store(tmp_path / "killed", allow_partial=True)
    assert not partial.complete
    assert partial["first"].shape[0] >= 6 * 8
    assert begin(tmp_path, "killed", 0.0, 4).wait() == 0
    assert whole.wait() == 0
    assert content(tmp_path / "killed") == content(tmp_path / "whole")
    one, two = (tl.open_store(tmp_path / name) for name in ("killed", "whole"))
    assert one.complete and one.verify(deep=True).ok
    assert one.ids == two.ids == tuple(f"s{i}" for i in range(90))
    sizes = [[c.batches["rows"] for c in store.commits] for store in (one, two)]
    assert sizes[0] == sizes[1] == [[4, 4]] * 11 + [[2]]


def test_f8_the_batches_of_each_block_are_recorded() -> None:
    store = E(MLP(), D(21), "first", batch_size=3, block_rows=8)
    sizes = [commit.batches["rows"] for commit in store.commits]
    assert sizes == [[3, 3, 2], [3, 3, 2], [3, 2]]


class Stops(D):
    """Fails at one item until it is repaired."""

    broken = True
    store: Path | None = None

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.broken and index == 13:
            self.await_commit()
            raise OSError("disk on fire")
        return super().__getitem__(index)

    def await_commit(self) -> None:
        """Let the block before be written, which happens in another thread."""
        latest = time.monotonic() + 30
        while self.store is not None and time.monotonic() < latest:
            if list(self.store.glob("_run/*/commits/*.json")):
                return
            time.sleep(0.01)


def test_f8_a_resumed_block_is_cut_into_the_same_batches(tmp_path: Path) -> None:
    model, data = MLP(), Stops(21)
    with pytest.raises(tl.DataError, match="disk on fire"):
        E(model, data, "first", tmp_path / "store", batch_size=3, block_rows=8)
    data.broken = False
    E(model, data, "first", tmp_path / "store", batch_size=3, block_rows=8)
    store = tl.open_store(tmp_path / "store")
    sizes = [commit.batches["rows"] for commit in store.commits]
    assert sizes == [[3, 3, 2], [3, 3, 2], [3, 2]]
    whole = E(model, D(21), "first", batch_size=3, block_rows=8)
    np.testing.assert_array_equal(store["first"][:], whole["first"][:])


def test_f8_another_batch_size_may_finish_and_is_recorded(tmp_path: Path) -> None:
    model, data = MLP(), Stops(21)
    data.store = tmp_path / "store"
    with pytest.raises(tl.DataError, match="disk on fire"):
        E(model, data, "first", tmp_path / "store", batch_size=4, block_rows=8)
    data.broken = False
    store = E(model, data, "first", tmp_path / "store", batch_size=2)
    sizes = [commit.batches["rows"] for commit in store.commits]
    assert sizes == [[4, 4], [2, 2, 2, 2], [2, 2, 1]]
    OK(store, R(model, D(21), ["first"]), tolerance=1e-6)


# F9: batch norm in train mode would make rows depend on their batch.


class Normed(nn.Module):
    """Batch norm with statistics of its own, and a part that is frozen in eval."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.frozen = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Dropout(0.5))
        self.last = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.norm.running_mean.uniform_(-1, 1)  # type: ignore[union-attr]
            self.norm.running_var.uniform_(1, 2)  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.frozen(self.norm(self.first(x))))


def in_mixed_modes() -> Normed:
    model = Normed().train()
    model.frozen.eval()
    return model


def facts(model: nn.Module) -> dict[str, Any]:
    """Return everything about a model that an extraction must leave alone."""
    return {
        "modes": {name: module.training for name, module in model.named_modules()},
        "hooks": num_hooks(model),
        "grads": {name: p.requires_grad for name, p in model.named_parameters()},
        "state": {name: t.clone() for name, t in model.state_dict().items()},
    }


def assert_left_alone(model: nn.Module, before: dict[str, Any]) -> None:
    after = facts(model)
    states = before.pop("state"), after.pop("state")
    assert after == before
    for name, tensor in states[0].items():
        assert torch.equal(states[1][name], tensor), name


@pytest.mark.parametrize("layer", ["norm", "frozen.1", "last"])
def test_f9_rows_do_not_depend_on_batch_mates(layer: str) -> None:
    model = in_mixed_modes()
    reference = R(copy.deepcopy(model).eval(), D(12), [layer])[layer]
    stores = [E(model, D(12), layer, batch_size=size) for size in (1, 5, 12)]
    for store in stores:
        np.testing.assert_allclose(store[layer][:], reference, rtol=0, atol=1e-6)


def test_f9_modes_and_statistics_are_left_as_found() -> None:
    model = in_mixed_modes()
    before = facts(model)
    OK(E(model, D(12), ["norm", "last"]), R(model, D(12), ["norm", "last"]))
    assert_left_alone(model, before)
    assert model.norm.training and not model.frozen.training


def test_f9_an_eval_model_stays_in_eval() -> None:
    model = Normed().eval()
    before = facts(model)
    E(model, D(12), "last")
    assert_left_alone(model, before)


class Fragile(Normed):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if (x > 90).any():
            raise ValueError("too large a value")
        return y


def test_f9_modes_are_restored_after_an_error_in_the_model() -> None:
    model = Fragile().train()
    model.frozen.eval()
    before = facts(model)
    items = [D(12)[i] for i in range(12)]
    items[9] = {"id": "s9", "x": torch.full((WIDTH,), 99.0)}
    layers = {"out": "self"}
    with pytest.raises(ValueError, match="too large") as caught:
        E(model, items, layers)
    assert "'s8', 's9', 's10', 's11'" in "\n".join(caught.value.__notes__)
    assert_left_alone(model, before)


@pytest.mark.parametrize("fault", ["data", "layer", "budget", "nonfinite", "write"])
def test_f9_modes_are_restored_after_any_other_error(
    fault: str, tmp_path: Path
) -> None:
    model = in_mixed_modes()
    before = facts(model)
    items: Any = [D(12)[i] for i in range(12)]
    layer, options = "last", {}
    if fault == "data":
        items = Stops(21)
    elif fault == "layer":
        layer = "lost"
    elif fault == "budget":
        options = {"max_bytes": 10}
    elif fault == "nonfinite":
        items[9]["x"][0] = float("nan")
        options = {"nonfinite": "raise"}
    else:
        (tmp_path / "file").write_text("no folder")
    out = tmp_path / "file" / "store" if fault == "write" else None
    with pytest.raises(tl.TorchLensError):
        E(model, items, layer, out, **options)
    assert_left_alone(model, before)


def test_f9_train_mode_is_run_only_when_asked_for() -> None:
    model, example = Normed().train(), torch.stack([D(12)[i]["x"] for i in range(4)])
    with pytest.raises(tl.PlanError, match="batch norm in train mode"):
        tl.plan(model, example, "norm", training=True)
    before = facts(model)
    plan = tl.plan(model, example, "norm", training=True, allow=["mixing"])
    store = E(model, D(12), plan)
    trained = copy.deepcopy(model)
    rows: list[Tensor] = []
    trained.norm.register_forward_hook(lambda m, a, o: rows.append(o.detach().clone()))
    with torch.no_grad():
        for start in range(0, 12, 4):
            trained(torch.stack([D(12)[i]["x"] for i in range(start, start + 4)]))
    np.testing.assert_array_equal(store["norm"][:], torch.cat(rows).numpy())
    assert store.info()["runs"][0]["identity"]["training"] is True
    assert_left_alone(model, before)


def test_f9_an_overridden_train_method_is_not_called() -> None:
    class Stubborn(Normed):
        def train(self, mode: bool = True) -> "Stubborn":
            raise RuntimeError("hands off")

    model = Stubborn()
    before = facts(model)
    E(model, D(8), "norm")
    assert_left_alone(model, before)


def test_f3_a_joined_dataset_keeps_its_order() -> None:
    model, data = MLP(), ConcatDataset([Subset(D(9), [4, 0]), Subset(D(9), [8, 1, 2])])
    typed: Dataset[Any] = data
    store = E(model, typed, "first")
    OK(store, R(model, typed, ["first"]), ids=["s4", "s0", "s8", "s1", "s2"])

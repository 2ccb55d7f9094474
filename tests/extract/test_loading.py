"""Batches carry their rows, never cross a block, and say what could not be read."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info

from torchlens.errors import DataError, InputError
from torchlens.extract.blocks import cut_blocks
from torchlens.extract.loading import BatchMaker, LoadedBatch, load_batches
from torchlens.extract.sample_ids import IdRule, Metadata
from torchlens.extract.samples import Source, open_source
from torchlens.extract.streams import count_stream


class Dicts(Dataset[Any]):
    """Rows whose id, age and x tell which row they are; some cannot be read."""

    def __init__(self, length: int = 23, broken: frozenset[int] = frozenset()) -> None:
        self.length = length
        self.broken = broken

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, row: int) -> dict[str, Any]:
        if row in self.broken:
            raise OSError(f"file {row} is torn")
        return {"id": f"s{row}", "age": row * 2, "x": torch.full((2,), float(row))}


class Quick(Dicts):
    """The same, fetched by the batch."""

    asked: list[list[int]] = []

    def __getitems__(self, rows: list[int]) -> list[dict[str, Any]]:
        self.asked.append(rows)
        return [self[row] for row in rows]


class Stream(IterableDataset[Any]):
    def __init__(self, length: int = 23, split: bool = True) -> None:
        self.length = length
        self.split = split

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        rows = range(self.length)
        if worker is not None and self.split:
            rows = range(worker.id, self.length, worker.num_workers)
        return iter([Dicts(self.length)[row] for row in rows])


def maker(source: Source, dropped: frozenset[str] = frozenset({"id"})) -> BatchMaker:
    return BatchMaker(source.collate, IdRule(key="id"), Metadata({}, ("age",)), dropped)


def load(source: Source, block_rows: int = 8, **options: Any) -> list[LoadedBatch]:
    assert source.num_rows is not None
    blocks = cut_blocks(source.num_rows, block_rows)
    return list(load_batches(source, blocks, 3, maker(source), **options))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("dataset", [Dicts(), Quick()], ids=["plain", "quick"])
def test_batches_carry_rows_ids_metadata_and_inputs(
    dataset: Dicts, num_workers: int
) -> None:
    batches = load(open_source(dataset, num_workers=num_workers))
    assert [b.all_rows for b in batches[:4]] == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7],
        [8, 9, 10],
    ]
    assert [row for b in batches for row in b.rows] == list(range(23))
    for batch in batches:
        assert batch.ids == [f"s{row}" for row in batch.rows]
        assert batch.metadata == {"age": [2 * row for row in batch.rows]}
        assert batch.inputs["x"][:, 0].tolist() == batch.rows
        assert set(batch.inputs) == {"age", "x"}


def test_batched_fetching_is_used_where_there_is_one() -> None:
    Quick.asked = []
    load(open_source(Quick(5)))
    assert Quick.asked == [[0, 1, 2], [3, 4]]


def test_only_the_blocks_asked_for_are_read() -> None:
    class Strict(Dicts):
        def __getitem__(self, row: int) -> dict[str, Any]:
            assert 8 <= row < 16
            return super().__getitem__(row)

    source = open_source(Strict())
    block = cut_blocks(23, 8)[1]
    batches = list(load_batches(source, [block], 3, maker(source)))
    assert [b.all_rows for b in batches] == [[8, 9, 10], [11, 12, 13], [14, 15]]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_item_that_cannot_be_read_is_named(num_workers: int) -> None:
    source = open_source(Dicts(broken=frozenset({4})), num_workers=num_workers)
    with pytest.raises(DataError, match="Item 4 .*OSError: file 4 is torn") as caught:
        load(source)
    assert "Traceback" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("kind", [Dicts, Quick])
def test_items_that_cannot_be_read_are_skipped_and_listed(kind: type[Dicts]) -> None:
    source = open_source(kind(broken=frozenset({4, 8, 9, 10})))
    batches = load(source, on_error="skip")
    second, fourth = batches[1], batches[3]
    assert second.all_rows == [3, 4, 5] and second.rows == [3, 5]
    assert second.ids == ["s3", "unreadable-4", "s5"]
    assert second.metadata == {"age": [6, None, 10]}
    assert second.inputs["x"][:, 0].tolist() == [3, 5]
    assert fourth.rows == [] and fourth.inputs is None
    assert [failure.row for failure in fourth.failures] == [8, 9, 10]


def test_items_that_do_not_join_are_named() -> None:
    source = open_source([torch.zeros(2), torch.zeros(3)])
    make = BatchMaker(source.collate, IdRule(), Metadata())
    with pytest.raises(
        InputError, match=r"rows 0 to 1 cannot be joined.*pass collate="
    ):
        list(load_batches(source, cut_blocks(2, 2), 2, make))


def test_own_collate_gets_whole_items() -> None:
    seen: list[Any] = []

    def collate(items: list[Any]) -> Any:
        seen.extend(items)
        return torch.stack([item["x"] for item in items])

    load(open_source(Dicts(4), collate=collate))
    assert [item["id"] for item in seen] == ["s0", "s1", "s2", "s3"]


def test_reading_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    load(open_source(TensorDatasetOfDicts()))
    assert torch.equal(torch.get_rng_state(), before)


class TensorDatasetOfDicts(Dicts):
    """A dataset with another one inside, as users have them."""

    inner = TensorDataset(torch.arange(23.0))


@pytest.mark.multiprocess
def test_spawned_workers_read_the_same() -> None:
    from torch.utils.data import DataLoader

    loader = DataLoader(Dicts(), num_workers=1, multiprocessing_context="spawn")
    plain, spawned = load(open_source(Dicts())), load(open_source(loader))
    for one, other in zip(plain, spawned, strict=True):
        assert one.all_rows == other.all_rows and one.ids == other.ids
        assert torch.equal(one.inputs["x"], other.inputs["x"])


def test_stream_gives_the_same_batches_as_indexed_rows() -> None:
    stream = count_stream(open_source(Stream())).source
    for one, other in zip(load(stream), load(open_source(Dicts())), strict=True):
        assert one.all_rows == other.all_rows and one.ids == other.ids


def test_stream_skips_blocks_that_are_there() -> None:
    source = count_stream(open_source(Stream())).source
    blocks = cut_blocks(23, 8)[1:]
    rows = [batch.all_rows for batch in load_batches(source, blocks, 3, maker(source))]
    assert rows[0] == [8, 9, 10] and rows[-1] == [22]


@pytest.mark.multiprocess
def test_stream_split_over_workers_has_one_order_for_every_batch_size() -> None:
    source = count_stream(open_source(Stream(), num_workers=2)).source
    assert source.num_rows == 23
    orders = []
    for batch_size in (2, 5):
        batches = load_batches(source, cut_blocks(23, 8), batch_size, maker(source))
        orders.append([name for batch in batches for name in batch.ids])
    assert orders[0] == orders[1] and sorted(orders[0]) == sorted(
        f"s{row}" for row in range(23)
    )


@pytest.mark.multiprocess
def test_stream_repeated_by_its_workers_is_refused() -> None:
    with pytest.raises(DataError, match="each row would come 2 times.*get_worker_info"):
        count_stream(open_source(Stream(split=False), num_workers=2))


def test_stream_that_is_empty_or_shrinks_is_refused() -> None:
    with pytest.raises(DataError, match="has no items"):
        count_stream(open_source(Stream(0)))
    source = count_stream(open_source(Stream(9))).source
    source.items.length = 7
    with pytest.raises(DataError, match="ended before row 7"):
        load(source)

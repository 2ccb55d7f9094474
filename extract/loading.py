"""Batches with their row numbers, ids and metadata, never crossing a block.

Items are read in worker processes if wanted; what a worker runs is picklable and holds
no open store, so spawn and fork are both safe.  Row numbers travel with the items, so
the order in which workers finish decides nothing.
"""

import traceback
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from torchlens.errors import DataError, InputError

from .blocks import Block
from .sample_ids import IdRule, Metadata
from .samples import LoaderOptions, Source

__all__ = ["BatchMaker", "Failure", "LoadedBatch", "load_batches", "read_items"]

OnError = Literal["raise", "skip"]


class Failure(NamedTuple):
    """An item that could not be read, as text, since it may cross processes."""

    row: int
    message: str
    details: str


class LoadedBatch(NamedTuple):
    """One batch as it comes from the loader.

    `rows` are those that were read, in order; `inputs` is their collated batch, `None`
    when there are none.  `ids` and `metadata` belong to `all_rows`.
    """

    all_rows: list[int]
    rows: list[int]
    ids: list[str]
    metadata: dict[str, list[Any]]
    inputs: Any
    failures: list[Failure]


def read_items(items: Any, rows: Sequence[int]) -> list[tuple[int, Any]]:
    """Return (row, item) for each row, with a `Failure` for one that cannot be read."""
    return [(row, _read_item(items, row)) for row in rows]


def _read_item(items: Any, row: int) -> Any:
    try:
        return items[row]
    # Whatever a dataset raises is a fact about this row; the policy is applied where
    # the batch arrives.
    except Exception as error:
        return Failure(row, f"{type(error).__name__}: {error}", traceback.format_exc())


class _Rows(Dataset[list[tuple[int, Any]]]):
    """The dataset as the loader sees it: several rows at once, with their numbers."""

    def __init__(self, items: Any) -> None:
        self._items = items

    def __getitem__(self, row: int) -> Any:
        return row, _read_item(self._items, row)

    def __getitems__(self, rows: list[int]) -> list[tuple[int, Any]]:
        many = getattr(self._items, "__getitems__", None)
        if many is None:
            return read_items(self._items, rows)
        try:
            found = many(rows)
        except Exception:
            # One at a time tells which row it is.
            return read_items(self._items, rows)
        return list(zip(rows, found, strict=True))


@dataclass(frozen=True, slots=True)
class BatchMaker:
    """Turns rows and items into a `LoadedBatch`; runs in the workers.

    Attributes:
        collate: Joins items.
        ids: Gives their ids.
        metadata: Gives their metadata entries.
        dropped: Entries of dict items that torch's own collate is not given.
    """

    collate: Any
    ids: IdRule
    metadata: Metadata
    dropped: frozenset[str] = frozenset()

    def __call__(self, pairs: list[tuple[int, Any]]) -> LoadedBatch:
        """Collate items that were read, and list those that were not."""
        ids, items, rows, failures = [], [], [], []
        values: list[list[Any]] = []
        for row, item in pairs:
            if isinstance(item, Failure):
                ids.append(self.ids.without_item(row))
                values.append([None] * len(self.metadata.item_keys))
                failures.append(item)
            else:
                ids.append(self.ids.id_of(row, item))
                values.append(self.metadata.of_item(row, item))
                items.append(self._without_dropped(item))
                rows.append(row)
        columns = {
            key: [line[at] for line in values]
            for at, key in enumerate(self.metadata.item_keys)
        }
        inputs = self._join(items, rows) if items else None
        all_rows = [row for row, _ in pairs]
        return LoadedBatch(all_rows, rows, ids, columns, inputs, failures)

    def _without_dropped(self, item: Any) -> Any:
        if not self.dropped or self.collate is not default_collate:
            return item
        if not isinstance(item, Mapping):
            return item
        return {key: item[key] for key in item if key not in self.dropped}

    def _join(self, items: list[Any], rows: list[int]) -> Any:
        try:
            return self.collate(items)
        except (TypeError, RuntimeError, ValueError, KeyError) as error:
            raise InputError(
                f"The items of rows {rows[0]} to {rows[-1]} cannot be joined into one "
                f"batch: {str(error).rstrip('.')}. Make them equal in shape and type, "
                f"images with a transform that resizes and crops, or pass collate= "
                f"with a function from a list of items to a batch."
            ) from error


class _BatchRows(Sampler[list[int]]):
    """Row numbers of every batch of some blocks, in order."""

    def __init__(self, blocks: Sequence[Block], batch_size: int) -> None:
        self._blocks = blocks
        self._batch_size = batch_size

    def __iter__(self) -> Iterator[list[int]]:
        for block in self._blocks:
            for rows in block.batches(self._batch_size):
                yield list(rows)

    def __len__(self) -> int:
        return sum(-(-len(block) // self._batch_size) for block in self._blocks)


def load_batches(
    source: Source,
    blocks: Sequence[Block],
    batch_size: int,
    make: BatchMaker,
    *,
    on_error: OnError = "raise",
    pin_memory: bool = False,
) -> Generator[LoadedBatch]:
    """Yield the batches of `blocks`, in order; closing it ends the workers.

    Args:
        source: The dataset.
        blocks: What to read; rows of other blocks are not.
        batch_size: Rows of a batch; a block's last one may be shorter.
        make: Collates a batch.
        on_error: Whether an item that cannot be read ends the run.
        pin_memory: Whether batches go to page-locked memory.

    Raises:
        DataError: If an item cannot be read and `on_error` is "raise".
    """
    batches: Iterable[LoadedBatch]
    if source.streamed:
        batches = _stream_batches(source, blocks, batch_size, make)
    else:
        batches = _loader(
            source.options,
            _Rows(source.items),
            batch_sampler=_BatchRows(blocks, batch_size),
            collate_fn=make,
            pin_memory=pin_memory,
        )
    for batch in batches:
        if batch.failures and on_error == "raise":
            raise _unreadable(batch)
        yield batch


def _unreadable(batch: LoadedBatch) -> DataError:
    failure = batch.failures[0]
    name = batch.ids[batch.all_rows.index(failure.row)]
    error = DataError(
        f"Item {failure.row} of the dataset (id {name!r}) could not be read: "
        f'{failure.message}. Mend it, or pass on_error="skip" to leave such rows '
        f"empty and listed."
    )
    error.add_note(failure.details)
    return error


def _loader(options: LoaderOptions, dataset: Any, **settings: Any) -> DataLoader[Any]:
    more: dict[str, Any] = {}
    if options.num_workers:
        more = {
            "prefetch_factor": options.prefetch_factor,
            "timeout": options.timeout_seconds,
            "worker_init_fn": options.worker_init_fn,
            "multiprocessing_context": options.multiprocessing_context,
        }
    return DataLoader(
        dataset,
        num_workers=options.num_workers,
        # A generator of its own leaves the caller's random state as it is.
        generator=torch.Generator().manual_seed(0),
        **settings,
        **more,
    )


def _as_is(item: Any) -> Any:
    return item


def stream_items(source: Source) -> Iterator[Any]:
    """Yield the items of an iterable dataset, in the one order of all its passes."""
    # One item a time and not batches: then the order in which several workers take
    # turns does not depend on the batch size.
    yield from _loader(source.options, source.items, batch_size=None, collate_fn=_as_is)


def _stream_batches(
    source: Source, blocks: Sequence[Block], batch_size: int, make: BatchMaker
) -> Iterator[LoadedBatch]:
    ranges = (rows for block in blocks for rows in block.batches(batch_size))
    wanted = next(ranges, None)
    pairs: list[tuple[int, Any]] = []
    for row, item in enumerate(stream_items(source)):
        if wanted is None:
            return
        if row < wanted.start:
            continue
        pairs.append((row, item))
        if row == wanted.stop - 1:
            yield make(pairs)
            pairs, wanted = [], next(ranges, None)
    if wanted is not None:
        raise DataError(
            f"The iterable dataset ended before row {wanted.stop - 1}, though it has "
            f"{source.num_rows} rows by its length or by an earlier pass. Every pass "
            f"must give the same items."
        )

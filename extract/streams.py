"""Iterable datasets: counted, and checked for items that workers repeat."""

import dataclasses
from collections import Counter

from torchlens.errors import DataError

from .fingerprints import digest_ids, digest_item
from .loading import stream_items
from .samples import Source

__all__ = ["CountedStream", "count_stream"]

_COMPARED_ROUNDS = 4
# Up to here every item is digested, so that repeats show in whatever order they come.
_COMPARED_ITEMS = 1 << 16


@dataclasses.dataclass(frozen=True, slots=True)
class CountedStream:
    """An iterable dataset whose rows are known, with a digest of its first items."""

    source: Source
    fingerprint: str
    first_items: tuple[object, ...]


def count_stream(source: Source, num_shown: int = 3) -> CountedStream:
    """Read an iterable dataset once, fix its number of rows, and keep the first ones.

    Every array of a store declares its rows at the start, and ids must be unique, so
    one pass without the model comes first.

    Raises:
        DataError: If it is empty, has another number of items than it says, or if its
            workers repeat each other's items.
    """
    workers = max(1, source.options.num_workers)
    compared = _COMPARED_ITEMS if workers > 1 else _COMPARED_ROUNDS
    digests: list[str] = []
    first: list[object] = []
    count = 0
    for item in stream_items(source):
        if count < compared:
            digests.append(digest_item(item))
        if len(first) < num_shown:
            first.append(item)
        count += 1
    if count == 0:
        raise DataError("The iterable dataset has no items; nothing can be extracted.")
    _check_workers(digests, workers, seen_all=len(digests) == count)
    if source.num_rows not in (None, count):
        raise DataError(
            f"The iterable dataset says it has {source.num_rows} items, but gives "
            f"{count}. Mend its __len__ or its __iter__; it may also have none."
        )
    counted = dataclasses.replace(source, num_rows=count)
    fingerprint = digest_ids(digests[: _COMPARED_ROUNDS * workers])
    return CountedStream(counted, fingerprint, tuple(first))


def _check_workers(digests: list[str], workers: int, *, seen_all: bool) -> None:
    if workers == 1:
        return
    first = digests[: _COMPARED_ROUNDS * workers]
    rounds = [first[at : at + workers] for at in range(0, len(first), workers)]
    whole = [names for names in rounds if len(names) == workers]
    in_step = bool(whole) and all(len(set(names)) == 1 for names in whole)
    shuffled = seen_all and all(n % workers == 0 for n in Counter(digests).values())
    if in_step or shuffled:
        raise DataError(
            f"The iterable dataset is read by {workers} workers and every one gives "
            f"the same items, so each row would come {workers} times. Split the items "
            f"in its __iter__ by torch.utils.data.get_worker_info(), or use "
            f"num_workers=0."
        )

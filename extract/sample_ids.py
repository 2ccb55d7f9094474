"""The id and the metadata of each row: where they come from, and that they are valid.

Ids and values come out of the very item that becomes the row, never from a second
pass, unless the caller gives them for all rows at once.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from torchlens.errors import DataError

from .fingerprints import digest_ids
from .samples import Source

__all__ = ["IdRule", "Metadata", "UniqueIds", "make_id_rule", "make_metadata"]

# Above this many, duplicates are left to the store's final check: a set of all
# ids would make memory grow with the dataset.
_WATCHED_IDS = 1 << 18
_RESERVED = frozenset({"id", "sample"})


@dataclass(frozen=True, slots=True)
class IdRule:
    """Gives the id of a row.  Picklable when its function is.

    At most one of `known`, `key`, `function` is set; with none the row number is it.
    """

    known: tuple[str, ...] | None = None
    key: str | None = None
    function: Callable[[Any], object] | None = None

    @property
    def from_items(self) -> bool:
        """Whether ids are only known when items are read."""
        return self.key is not None or self.function is not None

    def id_of(self, row: int, item: Any) -> str:
        """Return the id of `item`, which is row `row`."""
        if self.known is not None:
            return self.known[row]
        if self.function is not None:
            return _as_text(self.function(item))
        if self.key is None:
            return str(row)
        if not isinstance(item, Mapping) or self.key not in item:
            raise DataError(
                f"Row {row} has no entry {self.key!r}, which ids come from. Every "
                f"item must have it; or give ids= as a sequence or a callable."
            )
        return _as_text(item[self.key])

    def without_item(self, row: int) -> str:
        """Return the id of a row whose item could not be read."""
        if self.known is not None:
            return self.known[row]
        return f"unreadable-{row}" if self.from_items else str(row)

    def identity(self) -> str:
        """Return what tells these ids from others before items are read."""
        if self.known is not None:
            return f"sha256:{digest_ids(self.known)}"
        if self.key is not None:
            return f"entry {self.key!r} of the items"
        return "callable on the items" if self.function else "row numbers"


def _as_text(value: object) -> str:
    if isinstance(value, torch.Tensor | np.generic | np.ndarray):
        if value.size != 1 if isinstance(value, np.ndarray) else _numel(value) != 1:
            raise DataError(
                f"An id must be one value, but an item gives {type(value).__name__} "
                f"of shape {tuple(value.shape)}."
            )
        value = value.item()
    if isinstance(value, bytes):
        value = value.decode()
    if value is None or isinstance(value, float):
        raise DataError(f"An id must be text or an integer, but an item gives {value}.")
    return _storable(str(value))


def _storable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"The id {text!r} cannot be stored as text: {error.reason} (names of files "
            "that are not UTF-8 come like this). Give other ids with ids=, or rename "
            "the files."
        ) from error
    return text


def _numel(value: Any) -> int:
    return int(np.prod(value.shape))


def make_id_rule(
    ids: Callable[[Any], object] | str | Iterable[object] | None,
    source: Source,
    first_item: Any,
    metadata: "Metadata",
) -> IdRule:
    """Decide where ids come from.

    Args:
        ids: A callable on the item, the name of a metadata column or of an entry of
            dict items, all ids in row order, or `None`: the entry "id" of dict items,
            else the file names of a folder, else the row number.
        source: The dataset.
        first_item: Any of its items.
        metadata: Columns given beside the data.

    Raises:
        DataError: If ids are repeated, of the wrong count, or cannot be found.
    """
    if callable(ids):
        return IdRule(function=ids)
    if isinstance(ids, str):
        if ids in metadata.columns:
            return _known_ids(metadata.columns[ids], source)
        if isinstance(first_item, Mapping) and ids in first_item:
            return IdRule(key=ids)
        raise DataError(
            f"ids={ids!r} names neither a metadata column "
            f"({', '.join(metadata.columns) or 'there are none'}) nor an entry of the "
            f"items ({_entries(first_item)})."
        )
    if ids is not None:
        return _known_ids(ids, source)
    if isinstance(first_item, Mapping) and "id" in first_item:
        return IdRule(key="id")
    if source.file_names is not None:
        return IdRule(known=tuple(map(_storable, source.file_names)))
    return IdRule()


def _known_ids(values: Iterable[object], source: Source) -> IdRule:
    known = tuple(_as_text(value) for value in values)
    if source.num_rows is not None and len(known) != source.num_rows:
        raise DataError(
            f"ids= has {len(known)} entries, but the dataset has {source.num_rows} "
            f"rows. Give one id a row, in the order of the dataset."
        )
    UniqueIds(watched=len(known)).add(0, known)
    return IdRule(known=known)


def _entries(item: Any) -> str:
    if isinstance(item, Mapping):
        return ", ".join(map(str, item))
    return f"they are {type(item).__name__}, not dict"


class UniqueIds:
    """Refuses an id that was seen before, within what fits in a bounded memory."""

    def __init__(self, watched: int = _WATCHED_IDS) -> None:
        self._watched = watched
        self._rows: dict[str, int] = {}

    def add(self, first_row: int, ids: Sequence[str]) -> None:
        """Note the ids of consecutive rows.

        Raises:
            DataError: If one of them is known already.
        """
        for row, name in enumerate(ids, first_row):
            earlier = self._rows.get(name)
            if earlier is not None and earlier != row:
                raise DataError(
                    f"The id {name!r} belongs to row {earlier} and to row {row}. Ids "
                    f"must be unique; give others with ids=, or remove the repeat. An "
                    f"iterable dataset read by several workers repeats its items "
                    f"unless it splits them by torch.utils.data.get_worker_info()."
                )
            if len(self._rows) < self._watched:
                self._rows[name] = row


@dataclass(frozen=True, slots=True)
class Metadata:
    """Columns for the samples table: given beside the data, or entries of dict items.

    `columns` holds whole columns in row order, `item_keys` names of entries.
    """

    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    item_keys: tuple[str, ...] = ()

    def of_item(self, row: int, item: Any) -> list[Any]:
        """Return the values of `item_keys` of an item, as plain Python values."""
        values = []
        for key in self.item_keys:
            if not isinstance(item, Mapping) or key not in item:
                raise DataError(
                    f"Row {row} has no entry {key!r}, which metadata= asks for. Its "
                    f"entries: {_entries(item)}."
                )
            values.append(_plain(item[key], key))
        return values

    def of_rows(self, rows: range) -> dict[str, list[Any]]:
        """Return the given columns for some rows."""
        return {
            name: [_plain(value, name) for value in values[rows.start : rows.stop]]
            for name, values in self.columns.items()
        }


def _plain(value: Any, name: str) -> Any:
    if isinstance(value, torch.Tensor | np.generic | np.ndarray):
        if _numel(value) != 1:
            raise DataError(
                f"The metadata entry {name!r} has shape {tuple(value.shape)}; a column "
                f"holds one value a row."
            )
        return value.item()
    return value


def make_metadata(metadata: Any, source: Source) -> Metadata:
    """Bring `metadata` into columns.

    Args:
        metadata: A mapping of columns or a DataFrame with one row a sample, the names
            of entries of dict items, or `None`.
        source: The dataset.

    Raises:
        DataError: If a column has the wrong length or a reserved name.
    """
    if metadata is None:
        return Metadata()
    if isinstance(metadata, str):
        metadata = (metadata,)
    if not isinstance(metadata, Mapping) and not hasattr(metadata, "columns"):
        keys = tuple(metadata)
        if not all(isinstance(key, str) and key not in _RESERVED for key in keys):
            raise DataError(
                "metadata= must be a mapping of columns, a DataFrame, or the names of "
                "entries of dict items; 'id' and 'sample' are names that the samples "
                "table uses itself."
            )
        return Metadata(item_keys=keys)
    names = list(metadata.columns) if hasattr(metadata, "columns") else list(metadata)
    columns = {str(name): list(metadata[name]) for name in names}
    for name, values in columns.items():
        if name in _RESERVED:
            raise DataError(
                f"A metadata column is called {name!r}, a name the samples table uses "
                f"itself. Rename it; ids are given with ids={name!r}."
            )
        if source.num_rows is not None and len(values) != source.num_rows:
            raise DataError(
                f"The metadata column {name!r} has {len(values)} values, but the "
                f"dataset has {source.num_rows} rows."
            )
    return Metadata(columns=columns)

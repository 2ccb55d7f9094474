"""LayerReader: one layer's rows, indexed as numpy would, numpy out."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from torchlens.errors import DataError

from .dtypes import carrier, empty_rows, native
from .run_record import RunRecord
from .shard_reader import open_reader

if TYPE_CHECKING:
    from .store import Store


class LayerReader:
    """The committed rows of one layer: [rows, *row_shape].

    Of a finished store position i is row i of the dataset.  Of a running job the
    positions count the committed rows only, in dataset order; `row_numbers` tells
    which they are.

    Example:
        `store["layer4"][10:20]`, `[-1]`, `[[3, 1, 2]]`, `[mask]`, `[::-1]`, and
        `store["layer4"].rows(ids=["img7"])`.
    """

    def __init__(
        self,
        store: "Store",
        run: RunRecord,
        name: str,
        spans: Sequence[tuple[int, int]],
    ) -> None:
        self._store = store
        self._run = run
        self._reader = open_reader(store.objects, run, name)
        self._dtype_name = run.arrays[name].dtype
        self._row_shape = run.arrays[name].row_shape
        self._chunk_rows = run.formats[name].chunk_rows
        self._starts = np.array([start for start, _ in spans], np.int64)
        counts = [stop - start for start, stop in spans]
        self._ends = np.cumsum([0, *counts], dtype=np.int64)
        self.name = name

    @property
    def shape(self) -> tuple[int, ...]:
        """Committed rows, then the shape of a row."""
        return (int(self._ends[-1]), *self._row_shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of what comes out; bfloat16 as the `ml_dtypes` type."""
        return native(self._dtype_name)

    @property
    def dtype_name(self) -> str:
        """The logical dtype's name."""
        return self._dtype_name

    @property
    def ndim(self) -> int:
        """Number of axes, the sample axis included."""
        return len(self._row_shape) + 1

    @property
    def nbytes(self) -> int:
        """Bytes of all committed rows."""
        return len(self) * self._run.arrays[self.name].row_bytes

    @property
    def chunk_rows(self) -> int:
        """Rows of a chunk, the least that is read at a time."""
        return self._chunk_rows

    @property
    def num_chunks(self) -> int:
        """Number of chunks that `iter_chunks` gives."""
        return -(-len(self) // self._chunk_rows)

    @property
    def row_numbers(self) -> NDArray[np.int64]:
        """Dataset index of each position."""
        positions = np.arange(len(self), dtype=np.int64)
        return self._to_dataset(positions)

    @property
    def ids(self) -> tuple[str, ...]:
        """Sample id of each position."""
        return self._store.ids_of_rows(self.row_numbers)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __repr__(self) -> str:
        return f"<LayerReader {self.name!r} {list(self.shape)} {self._dtype_name}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self._store, self.name)

    def __iter__(self) -> Iterator[NDArray[Any]]:
        for _, rows in self.iter_chunks():
            yield from rows.copy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        values = self.numpy()
        return values if dtype is None else values.astype(dtype)

    def __getitem__(self, key: Any) -> NDArray[Any]:
        """Return rows by position: integer, slice, integer array or boolean mask.

        A tuple indexes the feature axes too, as in numpy, after whole rows are read.
        """
        if isinstance(key, tuple):
            first = key[0] if key else slice(None)
            if first is Ellipsis:
                whole: NDArray[Any] = self.numpy()[key]
                return whole
            if isinstance(first, slice):
                part: NDArray[Any] = self[first][:, *key[1:]]
                return part
            # Index arrays of several axes go together, so this one stays one.
            rows = self[[first]] if _is_integer(first) else self[first]
            place = 0 if _is_integer(first) else np.arange(len(rows))
            result: NDArray[Any] = rows[place, *key[1:]]
            return result
        if key is Ellipsis:
            return self.numpy()
        if isinstance(key, slice):
            return self._read_slice(key)
        if _is_integer(key):
            position = self._checked(np.array([int(key)], np.int64))
            row: NDArray[Any] = self._read_positions(position)[0]
            return row
        return self._read_positions(self._positions(key))

    def numpy(self) -> NDArray[Any]:
        """Return all committed rows."""
        return self[:]

    def rows(self, ids: Sequence[str]) -> NDArray[Any]:
        """Return the rows of these sample ids, in their order.

        Raises:
            DataError: If an id is unknown, or its row is not committed yet.
        """
        return self._read_positions(self._from_dataset(self._store.rows_of(ids)))

    def iter_chunks(
        self, chunks: Sequence[int] | None = None
    ) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yield (first position, rows) chunk by chunk, in a buffer that is reused.

        Args:
            chunks: Which chunks, in which order; a permutation of
                `range(reader.num_chunks)` shuffles.  None gives all in order.

        Copy the rows to keep them: the next step overwrites them.
        """
        buffer = self._empty(min(self._chunk_rows, max(1, len(self))))
        for chunk in range(self.num_chunks) if chunks is None else chunks:
            start = int(chunk) * self._chunk_rows
            count = min(self._chunk_rows, len(self) - start)
            if count < 1 or start < 0:
                raise DataError(
                    f"Layer {self.name!r} has {self.num_chunks} chunks, numbered from "
                    f"0; chunk {chunk} was asked for."
                )
            self._read_range(start, buffer[:count])
            yield start, buffer[:count].view(self.dtype)

    def read_into(self, start: int, out: NDArray[Any]) -> None:
        """Fill `out` [n, *row_shape] with the rows from position `start` on.

        Args:
            start: First position.
            out: A contiguous array of the layer's dtype (uint16 does for bfloat16).
        """
        fits = out.shape[1:] == self._row_shape and out.flags.c_contiguous
        if not fits or out.dtype.itemsize != carrier(self._dtype_name).itemsize:
            raise DataError(
                f"Rows of {self!r} are read into a contiguous array of that dtype and "
                f"row shape; {out.dtype} {list(out.shape)} came."
            )
        if len(out):
            self._checked(np.array([start, start + len(out) - 1], np.int64))
            self._read_range(start, out.view(carrier(self._dtype_name)))

    def _read_slice(self, key: slice) -> NDArray[Any]:
        start, stop, step = key.indices(len(self))
        positions = range(start, stop, step)
        count = len(positions)
        if abs(step) == 1 or count < 2:
            out = self._empty(count)
            if count:
                self._read_range(min(positions), out)
            return (out[::-1] if step < 0 else out).view(self.dtype)
        return self._read_positions(np.arange(start, stop, step, dtype=np.int64))

    def _read_range(self, start: int, out: NDArray[Any]) -> None:
        """Fill `out`, of the carrier dtype, from consecutive positions."""
        if len(self._starts) == 1:
            self._reader.read(int(self._starts[0]) + start, out)
            return
        done = 0
        span = int(np.searchsorted(self._ends, start, "right")) - 1
        while done < len(out):
            skip = start + done - int(self._ends[span])
            count = min(int(self._ends[span + 1]) - start - done, len(out) - done)
            self._reader.read(int(self._starts[span]) + skip, out[done : done + count])
            done += count
            span += 1

    def _read_positions(self, positions: NDArray[np.int64]) -> NDArray[Any]:
        """Read each chunk that holds wanted rows once, whatever their order."""
        out = self._empty(len(positions))
        rows = self._to_dataset(positions)
        order = np.argsort(rows, kind="stable")
        chunks = rows[order] // self._chunk_rows
        bounds = np.flatnonzero(np.diff(chunks)) + 1
        for group in np.split(order, bounds) if len(order) else ():
            wanted = rows[group]
            first, last = int(wanted[0]), int(wanted[-1])
            span = self._empty(last - first + 1)
            self._reader.read(first, span)
            out[group] = span[wanted - first]
        return out.view(self.dtype)

    def _positions(self, key: Any) -> NDArray[np.int64]:
        index = np.asarray(key)
        if index.ndim != 1:
            raise IndexError(
                f"Rows of layer {self.name!r} are chosen by an integer, a slice, or a "
                f"one-dimensional array; one of shape {list(index.shape)} came."
            )
        if index.dtype == bool:
            if len(index) != len(self):
                raise IndexError(
                    f"The mask has {len(index)} entries for the {len(self)} rows of "
                    f"layer {self.name!r}."
                )
            return np.flatnonzero(index).astype(np.int64)
        if index.size and index.dtype.kind not in "iu":
            raise IndexError(
                f"Rows of layer {self.name!r} are chosen by integers or booleans, not "
                f"by {index.dtype}; use .rows(ids=[...]) for sample ids."
            )
        return self._checked(index)

    def _checked(self, index: NDArray[Any]) -> NDArray[np.int64]:
        wrong = index[(index >= len(self)) | (index < -len(self))]
        if len(wrong):
            raise IndexError(
                f"Row {int(wrong[0])} is out of range: layer {self.name!r} has "
                f"{len(self)} committed rows."
            )
        index = index.astype(np.int64)
        return np.where(index < 0, index + len(self), index)

    def _to_dataset(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        if not len(positions):
            return positions
        span = np.searchsorted(self._ends, positions, "right") - 1
        return np.asarray(self._starts[span] + positions - self._ends[span])

    def _from_dataset(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        if not len(self._starts):
            span = np.full(len(rows), -1)
        else:
            span = np.searchsorted(self._starts, rows, "right") - 1
        positions = self._ends[span] + rows - self._starts[span] if len(rows) else rows
        gone = (span < 0) | (positions >= self._ends[span + 1])
        if gone.any():
            row = int(rows[gone][0])
            raise DataError(
                f"Row {row} of layer {self.name!r} is not committed yet. Wait for the "
                "run, or run the same command again to finish it."
            )
        return np.asarray(positions)

    def _empty(self, rows: int) -> NDArray[Any]:
        return empty_rows((rows, *self._row_shape), self._dtype_name)


def _is_integer(key: Any) -> bool:
    if hasattr(key, "__array__"):  # an array, a tensor, a numpy scalar
        found = np.asarray(key)
        return found.ndim == 0 and found.dtype.kind in "iu"
    return isinstance(key, SupportsIndex) and not isinstance(key, bool)


def _reopen(store: "Store", name: str) -> LayerReader:
    return store[name]

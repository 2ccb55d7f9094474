"""Rows out of shards, every chunk checked: from local files by pread, else by ranges.

A whole chunk is read straight into the caller's array and checked while it is still in
the cache; only parts of chunks pass through a buffer, which each thread reuses.
"""

import os
import threading
from abc import ABC, abstractmethod
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from torchlens.errors import StoreError

from .checksums import crc32c
from .dtypes import empty_rows
from .objects import ObjectStore, missing_object
from .run_record import GROUP, RunRecord
from .shards import ArrayFormat, ShardDamage, parse_index

_CRC_BYTES = 4
_OPEN_SHARDS = 64


class RowReader(ABC):
    """Reads rows of one array by their dataset index."""

    @abstractmethod
    def read(self, start: int, out: NDArray[Any]) -> None:
        """Fill `out` [n, *row_shape], of the carrier dtype, with rows from `start`."""


def open_reader(objects: ObjectStore, run: RunRecord, name: str) -> RowReader:
    """Return the fastest reader that fits where and how a layer is stored."""
    form = run.formats[name]
    folder = f"{GROUP}/{run.paths[name]}"
    if not form.plain:
        return ZarrRows(objects, run, name)
    if objects.local_path(folder) is not None and hasattr(os, "preadv"):
        return PlainRows(form, objects, folder, _LocalSource)
    return PlainRows(form, objects, folder, _RangeSource)


class _Source(ABC):
    """The bytes of one shard."""

    offsets: list[int]

    @abstractmethod
    def read_into(self, offset: int, data: NDArray[np.uint8]) -> int:
        """Fill `data` from `offset` on, return the crc32c stored behind it."""


@final
class PlainRows(RowReader):
    """Rows of an array whose shards are flat files (see `shards`)."""

    def __init__(
        self,
        form: ArrayFormat,
        objects: ObjectStore,
        folder: str,
        source: "type[_LocalSource] | type[_RangeSource]",
    ) -> None:
        self._form = form
        self._objects = objects
        self._folder = folder
        self._source = source
        self._open: dict[int, _Source] = {}
        self._row_bytes = form.row_bytes
        self._lock = threading.Lock()
        self._scratch = threading.local()

    def read(self, start: int, out: NDArray[Any]) -> None:
        """Fill `out` with rows from `start`."""
        form = self._form
        row_bytes, chunk_rows = self._row_bytes, form.chunk_rows
        flat = out.reshape(-1).view(np.uint8)
        row, stop, place = start, start + len(out), 0
        while row < stop:
            shard, inner = divmod(row, form.shard_rows)
            chunk, skip = divmod(inner, chunk_rows)
            count = min(chunk_rows - skip, stop - row)
            end = place + count * row_bytes
            if count == chunk_rows:
                self._read_chunk(shard, chunk, flat[place:end])
            else:
                buffer = self._buffer()
                self._read_chunk(shard, chunk, buffer)
                first = skip * row_bytes
                flat[place:end] = buffer[first : first + end - place]
            place = end
            row += count

    def _read_chunk(self, shard: int, chunk: int, data: NDArray[np.uint8]) -> None:
        try:
            source = self._open.get(shard) or self._open_shard(shard)
            offset = source.offsets[chunk]
            stored = source.read_into(offset, data)
            if self._form.checksummed and crc32c(data) != stored:
                raise ShardDamage(
                    f"the checksum of its chunk at byte {offset} does not match"
                )
        except FileNotFoundError:
            raise missing_object(self._objects, self._key(shard)) from None
        except ShardDamage as damage:
            raise StoreError(
                f"The object {self._key(shard)!r} of the store at {self._objects.url} "
                f"is damaged: {damage}. store.verify(deep=True) names every damaged "
                "object."
            ) from damage

    def _open_shard(self, shard: int) -> "_Source":
        source = self._source(self._form, self._objects, self._key(shard), shard)
        with self._lock:
            # Oldest first; a thread still reading from it keeps its source alive.
            while len(self._open) >= _OPEN_SHARDS:
                self._open.pop(next(iter(self._open)))
            self._open[shard] = source
        return source

    def _key(self, shard: int) -> str:
        return f"{self._folder}/{self._form.key(shard)}"

    def _buffer(self) -> NDArray[np.uint8]:
        buffer: NDArray[np.uint8] | None = getattr(self._scratch, "buffer", None)
        if buffer is None:
            form = self._form
            rows = empty_rows((form.chunk_rows, *form.row_shape), form.dtype)
            buffer = rows.reshape(-1).view(np.uint8)
            self._scratch.buffer = buffer
        return buffer


@final
class _LocalSource(_Source):
    """A shard as an open file; closed when no thread uses it any more."""

    def __init__(
        self, form: ArrayFormat, objects: ObjectStore, key: str, shard: int
    ) -> None:
        self._descriptor = -1
        path = objects.local_path(key)
        assert path is not None  # chosen for local stores only
        self._tail = _CRC_BYTES if form.checksummed else 0
        self._descriptor = os.open(path, os.O_RDONLY)
        size = os.fstat(self._descriptor).st_size
        begin = max(0, size - form.index_bytes)
        tail = os.pread(self._descriptor, form.index_bytes, begin)
        self.offsets = parse_index(form, tail, shard)[:, 0].tolist()

    def read_into(self, offset: int, data: NDArray[np.uint8]) -> int:
        trailer = bytearray(self._tail)
        wanted = data.size + self._tail
        done = os.preadv(self._descriptor, [data.data, trailer], offset)
        while done < wanted:
            pieces = [data[done:].data, memoryview(trailer)[max(0, done - data.size) :]]
            more = os.preadv(self._descriptor, pieces, offset + done)
            if not more:
                raise ShardDamage("it ends before its last chunk")
            done += more
        return int.from_bytes(trailer, "little")

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


@final
class _RangeSource(_Source):
    """A shard as ranges of an object."""

    def __init__(
        self, form: ArrayFormat, objects: ObjectStore, key: str, shard: int
    ) -> None:
        self._objects = objects
        self._key = key
        self._tail = _CRC_BYTES if form.checksummed else 0
        tail = objects.get_range(key, -form.index_bytes, None)
        self.offsets = parse_index(form, tail, shard)[:, 0].tolist()

    def read_into(self, offset: int, data: NDArray[np.uint8]) -> int:
        stop = offset + data.size + self._tail
        raw = self._objects.get_range(self._key, offset, stop)
        if len(raw) != stop - offset:
            raise ShardDamage("it ends before its last chunk")
        data[...] = np.frombuffer(raw, np.uint8)[: data.size]
        return int.from_bytes(raw[data.size :], "little")


@final
class ZarrRows(RowReader):
    """Rows of an array in any other layout, decoded by zarr."""

    def __init__(self, objects: ObjectStore, run: RunRecord, name: str) -> None:
        from .zarr_store import open_array

        path = run.paths[name]
        self._array = open_array(run.documents, path, objects, GROUP)
        self._form = run.formats[name]
        self._objects = objects
        self._key = f"{GROUP}/{path}"

    def read(self, start: int, out: NDArray[Any]) -> None:
        """Fill `out` with rows from `start`."""
        shard_rows = self._form.shard_rows
        for shard in range(start // shard_rows, -(-(start + len(out)) // shard_rows)):
            key = f"{self._key}/{self._form.key(shard)}"
            # zarr gives fill values for an object that is gone or empty.
            if not self._objects.size(key):
                raise missing_object(self._objects, key)
        try:
            rows = np.asarray(self._array[start : start + len(out)])
        except (ValueError, RuntimeError) as error:
            raise StoreError(
                f"Rows {start} to {start + len(out) - 1} of {self._key!r} at "
                f"{self._objects.url} do not decode: {error}. "
                "store.verify(deep=True) names every damaged object."
            ) from error
        out[...] = rows.view(out.dtype)

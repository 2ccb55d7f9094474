"""Where zarr is used: making metadata documents, and codecs of other layouts."""

import asyncio
import json
import threading
import warnings
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, final

import numpy as np
import zarr
import zarr.codecs
from numpy.typing import NDArray
from zarr.abc.store import (
    ByteRequest,
    OffsetByteRequest,
    RangeByteRequest,
    Store,
    SuffixByteRequest,
)
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype
from zarr.storage import MemoryStore

from .dtypes import native
from .objects import MemoryObjects, ObjectStore
from .run_spec import ArraySpec

_METADATA = "zarr.json"


@final
class PinnedStore(Store):
    """A zarr store whose metadata is given and whose chunks are objects.

    Reading chunks goes to `objects` under `prefix`.  Writing them collects whole
    encoded shards in `encoded`; zarr is told that none exists, so that it never reads
    one back before writing.
    """

    def __init__(
        self,
        documents: Mapping[str, Mapping[str, Any]],
        objects: ObjectStore,
        prefix: str,
        *,
        writing: bool = False,
    ) -> None:
        super().__init__(read_only=not writing)
        self._documents = {
            key: json.dumps(document).encode() for key, document in documents.items()
        }
        self._objects = objects
        self._prefix = prefix
        self._writing = writing
        self._lock = threading.Lock()
        self.encoded: dict[str, bytes] = {}

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    @property
    def supports_writes(self) -> bool:
        """Whether chunks may be written."""
        return self._writing

    @property
    def supports_deletes(self) -> bool:
        """Nothing is deleted through zarr."""
        return False

    @property
    def supports_listing(self) -> bool:
        """Groups find their members by listing."""
        return True

    async def get(
        self,
        key: str,
        prototype: BufferPrototype,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        """Return a document, or (part of) an object."""
        document = self._documents.get(key)
        if document is not None:
            return prototype.buffer.from_bytes(document)
        if self._writing or key.rsplit("/", 1)[-1] == _METADATA:
            return None
        data = await asyncio.to_thread(self._read, key, byte_range)
        return None if data is None else prototype.buffer.from_bytes(data)

    async def get_partial_values(
        self,
        prototype: BufferPrototype,
        key_ranges: Iterable[tuple[str, ByteRequest | None]],
    ) -> list[Buffer | None]:
        """Return parts of several objects."""
        return [await self.get(key, prototype, part) for key, part in key_ranges]

    async def exists(self, key: str) -> bool:
        """Return whether a document or object is there."""
        if key in self._documents:
            return True
        return not self._writing and self._objects.size(self._key(key)) is not None

    async def set(self, key: str, value: Buffer) -> None:
        """Collect a whole encoded shard."""
        self.set_sync(key, value)

    def set_sync(self, key: str, value: Buffer) -> None:
        """Collect a whole encoded shard; zarr's fused pipeline comes this way."""
        with self._lock:
            self.encoded[key] = value.to_bytes()

    async def delete(self, key: str) -> None:
        """Refuse: zarr deletes chunks that equal the fill value, which are data."""
        raise NotImplementedError(f"{key} may not be deleted")

    async def list(self) -> AsyncIterator[str]:
        """Yield the documents' keys."""
        for key in self._documents:
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Yield the documents' keys below a prefix."""
        for key in self._documents:
            if key.startswith(prefix):
                yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Yield the names directly below a prefix."""
        start = f"{prefix.rstrip('/')}/" if prefix else ""
        names = {
            key[len(start) :].split("/", 1)[0]
            for key in self._documents
            if key.startswith(start)
        }
        for name in names:
            yield name

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _read(self, key: str, byte_range: ByteRequest | None) -> bytes | None:
        full = self._key(key)
        start, stop = 0, None
        if isinstance(byte_range, RangeByteRequest):
            start, stop = byte_range.start, byte_range.end
        elif isinstance(byte_range, OffsetByteRequest):
            start = byte_range.offset
        elif isinstance(byte_range, SuffixByteRequest):
            start = -byte_range.suffix
        try:
            return self._objects.get_range(full, start, stop)
        except FileNotFoundError:
            return None


def array_documents(
    num_rows: int,
    arrays: Mapping[str, ArraySpec],
    paths: Mapping[str, str],
    sizes: Mapping[str, tuple[int, int]],
) -> dict[str, dict[str, Any]]:
    """Return the metadata document of each array, as this version of zarr makes it.

    Args:
        num_rows: Rows of every array.
        arrays: Layer name to array.
        paths: Layer name to path.
        sizes: Layer name to (chunk_rows, shard_rows).

    Returns:
        Key relative to the group, such as "conv1/zarr.json", to document.
    """
    if any(spec.dtype == "bfloat16" for spec in arrays.values()):
        _register_bfloat16()
    memory = MemoryStore()
    documents = {}
    with warnings.catch_warnings():
        # zarr warns of data types that are registered but not in the core standard.
        warnings.simplefilter("ignore")
        zarr.create_group(memory)
        for name, spec in arrays.items():
            path = paths[name]
            chunk_rows, shard_rows = sizes[name]
            array = zarr.create_array(
                memory,
                name=path,
                shape=(num_rows, *spec.row_shape),
                dtype=native(spec.dtype),
                chunks=(chunk_rows, *spec.row_shape),
                shards=(shard_rows, *spec.row_shape),
                compressors=[zarr.codecs.Crc32cCodec()],
                filters=None,
                fill_value=_zarr_fill(spec.dtype),
                chunk_key_encoding={"name": "default", "separator": "."},
                dimension_names=(
                    "sample",
                    *(f"{path}_{axis}" for axis in range(len(spec.row_shape))),
                ),
                attributes={"torchlens": {"layer": name, "dtype": spec.dtype}},
            )
            buffers = array.metadata.to_buffer_dict(default_buffer_prototype())
            documents[f"{path}/{_METADATA}"] = json.loads(buffers[_METADATA].to_bytes())
    return documents


def open_array(
    documents: Mapping[str, Mapping[str, Any]],
    path: str,
    objects: ObjectStore,
    prefix: str,
) -> zarr.Array[Any]:
    """Open one array for reading from pinned documents, whatever lies in the store."""
    _register_if_needed(documents[f"{path}/{_METADATA}"])
    store = PinnedStore(documents, objects, prefix)
    return zarr.open_array(store, path=path, mode="r")


def encode_with_zarr(
    documents: Mapping[str, Mapping[str, Any]],
    path: str,
    start: int,
    rows: NDArray[Any],
) -> bytes:
    """Return the object zarr makes of one shard's rows, for any codecs.

    Args:
        documents: The pinned documents.
        path: The array's path.
        start: First row, the start of a shard.
        rows: Carrier values of the whole shard, or of what is left of the array.
    """
    _register_if_needed(documents[f"{path}/{_METADATA}"])
    store = PinnedStore(documents, MemoryObjects(), "", writing=True)
    with zarr.config.set({"array.write_empty_chunks": True}):
        array = zarr.open_array(store, path=path, mode="r+")
        array[start : start + len(rows)] = rows.view(array.dtype)
    (data,) = store.encoded.values()
    return data


def _zarr_fill(dtype: str) -> Any:
    kind = np.dtype("float32" if dtype == "bfloat16" else dtype).kind
    if kind == "c":
        return complex(np.nan, np.nan)
    return float("nan") if kind == "f" else False if kind == "b" else 0


def _register_if_needed(document: Mapping[str, Any]) -> None:
    if document.get("data_type") == "bfloat16":
        _register_bfloat16()


def _register_bfloat16() -> None:
    from . import zarr_bfloat16  # noqa: F401  # importing registers the type


def zarr_version() -> str:
    """Return the version of zarr in use, for provenance."""
    return str(zarr.__version__)


def decodes_with_zarr(
    documents: Mapping[str, Mapping[str, Any]],
    path: str,
    key: str,
    data: bytes,
    start: int,
    stop: int,
) -> bool:
    """Return whether an object's bytes decode as the rows [start, stop) of an array."""
    objects = MemoryObjects()
    objects.put_new(f"x/{path}/{key}", [data])
    try:
        if not data:
            return False
        open_array(documents, path, objects, "x")[start:stop]
    except (ValueError, RuntimeError, IndexError, TypeError, OSError):
        return False
    return True

"""The bytes of a shard: rows in order, a crc32c after each chunk, an index at the end.

This encodes and decodes the one layout that stores are written in (no compression,
chunks along the sample axis), bit for bit as zarr does and without its copies.  Any
other array metadata is left to zarr.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchlens.errors import ManifestError

from .checksums import crc32c, extend_crc32c, join_crc32c, sha256_hex
from .dtypes import carrier, check_dtype, fill_value
from .objects import Parts

_ABSENT = np.uint64(0xFFFFFFFFFFFFFFFF)
_CRC_BYTES = 4
_INDEX_CODECS = [
    {"name": "bytes", "configuration": {"endian": "little"}},
    {"name": "crc32c"},
]


class ShardDamage(ValueError):
    """A shard's bytes do not decode; the message says what is wrong."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """One object ready to be put: its parts in order, its size, its checksums.

    Attributes:
        crc32c: Of the whole object.
        content: What tells this object from another that is as sound.  The crc32c of
            bytes that end in their own crc32c does not depend on the bytes, so that of
            a whole shard is the same for any rows: see `rows_digest`.
    """

    parts: Parts
    nbytes: int
    crc32c: int
    content: str


@dataclass(frozen=True, slots=True)
class ArrayFormat:
    """What an array's metadata document says about its objects.

    Attributes:
        plain: Whether this module can encode and decode the shards.
        checksummed: Whether a crc32c follows each chunk.
    """

    num_rows: int
    row_shape: tuple[int, ...]
    dtype: str
    chunk_rows: int
    shard_rows: int
    separator: str
    key_prefix: str
    plain: bool
    checksummed: bool

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        size = carrier(self.dtype).itemsize
        for n in self.row_shape:
            size *= n
        return int(size)

    @property
    def num_shards(self) -> int:
        """Number of objects of the array."""
        return -(-self.num_rows // self.shard_rows)

    def key(self, shard: int) -> str:
        """Return the key of a shard, relative to the array."""
        parts = [str(shard), *("0" for _ in self.row_shape)]
        if self.key_prefix:
            parts.insert(0, self.key_prefix)
        return self.separator.join(parts)

    def rows_of(self, shard: int) -> tuple[int, int]:
        """Return the rows [start, stop) of a shard."""
        start = shard * self.shard_rows
        return start, min(start + self.shard_rows, self.num_rows)

    def chunks_of(self, shard: int) -> int:
        """Return how many chunks of a shard hold rows."""
        start, stop = self.rows_of(shard)
        return -(-(stop - start) // self.chunk_rows)

    def shard_bytes(self, shard: int) -> int:
        """Return the size of a plain shard."""
        chunk = self.chunk_rows * self.row_bytes + self.checksummed * _CRC_BYTES
        return self.chunks_of(shard) * chunk + self.index_bytes

    @property
    def index_bytes(self) -> int:
        """Bytes of the index that ends a shard."""
        return 16 * (self.shard_rows // self.chunk_rows) + _CRC_BYTES


def parse_format(document: Mapping[str, Any], where: str) -> ArrayFormat:
    """Read an array metadata document.

    Raises:
        ManifestError: If it is none that a store can have.
    """
    try:
        shape = [int(n) for n in document["shape"]]
        grid = [int(n) for n in document["chunk_grid"]["configuration"]["chunk_shape"]]
        encoding = document["chunk_key_encoding"]
        dtype = str(document["data_type"])
        codecs = list(document["codecs"])
        check_dtype(dtype)
        if document["node_type"] != "array" or grid[1:] != shape[1:] or not shape:
            raise ValueError("its chunks do not hold whole rows")
        configuration = encoding.get("configuration", {})
        default = encoding["name"] == "default"
        inner, plain, checksummed = _read_codecs(codecs, grid, dtype)
        if grid[0] < 1 or inner < 1 or grid[0] % inner:
            raise ValueError("its shards are no whole number of chunks")
        return ArrayFormat(
            num_rows=shape[0],
            row_shape=tuple(shape[1:]),
            dtype=dtype,
            chunk_rows=inner,
            shard_rows=grid[0],
            separator=str(configuration.get("separator", "/" if default else ".")),
            key_prefix="c" if default else "",
            plain=plain,
            checksummed=checksummed,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ManifestError(
            f"The array metadata of {where} cannot be used: {error!r}. The store is "
            "damaged or was not written by this package."
        ) from error


def encode_shard(form: ArrayFormat, rows: NDArray[Any]) -> Encoded:
    """Encode up to a shard of rows without copying them.

    Args:
        form: A plain format.
        rows: Contiguous carrier values [n, *row_shape]; fewer than a whole shard only
            at the end of the array.
    """
    data = rows.reshape(-1).view(np.uint8)
    chunk_bytes = form.chunk_rows * form.row_bytes
    index = np.full((form.shard_rows // form.chunk_rows, 2), _ABSENT, "<u8")
    parts: list[bytes | NDArray[np.uint8]] = []
    offset = total = rows_crc = 0
    for number, start in enumerate(range(0, data.size, chunk_bytes)):
        chunk = data[start : start + chunk_bytes]
        if chunk.size < chunk_bytes:
            chunk = _padded(chunk, chunk_bytes, form.dtype)
        nbytes = chunk_bytes
        crc = crc32c(chunk)
        total = join_crc32c(total, crc, chunk_bytes)
        rows_crc = join_crc32c(rows_crc, crc, chunk_bytes)
        parts.append(chunk)
        if form.checksummed:
            trailer = crc.to_bytes(_CRC_BYTES, "little")
            total = extend_crc32c(total, trailer)
            parts.append(trailer)
            nbytes += _CRC_BYTES
        index[number] = offset, nbytes
        offset += nbytes
    tail = index.tobytes()
    tail += crc32c(tail).to_bytes(_CRC_BYTES, "little")
    parts.append(tail)
    return Encoded(
        parts, offset + len(tail), extend_crc32c(total, tail), rows_digest(rows_crc)
    )


def encoded_bytes(data: bytes) -> Encoded:
    """Return an object that is not a plain shard, ready to be put."""
    return Encoded([data], len(data), crc32c(data), f"sha256:{sha256_hex(data)}")


def rows_digest(crc: int) -> str:
    """Return the content digest of a plain shard, from the crc32c of its chunks' rows.

    The chunks are taken in order, padding included, without their checksums.
    """
    return f"rows-crc32c:{crc:08x}"


def parse_index(form: ArrayFormat, tail: bytes, shard: int) -> NDArray[np.int64]:
    """Return offset and payload size [num_chunks, 2] of a shard's chunks.

    Raises:
        ShardDamage: If the index is torn, or says that rows are absent.
    """
    if len(tail) != form.index_bytes:
        raise ShardDamage("it is too short to hold its index")
    if crc32c(tail[:-_CRC_BYTES]) != int.from_bytes(tail[-_CRC_BYTES:], "little"):
        raise ShardDamage("the checksum of its index does not match")
    index = np.frombuffer(tail[:-_CRC_BYTES], "<u8").reshape(-1, 2)
    index = index[: form.chunks_of(shard)]
    wanted = form.chunk_rows * form.row_bytes + form.checksummed * _CRC_BYTES
    if (index[:, 0] == _ABSENT).any():
        raise ShardDamage("chunks are absent from it")
    if (index[:, 1] != wanted).any() or (index[:, 0] > np.uint64(1 << 62)).any():
        raise ShardDamage("its chunks have another size than the metadata says")
    return index.astype(np.int64)


def check_shard(form: ArrayFormat, data: bytes, shard: int) -> str:
    """Return the content digest of a plain shard's bytes if every chunk decodes.

    Raises:
        ShardDamage: If one does not.
    """
    index = parse_index(form, data[-form.index_bytes :], shard)
    view = np.frombuffer(data, np.uint8)
    rows_crc = 0
    for offset, nbytes in index:
        chunk = view[offset : offset + nbytes]
        if chunk.size != nbytes:
            raise ShardDamage("it ends before its last chunk")
        crc = crc32c(chunk[: chunk.size - form.checksummed * _CRC_BYTES])
        if form.checksummed and crc != int.from_bytes(chunk[-_CRC_BYTES:], "little"):
            raise ShardDamage(
                f"the checksum of its chunk at byte {offset} does not match"
            )
        rows_crc = join_crc32c(rows_crc, crc, form.chunk_rows * form.row_bytes)
    return rows_digest(rows_crc)


def is_fill(form: ArrayFormat, rows: NDArray[Any]) -> NDArray[np.bool_]:
    """Return for each row whether it holds nothing but the fill value."""
    item = fill_value(form.dtype).reshape(1).view(np.uint8)
    view = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
    filled = (view.reshape(len(rows), -1, item.size) == item).all(axis=(1, 2))
    return np.asarray(filled)


def empty_rows_of(form: ArrayFormat, data: bytes, shard: int) -> NDArray[np.bool_]:
    """Return for each row of a sound plain shard whether it holds only fill."""
    index = parse_index(form, data[-form.index_bytes :], shard)
    size = form.chunk_rows * form.row_bytes
    raw = b"".join(data[offset : offset + size] for offset, _ in index)
    start, stop = form.rows_of(shard)
    rows = np.frombuffer(raw, carrier(form.dtype)).reshape(-1, *form.row_shape)
    return is_fill(form, rows[: stop - start])


def _padded(chunk: NDArray[np.uint8], nbytes: int, dtype: str) -> NDArray[np.uint8]:
    fill = fill_value(dtype).reshape(1)
    missing = (nbytes - chunk.size) // fill.itemsize
    return np.concatenate([chunk, np.repeat(fill, missing).view(np.uint8)])


def _read_codecs(
    codecs: Sequence[Mapping[str, Any]], grid: Sequence[int], dtype: str
) -> tuple[int, bool, bool]:
    """Return chunk rows, whether the codecs are plain, whether crc32c is among them."""
    if len(codecs) != 1 or codecs[0]["name"] != "sharding_indexed":
        return grid[0], False, False
    configuration = codecs[0]["configuration"]
    inner = [int(n) for n in configuration["chunk_shape"]]
    if inner[1:] != list(grid[1:]):
        raise ValueError("its inner chunks do not hold whole rows")
    chain = list(configuration["codecs"])
    names = [codec["name"] for codec in chain]
    wide = carrier(dtype).itemsize > 1
    endian = chain[0].get("configuration", {}).get("endian", "little")
    plain = (
        names in (["bytes"], ["bytes", "crc32c"])
        and (endian == "little" or not wide)
        and list(configuration["index_codecs"]) == _INDEX_CODECS
        and configuration.get("index_location", "end") == "end"
    )
    return inner[0], plain, names[-1:] == ["crc32c"]

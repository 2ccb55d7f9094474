"""The shard encoder makes what zarr makes; the checksums add up."""

from typing import Any

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from torchlens.errors import ManifestError
from torchlens.storage import ArraySpec
from torchlens.storage.checksums import ids_digest, join_crc32c
from torchlens.storage.dtypes import SUPPORTED, carrier
from torchlens.storage.shards import (
    ArrayFormat,
    ShardDamage,
    check_shard,
    encode_shard,
    parse_format,
)
from torchlens.storage.zarr_store import array_documents, encode_with_zarr

NUM_ROWS = 27


def documents_of(dtype: str, row_shape: tuple[int, ...]) -> dict[str, Any]:
    arrays = {"x": ArraySpec(row_shape, dtype)}
    return array_documents(NUM_ROWS, arrays, {"x": "x"}, {"x": (4, 8)})


def rows_of(dtype: str, row_shape: tuple[int, ...]) -> NDArray[Any]:
    rng = np.random.default_rng(0)
    if dtype == "bool":
        return rng.random((NUM_ROWS, *row_shape)) > 0.5
    raw = rng.integers(0, 100, (NUM_ROWS, *row_shape))
    return raw.astype(carrier(dtype))


def joined(form: ArrayFormat, rows: NDArray[Any]) -> bytes:
    encoded = encode_shard(form, rows)
    data = b"".join(bytes(part) for part in encoded.parts)
    assert encoded.nbytes == len(data)
    assert encoded.crc32c == google_crc32c.value(data)
    return data


@given(st.binary(max_size=300), st.binary(max_size=300))
@settings(deadline=None)
def test_joined_checksum_is_that_of_the_joined_bytes(
    first: bytes, second: bytes
) -> None:
    crcs = google_crc32c.value(first), google_crc32c.value(second)
    assert join_crc32c(*crcs, len(second)) == google_crc32c.value(first + second)


def test_ids_digest_sees_where_ids_begin() -> None:
    assert ids_digest(["ab", "c"]) != ids_digest(["a", "bc"])
    assert ids_digest(["a", "b"]) != ids_digest(["b", "a"])
    assert ids_digest(["é"]) == ids_digest(["é"])


@pytest.mark.parametrize("dtype", SUPPORTED)
@pytest.mark.parametrize("row_shape", [(), (5,), (2, 3)])
def test_encoded_shards_equal_those_of_zarr(
    dtype: str, row_shape: tuple[int, ...]
) -> None:
    documents = documents_of(dtype, row_shape)
    form = parse_format(documents["x/zarr.json"], "x")
    assert form.plain and form.checksummed
    rows = rows_of(dtype, row_shape)
    for shard in range(form.num_shards):
        start, stop = form.rows_of(shard)
        theirs = encode_with_zarr(documents, "x", start, rows[start:stop])
        assert joined(form, rows[start:stop]) == theirs
        assert (
            check_shard(form, theirs, shard)
            == encode_shard(form, rows[start:stop]).content
        )


def test_any_flipped_bit_is_noticed() -> None:
    form = parse_format(documents_of("float32", (5,))["x/zarr.json"], "x")
    data = joined(form, rows_of("float32", (5,))[:8])
    for bit in np.random.default_rng(1).integers(0, 8 * len(data), 200):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(ShardDamage):
            check_shard(form, bytes(damaged), 0)


@pytest.mark.parametrize("length", [0, 1, 50, -1])
def test_a_cut_shard_is_noticed(length: int) -> None:
    form = parse_format(documents_of("float32", (5,))["x/zarr.json"], "x")
    data = joined(form, rows_of("float32", (5,))[:8])
    with pytest.raises(ShardDamage):
        check_shard(form, data[:length], 0)


def test_a_shard_that_lacks_a_chunk_is_noticed() -> None:
    form = parse_format(documents_of("float32", (5,))["x/zarr.json"], "x")
    data = joined(form, rows_of("float32", (5,))[:4])
    with pytest.raises(ShardDamage, match="chunks are absent from it"):
        check_shard(form, data, 0)


def test_content_tells_shards_apart_where_crc32c_cannot() -> None:
    """Each part ends in its own crc32c, so the crc32c of the whole is a constant."""
    form = parse_format(documents_of("float32", (5,))["x/zarr.json"], "x")
    first, second = rows_of("float32", (5,))[:8], rows_of("float32", (5,))[8:16]
    one, two = encode_shard(form, first), encode_shard(form, second)
    assert one.crc32c == two.crc32c
    assert one.content != two.content


def test_keys_follow_the_documents_encoding() -> None:
    document = documents_of("float32", (5,))["x/zarr.json"]
    assert parse_format(document, "x").key(3) == "c.3.0"
    document["chunk_key_encoding"]["configuration"]["separator"] = "/"
    assert parse_format(document, "x").key(3) == "c/3/0"
    document["chunk_key_encoding"] = {"name": "v2"}
    assert parse_format(document, "x").key(3) == "3.0"


def test_other_codecs_are_left_to_zarr() -> None:
    document = documents_of("float32", (5,))["x/zarr.json"]
    document["codecs"][0]["configuration"]["codecs"].insert(
        1, {"name": "zstd", "configuration": {"level": 1, "checksum": False}}
    )
    assert not parse_format(document, "x").plain


def test_unusable_metadata_is_refused() -> None:
    document = documents_of("float32", (6,))["x/zarr.json"]
    document["chunk_grid"]["configuration"]["chunk_shape"] = [8, 3]
    with pytest.raises(ManifestError, match="metadata of 'x'.*whole rows"):
        parse_format(document, "'x'")
    with pytest.raises(ManifestError, match="cannot be used"):
        parse_format({}, "'x'")

"""Digests of bytes and of sample ids; crc32c that can be joined without re-reading."""

import hashlib
from collections.abc import Iterable
from functools import lru_cache

import google_crc32c
import numpy as np
from numpy.typing import NDArray

# The Castagnoli polynomial with its bits reflected, as crc32c is defined.
_POLYNOMIAL = 0x82F63B78
_ONE = 1 << 31


def crc32c(data: bytes | NDArray[np.uint8]) -> int:
    """Return the crc32c of bytes, or of a contiguous array of bytes."""
    return int(google_crc32c.value(data))


def extend_crc32c(crc: int, data: bytes | NDArray[np.uint8]) -> int:
    """Return the crc32c of everything behind `crc` followed by `data`."""
    return int(google_crc32c.extend(crc, data))


def join_crc32c(first: int, second: int, second_bytes: int) -> int:
    """Return the crc32c of two byte strings put together, from theirs alone.

    A checksum is linear over bits: appending n bytes multiplies it by x^(8n).  So the
    sum of a shard follows from the sums of its chunks and its data is read once.

    Args:
        first: The crc32c of the first string.
        second: The crc32c of the second string.
        second_bytes: The length of the second string.
    """
    return _multiply(_power_of_x(second_bytes), first) ^ second


def sha256_hex(data: bytes) -> str:
    """Return the sha256 of `data` in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def ids_digest(ids: Iterable[str]) -> str:
    """Return a digest of sample ids in their order; no two lists share one."""
    digest = hashlib.sha256()
    for sample_id in ids:
        encoded = sample_id.encode("utf-8")
        # The length first, or ["ab", "c"] and ["a", "bc"] would be the same.
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.hexdigest()


def _multiply(left: int, right: int) -> int:
    """Multiply two polynomials over GF(2) modulo the crc polynomial."""
    product = 0
    bit = _ONE
    while bit:
        if left & bit:
            product ^= right
        bit >>= 1
        right = (right >> 1) ^ (_POLYNOMIAL if right & 1 else 0)
    return product


@lru_cache(maxsize=256)
def _power_of_x(num_bytes: int) -> int:
    power = _ONE
    square = 1 << 23  # x^8: one byte
    while num_bytes:
        if num_bytes & 1:
            power = _multiply(square, power)
        square = _multiply(square, square)
        num_bytes >>= 1
    return power

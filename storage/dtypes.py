"""Logical dtypes: their names, their numpy carriers, the value that means "no data".

bfloat16 travels as uint16 bit patterns, because numpy itself has no such type; every
reader here hands it out as the `ml_dtypes` type, whose `.view("uint16")` is those bits.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchlens.errors import DataError

_BFLOAT16_NAN = 0x7FC0
_PAGE = 4096
_WORTH_ALIGNING = 1 << 16

SUPPORTED = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint64",
    "uint32",
    "uint16",
    "uint8",
    "bool",
    "complex64",
    "complex128",
)


def check_dtype(name: str) -> None:
    """Raise DataError unless `name` is a dtype that a store can hold."""
    if name not in SUPPORTED:
        raise DataError(
            f"A layer of dtype {name!r} cannot be stored. Supported are "
            f"{', '.join(SUPPORTED)}. Cast it, for instance with dtype='float32'."
        )


def carrier(name: str) -> np.dtype[Any]:
    """Return the little-endian numpy dtype in which values of `name` are written."""
    native_order = np.dtype("uint16" if name == "bfloat16" else name)
    little: np.dtype[Any] = native_order.newbyteorder("<")
    return little


def native(name: str) -> np.dtype[Any]:
    """Return the numpy dtype in which readers hand out values of `name`."""
    if name != "bfloat16":
        return np.dtype(name)
    from ml_dtypes import bfloat16

    dtype: np.dtype[Any] = np.dtype(bfloat16)
    return dtype


def fill_value(name: str) -> np.ndarray[Any, Any]:
    """Return what stands for "no data", zero-dimensional, in the carrier dtype.

    NaN where the dtype has one, else zero.  A hole never looks like this to a reader
    of this package: it asks the commit records what exists.
    """
    dtype = carrier(name)
    if name == "bfloat16":
        return np.array(_BFLOAT16_NAN, dtype)
    if dtype.kind == "c":
        return np.array(complex(np.nan, np.nan), dtype)
    return np.array(np.nan if dtype.kind == "f" else 0, dtype)


def empty_rows(shape: tuple[int, ...], name: str) -> NDArray[Any]:
    """Return an uninitialised carrier array that begins at a page.

    A read into memory that lies 1 to 31 bytes behind a page's start, where numpy's own
    big arrays begin, measured five times slower on an AMD EPYC with fast short moves.
    """
    dtype = carrier(name)
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _WORTH_ALIGNING:
        return np.empty(shape, dtype)
    raw = np.empty(nbytes + _PAGE, np.uint8)
    start = -raw.ctypes.data % _PAGE
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def as_carrier(rows: NDArray[Any], name: str) -> NDArray[Any]:
    """Return `rows` as a contiguous array of the carrier dtype, without casting.

    Raises:
        DataError: If the values are of another dtype; nothing is cast silently.
    """
    dtype = carrier(name)
    if name == "bfloat16" and rows.dtype.name == "bfloat16":
        rows = np.ascontiguousarray(rows).view("uint16")
    if rows.dtype.newbyteorder("=") != dtype.newbyteorder("="):
        wanted = "uint16 bit patterns" if name == "bfloat16" else name
        raise DataError(
            f"Rows of dtype {rows.dtype} came for a layer declared {name}: hand over "
            f"{wanted}."
        )
    return np.ascontiguousarray(rows, dtype=dtype)

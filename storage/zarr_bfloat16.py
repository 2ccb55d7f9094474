"""bfloat16 as a zarr data type, under the name that zarr-extensions registers.

zarr-python knows no such type itself.  Importing this module registers it, which is all
that plain zarr, dask or xarray need to read such an array in the same process.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, TypeGuard

import ml_dtypes
import numpy as np
from zarr.core.dtype import data_type_registry
from zarr.core.dtype.common import (
    DataTypeValidationError,
    HasEndianness,
    HasItemSize,
)
from zarr.core.dtype.wrapper import ZDType

_NAME = "bfloat16"
_NATIVE = np.dtype(ml_dtypes.bfloat16)
_WORDS = {"NaN": np.nan, "Infinity": np.inf, "-Infinity": -np.inf}


@dataclass(frozen=True, kw_only=True)
class BFloat16(ZDType[Any, Any], HasEndianness, HasItemSize):
    """The zarr data type `bfloat16`; Zarr format 3 only."""

    dtype_cls: ClassVar[Any] = type(_NATIVE)
    _zarr_v3_name: ClassVar[Literal["bfloat16"]] = "bfloat16"

    @property
    def item_size(self) -> int:
        """Bytes of one value."""
        return 2

    @classmethod
    def from_native_dtype(cls, dtype: Any) -> Self:
        """Return this type for numpy's view of bfloat16."""
        if not cls._check_native_dtype(dtype):
            raise DataTypeValidationError(f"{dtype} is not bfloat16")
        return cls()

    def to_native_dtype(self) -> Any:
        """Return numpy's view of bfloat16."""
        return _NATIVE

    def to_json(self, zarr_format: Literal[2, 3]) -> Any:
        """Return the name that array metadata holds."""
        if zarr_format != 3:
            raise ValueError("Zarr format 2 has no bfloat16; use format 3.")
        return _NAME

    def cast_scalar(self, data: object) -> Any:
        """Return a number as a bfloat16 scalar."""
        return _NATIVE.type(float(data))  # type: ignore[arg-type]  # checked by zarr

    def default_scalar(self) -> Any:
        """Return zero."""
        return _NATIVE.type(0)

    def from_json_scalar(self, data: Any, *, zarr_format: Literal[2, 3]) -> Any:
        """Return a fill value from its JSON form: number, word or hexadecimal bits."""
        if isinstance(data, str) and data.startswith("0x"):
            return np.array(int(data, 16), "uint16").view(_NATIVE)[()]
        return _NATIVE.type(_WORDS[data] if isinstance(data, str) else data)

    def to_json_scalar(self, data: object, *, zarr_format: Literal[2, 3]) -> Any:
        """Return a fill value's JSON form."""
        number = float(data)  # type: ignore[arg-type]  # a bfloat16 scalar
        if np.isfinite(number):
            return number
        return "NaN" if np.isnan(number) else "Infinity" if number > 0 else "-Infinity"

    @classmethod
    def _check_native_dtype(cls, dtype: Any) -> TypeGuard[Any]:
        return bool(dtype == _NATIVE)

    @classmethod
    def _check_json_v2(cls, data: Any) -> Any:
        return False

    @classmethod
    def _check_json_v3(cls, data: Any) -> Any:
        return data == _NAME

    @classmethod
    def _from_json_v2(cls, data: Any) -> Self:
        raise DataTypeValidationError("Zarr format 2 has no bfloat16")

    @classmethod
    def _from_json_v3(cls, data: Any) -> Self:
        if data != _NAME:
            raise DataTypeValidationError(f"{data!r} is not {_NAME!r}")
        return cls()

    def _check_scalar(self, data: object) -> Any:
        return isinstance(data, int | float | np.number | ml_dtypes.bfloat16)


data_type_registry.register(_NAME, BFloat16)

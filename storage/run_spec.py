"""What a run stores: arrays, rows, and the facts that must match to continue it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchlens.errors import DataError

from .dtypes import carrier, check_dtype

_LARGEST_ROW = 1 << 40


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One layer: the array [num_rows, *row_shape].

    Attributes:
        row_shape: Shape of one row, without the sample axis; () for a scalar.
        dtype: Logical dtype name, such as "float32" or "bfloat16".
        identity: What determines this layer's values and no other's (the site, the
            reduction ...), as JSON.  Two runs share a layer only if it is equal.
    """

    row_shape: tuple[int, ...]
    dtype: str
    identity: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        object.__setattr__(self, "row_shape", tuple(int(n) for n in self.row_shape))
        object.__setattr__(self, "identity", as_json(self.identity, "identity"))
        if any(n < 1 for n in self.row_shape) or self.row_bytes > _LARGEST_ROW:
            raise DataError(
                f"A row of shape {list(self.row_shape)} cannot be stored: every size "
                "must be at least 1, and a row at most 1 TiB."
            )

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        size = carrier(self.dtype).itemsize
        for n in self.row_shape:
            size *= n
        return int(size)


@dataclass(frozen=True, slots=True)
class RunSpec:
    """Everything `open_run` needs to create a run or to recognise it.

    Attributes:
        num_rows: Rows of every array; row i is sample i of the dataset.
        arrays: Layer name to array.
        identity: Every fact that determines values, for all layers alike (model,
            dataset, preprocessing ...), as nested JSON.  A run continues only if all
            of it is equal.  What belongs to one layer goes into `ArraySpec.identity`,
            so that other layers can be added later.
        provenance: Facts worth keeping that need not match, as JSON.
        block_rows: Rows of a block, a power of two; None lets `plan_layout` choose.
            An existing run's own value wins.
        batch_size: Samples run together; a block holds at least one batch.
        world_size: Processes that will share the blocks, for the choice of block_rows.
    """

    num_rows: int
    arrays: Mapping[str, ArraySpec]
    identity: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    block_rows: int | None = None
    batch_size: int = 1
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.num_rows < 1:
            raise DataError(f"A run needs at least one row; num_rows={self.num_rows}.")
        if not self.arrays:
            raise DataError("A run needs at least one layer; arrays is empty.")
        object.__setattr__(self, "arrays", dict(self.arrays))
        object.__setattr__(self, "identity", as_json(self.identity, "identity"))
        object.__setattr__(self, "provenance", as_json(self.provenance, "provenance"))


def as_json(value: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Return `value` as JSON would give it back, so that comparisons are exact.

    Raises:
        DataError: If something in it is no JSON.
    """
    try:
        text = json.dumps(value, default=_plain, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DataError(f"The run's {what} must be JSON: {error}.") from error
    result: dict[str, Any] = json.loads(text)
    return result


def differences(stored: Any, wanted: Any, where: str) -> list[str]:
    """Return one line per differing field of two JSON values, with both values."""
    if isinstance(stored, dict) and isinstance(wanted, dict):
        lines = []
        for key in sorted(stored.keys() | wanted.keys()):
            inner = f"{where}.{key}"
            if key not in wanted:
                lines.append(f"{inner}: stored {_short(stored[key])}, now absent")
            elif key not in stored:
                lines.append(f"{inner}: not stored, now {_short(wanted[key])}")
            else:
                lines += differences(stored[key], wanted[key], inner)
        return lines
    if stored == wanted and isinstance(stored, bool) == isinstance(wanted, bool):
        return []
    return [f"{where}: stored {_short(stored)}, now {_short(wanted)}"]


def _short(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return text if len(text) <= 200 else f"{text[:200]} ... ({len(text)} characters)"


def _plain(value: Any) -> Any:
    """Turn numpy scalars and other mappings into JSON."""
    if isinstance(value, Mapping):
        return dict(value)
    item = getattr(value, "item", None)
    if callable(item):
        return item()
    raise TypeError(f"{type(value).__name__} {value!r} is no JSON value")

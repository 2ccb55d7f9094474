"""Counts of values that are not finite or did not fit, per layer, with their ids."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["LayerCounts", "count_nonfinite"]

_LISTED_IDS = 100


def count_nonfinite(rows: Tensor) -> Tensor | None:
    """Return how many values of each row are NaN or infinite, or `None` for none.

    Args:
        rows: Rows [n, *features] of any dtype.
    """
    floating = rows.dtype.is_floating_point or rows.dtype.is_complex
    if not floating or rows.numel() == 0:
        return None
    if rows.dtype.is_complex:
        rows = torch.view_as_real(rows)
    flat = rows.reshape(len(rows), -1)
    # One pass without a mask, a fortieth of the cost of one; NaN spreads to both ends.
    low, high = torch.aminmax(flat)
    if bool(torch.isfinite(low) & torch.isfinite(high)):
        return None
    return (~torch.isfinite(flat)).sum(1)


@dataclass(slots=True)
class LayerCounts:
    """What went wrong with the numbers of one layer in one block."""

    nonfinite_values: int = 0
    nonfinite_rows: int = 0
    nonfinite_ids: list[str] = field(default_factory=list)
    overflowed_values: int = 0
    overflowed_rows: int = 0
    overflowed_ids: list[str] = field(default_factory=list)

    def add_nonfinite(self, counts: Tensor, ids: Sequence[str]) -> None:
        """Add the counts of rows with these ids."""
        bad = _positive(counts)
        self.nonfinite_values += int(counts.sum())
        self.nonfinite_rows += len(bad)
        _extend(self.nonfinite_ids, [ids[row] for row in bad])

    def add_overflowed(self, counts: Tensor, ids: Sequence[str]) -> None:
        """Add the counts of rows with these ids."""
        bad = _positive(counts)
        self.overflowed_values += int(counts.sum())
        self.overflowed_rows += len(bad)
        _extend(self.overflowed_ids, [ids[row] for row in bad])

    def merge(self, other: "LayerCounts") -> None:
        """Add the counts of another part of the same layer."""
        self.nonfinite_values += other.nonfinite_values
        self.nonfinite_rows += other.nonfinite_rows
        _extend(self.nonfinite_ids, other.nonfinite_ids)
        self.overflowed_values += other.overflowed_values
        self.overflowed_rows += other.overflowed_rows
        _extend(self.overflowed_ids, other.overflowed_ids)

    def __bool__(self) -> bool:
        return bool(self.nonfinite_values or self.overflowed_values)

    def to_json(self) -> dict[str, Any]:
        """Return the counts for a commit record; ids are cut after the first 100."""
        return {
            "nonfinite_values": self.nonfinite_values,
            "nonfinite_rows": self.nonfinite_rows,
            "nonfinite_ids": self.nonfinite_ids,
            "overflowed_values": self.overflowed_values,
            "overflowed_rows": self.overflowed_rows,
            "overflowed_ids": self.overflowed_ids,
        }


def _positive(counts: Tensor) -> list[int]:
    found: list[int] = counts.nonzero().flatten().tolist()
    return found


def _extend(known: list[str], more: Sequence[str]) -> None:
    known.extend(more[: max(0, _LISTED_IDS - len(known))])

"""From a caught tensor to rows: where the sample axis is and how it comes to the front.

Pure functions of shapes; values are looked at by the probe alone.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Merged = Literal["", "batch_major", "batch_minor"]

__all__ = ["Merged", "RowLayout"]


@dataclass(frozen=True, slots=True)
class RowLayout:
    """How the rows of samples lie inside a caught tensor.

    Attributes:
        batch_axis: The axis that follows the batch, or `None` for a constant.
        merged: "" for an axis of samples alone; "batch_major" where it runs over
            samples and, faster, over a group such as heads; "batch_minor" where the
            samples run faster.
        group: Size of the group, 1 where nothing is merged.
        row_shape: Shape of one sample's row; the group stands where the axis was.
    """

    batch_axis: int | None
    merged: Merged
    group: int
    row_shape: tuple[int, ...]

    def caught_shape(self, num_samples: int) -> tuple[int, ...]:
        """Return the shape that the caught tensor must have."""
        axis = self.batch_axis
        if axis is None:
            return self.row_shape
        row = self.row_shape
        if not self.merged:
            return (*row[:axis], num_samples, *row[axis:])
        return (*row[:axis], num_samples * self.group, *row[axis + 1 :])

    def rows(self, tensor: Tensor, num_samples: int) -> Tensor:
        """Return [num_samples, *row_shape], a view of `tensor`."""
        axis = self.batch_axis
        if axis is None:
            return tensor.expand(num_samples, *tensor.shape)
        if self.merged == "batch_major":
            tensor = _split(tensor, axis, (num_samples, self.group))
        elif self.merged == "batch_minor":
            tensor = _split(tensor, axis, (self.group, num_samples))
            axis += 1
        return tensor.movedim(axis, 0) if axis else tensor


def _split(tensor: Tensor, axis: int, sizes: tuple[int, int]) -> Tensor:
    """Return a view in which `axis` became two."""
    shape, strides = tensor.shape, tensor.stride()
    return tensor.as_strided(
        (*shape[:axis], *sizes, *shape[axis + 1 :]),
        (*strides[:axis], strides[axis] * sizes[1], *strides[axis:]),
    )

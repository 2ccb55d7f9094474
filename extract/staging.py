"""From a captured tensor to rows in host memory: cast, count, copy.

One small class stands between the forward and the block buffers, because a copy from
a device finishes later than the call that starts it: nobody may look at a buffer
before `settle` has returned.
"""

import abc
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Cast", "CudaStaging", "DirectStaging", "Staging", "cast_rows"]


class Staging(abc.ABC):
    """Copies tensors into host buffers, perhaps asynchronously."""

    @abc.abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a host buffer that copies can go to."""

    @abc.abstractmethod
    def copy(self, values: Tensor, target: Tensor) -> None:
        """Start to copy `values` into the host tensor `target`."""

    @abc.abstractmethod
    def settle(self) -> None:
        """Return when every copy that was started is complete."""


class DirectStaging(Staging):
    """For models on the CPU: a copy is done when the call returns."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def copy(self, values: Tensor, target: Tensor) -> None:
        target.copy_(values)

    def settle(self) -> None:
        return


class CudaStaging(Staging):
    """For models on a CUDA device: page-locked buffers, copies on a side stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        make_stream: Any = torch.cuda.Stream
        self._stream = make_stream(device)
        self._pending: Any = None

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def copy(self, values: Tensor, target: Tensor) -> None:
        if not target.is_contiguous() or not values.is_cuda:
            torch.cuda.current_stream(self._device).synchronize()
            target.copy_(values)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(values, non_blocking=True)
            # The allocator must not hand this memory out before the copy has read it.
            values.record_stream(self._stream)
            self._pending = self._stream.record_event()

    def settle(self) -> None:
        if self._pending is not None:
            self._pending.synchronize()
            self._pending = None


@dataclass(frozen=True, slots=True)
class Cast:
    """Rows ready to be copied, and how many values of each row did not fit.

    `rows` may still be of the wider dtype where every value fits: the copy casts them.
    """

    rows: Tensor
    overflowed: Tensor | None


def cast_rows(values: Tensor, dtype: torch.dtype, *, saturate: bool) -> Cast:
    """Prepare rows for another dtype, and count finite values that do not fit it.

    Args:
        values: Rows [n, *features].
        dtype: The dtype stored, of the same kind: floating, complex or integer.
        saturate: Whether values beyond its range become its largest finite value;
            infinities do too, NaN stays.
    """
    on_host = values.device.type == "cpu"
    is_complex = values.dtype.is_complex and dtype.is_complex
    parts = torch.view_as_real(values.resolve_conj()) if is_complex else values
    part_dtype = dtype.to_real() if is_complex else dtype
    limits = _limits(parts.dtype, part_dtype)
    if limits is None:
        return Cast(values if on_host else values.to(dtype), None)
    low, high = limits
    # On a device a look at the values would stall it, so rows are always counted there.
    if on_host and parts.numel():
        least, most = torch.aminmax(parts)
        # False for NaN too, which then takes the exact way.
        if bool((least >= low) & (most <= high)):
            return Cast(values, None)
    cast = parts.to(part_dtype)
    if part_dtype.is_floating_point:
        lost = torch.isinf(cast) & torch.isfinite(parts)
    else:
        lost = (parts < low) | (parts > high)
    if saturate:
        cast = parts.clamp(low, high).to(part_dtype)
    if is_complex:
        lost, cast = lost.any(-1), torch.view_as_complex(cast)
    counts = lost.flatten(1).sum(1) if lost.ndim > 1 else lost.to(torch.int64)
    return Cast(cast, counts)


def _limits(
    source: torch.dtype, target: torch.dtype
) -> tuple[int, int] | tuple[float, float] | None:
    """Return the range that survives a cast, or `None` where all of it does."""
    if source.is_floating_point and target.is_floating_point:
        largest = torch.finfo(target).max
        fits = torch.finfo(source).max <= largest
        return None if fits else (-largest, largest)
    if torch.bool in (source, target) or not (_is_integer(source, target)):
        return None
    have, want = torch.iinfo(source), torch.iinfo(target)
    if want.min <= have.min and have.max <= want.max:
        return None
    return max(have.min, want.min), min(have.max, want.max)


def _is_integer(*dtypes: torch.dtype) -> bool:
    return not any(dtype.is_floating_point or dtype.is_complex for dtype in dtypes)

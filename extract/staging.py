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
    """Prepare rows for a narrower dtype, and count finite values that do not fit it.

    Args:
        values: Rows [n, *features].
        dtype: The dtype stored.
        saturate: Whether values beyond its range become its largest finite value;
            infinities do too, NaN stays.
    """
    on_host = values.device.type == "cpu"
    if not dtype.is_floating_point or not values.dtype.is_floating_point:
        return Cast(values if on_host else values.to(dtype), None)
    largest = torch.finfo(dtype).max
    # On a device a look at the values would stall it, so rows are always counted there.
    if on_host and values.numel():
        low, high = torch.aminmax(values)
        # False for NaN too, which then takes the exact way.
        if bool((low >= -largest) & (high <= largest)):
            return Cast(values, None)
    cast = values.to(dtype)
    lost = torch.isinf(cast) & torch.isfinite(values)
    counts = lost.reshape(len(values), -1).sum(1)
    if saturate:
        cast = values.clamp(-largest, largest).to(dtype)
    return Cast(cast, counts)

"""The settings of one extraction, checked when they are made."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from torchlens.errors import InputError

from .loading import OnError
from .writing import NonFinite

__all__ = ["DEFAULT_BATCH_SIZE", "OnDivergence", "Settings"]

DEFAULT_BATCH_SIZE = 32
OnDivergence = Literal["raise", "retrace"]


@dataclass(frozen=True, slots=True)
class Settings:
    """How to run; what to run is in `job`.

    Attributes:
        output_dir: Path or URL of the store; `None` keeps it in memory.
        batch_size: Samples run together; `None` takes the DataLoader's, else 32.
        block_rows: Rows of a block; `None` lets the layout choose.
        max_bytes: Largest store permitted.
        time_limit_seconds: When to stop for a requeue.
        on_divergence: What to do with a batch that takes another path than planned.
        on_error: What to do with an item that cannot be read.
        nonfinite: What to do with NaN, infinity and overflow.
        overwrite: Whether a store that is there is deleted first.
        progress: Whether anything is shown.
    """

    output_dir: str | None
    batch_size: int | None = None
    block_rows: int | None = None
    max_bytes: int | None = None
    time_limit_seconds: float | None = None
    on_divergence: OnDivergence = "raise"
    on_error: OnError = "raise"
    nonfinite: NonFinite = "keep"
    overwrite: bool = False
    progress: bool = True

    def __post_init__(self) -> None:
        _check_positive("batch_size", self.batch_size)
        _check_positive("block_rows", self.block_rows)
        _check_positive("max_bytes", self.max_bytes)
        _check_positive("time_limit", self.time_limit_seconds)
        _check_choice("on_divergence", self.on_divergence, get_args(OnDivergence))
        _check_choice("on_error", self.on_error, get_args(OnError))
        _check_choice("nonfinite", self.nonfinite, get_args(NonFinite))


def _check_positive(name: str, value: float | None) -> None:
    if value is not None and (isinstance(value, bool) or not value > 0):
        raise InputError(f"{name} must be a number above zero, but is {value!r}.")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        listed = ", ".join(map(repr, choices))
        raise InputError(f"{name} must be one of {listed}, but is {value!r}.")


def as_location(output_dir: str | os.PathLike[str] | None) -> str | None:
    """Return a path or URL as text."""
    return None if output_dir is None else os.fspath(output_dir)


def as_dtype_names(
    dtype: str | torch.dtype | Mapping[str, str | torch.dtype] | None,
) -> str | dict[str, str] | None:
    """Return plain names of dtypes, such as "float16", for all layers or by layer."""
    if dtype is None:
        return None
    if isinstance(dtype, Mapping):
        return {layer: _dtype_name(value) for layer, value in dtype.items()}
    return _dtype_name(dtype)


def _dtype_name(dtype: str | torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if not isinstance(getattr(torch, name, None), torch.dtype):
        raise InputError(f'dtype={dtype!r} is no torch dtype; such as "float16".')
    return name

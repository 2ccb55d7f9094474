"""What one forward pass is called with, and how it is cut along the sample axis.

Knows tensors and nested containers only; where batches come from is the engine's or
the caller's business.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .errors import InputError
from .structures import format_path, leaves, map_tensors

_NOISE_SEED = 20_240_229
_NOISE = 0.1

__all__ = ["ModelInputs", "as_inputs"]


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """Positional and keyword arguments of one call of a model.

    Example:
        >>> inputs = ModelInputs((torch.zeros(4, 3),), {"scale": 2.0})
        >>> inputs.num_samples()
        4
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.args, tuple):
            raise InputError(
                "ModelInputs.args was wanted as a tuple of positional arguments, but "
                f"came as {type(self.args).__name__}. Write (x,) for one argument."
            )
        if not isinstance(self.kwargs, Mapping):
            raise InputError(
                "ModelInputs.kwargs was wanted as a mapping of keyword arguments, but "
                f"came as {type(self.kwargs).__name__}."
            )

    def num_samples(self, batch_axis: int = 0) -> int:
        """Return the batch size: that of the first tensor that has `batch_axis`.

        Raises:
            InputError: If no tensor has that axis, or the batch is empty.
        """
        for path, tensor in leaves((self.args, dict(self.kwargs))):
            if tensor.ndim > batch_axis:
                if tensor.shape[batch_axis] == 0:
                    raise InputError(
                        f"The input {_argument(path)} has no samples: its shape is "
                        f"{list(tensor.shape)}. Give at least one."
                    )
                return int(tensor.shape[batch_axis])
        raise InputError(
            f"No input tensor has an axis {batch_axis} to hold samples; the inputs "
            f"hold {self.describe()}. Give a collated batch, or another batch_axis."
        )

    def describe(self) -> str:
        """Return the tensors in words, for messages."""
        found = [
            f"{_argument(path)} {str(tensor.dtype)[6:]} {list(tensor.shape)}"
            for path, tensor in leaves((self.args, dict(self.kwargs)))
        ]
        return ", ".join(found) or "no tensors"

    def take(self, samples: tuple[int, ...], batch_axis: int = 0) -> "ModelInputs":
        """Return the batch of these samples, in this order.

        Tensors whose size along `batch_axis` is not the batch size are constants and
        stay as they are.
        """
        size = self.num_samples(batch_axis)

        def pick(tensor: Tensor) -> Tensor:
            if tensor.ndim <= batch_axis or tensor.shape[batch_axis] != size:
                return tensor
            where = torch.tensor(samples, device=tensor.device)
            return tensor.index_select(batch_axis, where)

        return self.map(pick)

    def distinct(self, num_samples: int, batch_axis: int = 0) -> "ModelInputs":
        """Return a batch of `num_samples` samples that all differ.

        The first rows are used as they are; where there are too few, or two are equal,
        a row is changed deterministically: floats get scaled and seeded noise added,
        integers are rolled along the last axis, and masks (booleans and tensors of
        zeros and ones) stay.
        """
        size = self.num_samples(batch_axis)
        picked = tuple(index % size for index in range(num_samples))
        batch = self.take(picked, batch_axis)
        repeats = _repeated(batch, num_samples, batch_axis)
        if not repeats:
            return batch

        def change(tensor: Tensor) -> Tensor:
            if tensor.ndim <= batch_axis or tensor.shape[batch_axis] != num_samples:
                return tensor
            changed = tensor.clone()
            for index in repeats:
                row = changed.select(batch_axis, index)
                row.copy_(_perturbed(row, index))
            return changed

        return batch.map(change)

    def to(self, device: torch.device) -> "ModelInputs":
        """Return the inputs with every tensor on `device`."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def clone(self) -> "ModelInputs":
        """Return inputs that share no memory with these."""
        return self.map(lambda tensor: tensor.clone())

    def map(self, change: Callable[[Tensor], Tensor]) -> "ModelInputs":
        """Return the inputs with every tensor replaced by `change` of it."""
        return ModelInputs(
            tuple(map_tensors(value, change) for value in self.args),
            {name: map_tensors(value, change) for name, value in self.kwargs.items()},
        )


def as_inputs(example: Any) -> ModelInputs:
    """Return `example` as the arguments of one call.

    A tensor is the only argument, a tuple holds the positional ones, a mapping the
    keyword ones.  A list is refused, since it may be one argument or several.

    Raises:
        InputError: If `example` is none of these.
    """
    if isinstance(example, ModelInputs):
        return example
    if isinstance(example, Tensor):
        return ModelInputs((example,))
    if isinstance(example, Mapping):
        names = [name for name in example if not isinstance(name, str)]
        if names:
            raise InputError(
                "A mapping gives keyword arguments, so its keys must be strings; "
                f"{names[0]!r} is not. Wrap a mapping that is itself the argument as "
                "tl.ModelInputs((mapping,))."
            )
        return ModelInputs((), dict(example))
    if isinstance(example, tuple) and not hasattr(example, "_fields"):
        return ModelInputs(example)
    if isinstance(example, list):
        raise InputError(
            f"A list of {len(example)} items came as the model's inputs, which may be "
            "one argument or several. Give a tuple for several positional arguments, "
            "or tl.ModelInputs((the_list,)) for one."
        )
    raise InputError(
        "The model's inputs were wanted as a tensor, a tuple of arguments, a mapping "
        f"of keyword arguments or tl.ModelInputs, but a {type(example).__name__} came."
    )


def _argument(path: tuple[str | int, ...]) -> str:
    name = path[1]
    return (name if isinstance(name, str) else f"#{name}") + format_path(path[2:])


def _repeated(batch: ModelInputs, size: int, axis: int) -> tuple[int, ...]:
    """Return the samples that equal an earlier one in every tensor."""
    rows = [
        tensor.detach()
        for _, tensor in leaves((batch.args, dict(batch.kwargs)))
        if tensor.ndim > axis and tensor.shape[axis] == size
    ]

    def same(one: int, other: int) -> bool:
        return all(
            torch.equal(row.select(axis, one), row.select(axis, other)) for row in rows
        )

    return tuple(
        index
        for index in range(1, size)
        if any(same(index, earlier) for earlier in range(index))
    )


def _perturbed(row: Tensor, index: int) -> Tensor:
    if row.dtype == torch.bool or row.numel() == 0 or _is_mask(row):
        return row
    if row.dtype.is_floating_point or row.dtype.is_complex:
        generator = torch.Generator().manual_seed(_NOISE_SEED + index)
        noise = torch.randn(row.shape, generator=generator, dtype=torch.float32)
        wide = torch.complex64 if row.dtype.is_complex else torch.float32
        values = row.to(wide)
        # One standard deviation would leave a constant row unchanged in scale.
        spread = values.std() if row.numel() > 1 else values.abs().sum()
        scale = float(spread) or float(values.abs().max()) or 1.0
        moved = values * (1 + _NOISE * index) + noise.to(row.device) * scale * _NOISE
        return moved.to(row.dtype)
    return row.roll(index, dims=-1) if row.ndim else row


def _is_mask(row: Tensor) -> bool:
    """Return whether an integer row holds zeros and ones only."""
    if row.dtype.is_floating_point or row.dtype.is_complex:
        return False
    return bool(((row == 0) | (row == 1)).all())

"""Small forwards that show what the chosen sites do before a dataset is run.

Runs through the same hooks and wrappers as a replay, so that what a plan promises was
seen on the path that will be used; only here every caught tensor is cloned.
"""

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .catches import Catch, Halt, describe_key
from .errors import CaptureError
from .interception import Interception
from .model_inputs import ModelInputs
from .run_modes import RunModes
from .structures import leaves

__all__ = [
    "LeftTensors",
    "OtherPathError",
    "Probe",
    "Sighting",
    "first_line",
    "is_batched",
    "preserved_tensors",
]


class OtherPathError(CaptureError):
    """The probe's batch took another path than the one that was traced."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """What one probe forward showed.

    Attributes:
        values: A clone of each site's tensor, in the order of the catches.
        order: Indices of the catches in the order in which the tensors came.
        unsafe: Catches whose tensor was written to after it was caught, or is a part
            of a larger memory.
        output: Tensors of the model's output; empty when the forward was ended early.
        caught: Each site's tensor itself, and its write count then.
    """

    values: tuple[Tensor, ...]
    order: tuple[int, ...]
    unsafe: frozenset[int]
    output: tuple[Tensor, ...]
    caught: tuple[tuple[Tensor, int | None], ...]

    def reused_by(self, later: "Sighting") -> frozenset[int]:
        """Return the catches whose memory a later run has written to or handed on."""
        return frozenset(
            index
            for index, ((tensor, version), value) in enumerate(
                zip(self.caught, self.values, strict=True)
            )
            if _is_unsafe(tensor, version, value)
            or _memory(tensor) == _memory(later.caught[index][0])
        )


class Probe:
    """Runs a model on small batches, with or without catches."""

    def __init__(self, model: nn.Module, modes: RunModes) -> None:
        self._model = model
        self._modes = modes

    def plain(self, inputs: ModelInputs) -> tuple[Tensor, ...]:
        """Return the tensors of the model's output without catching anything.

        Random numbers go on from one run to the next, so that two runs of a model that
        draws them differ.
        """
        given = inputs.clone()
        with ExitStack() as stack:
            self._modes.enter(stack, inference=False)
            return _tensors(self._model(*given.args, **given.kwargs))

    def sight(
        self, inputs: ModelInputs, catches: Sequence[Catch], *, halt: bool = False
    ) -> Sighting:
        """Run once with every catch installed and return what came.

        Args:
            inputs: The batch.
            catches: What to catch.
            halt: Whether to end the forward after the last of them.

        Raises:
            OtherPathError: If a site of the trace does not appear in this run.
        """
        seen: dict[int, tuple[Tensor, int | None, Tensor]] = {}

        def receive(index: int, tensor: Tensor) -> None:
            version = None if tensor.is_inference() else tensor._version
            seen[index] = (tensor, version, tensor.detach().clone())
            if halt and len(seen) == len(catches):
                interception.relay.end()
                raise Halt

        interception = Interception(self._model, catches, receive, self._modes)
        given = inputs.clone()
        with interception:
            output, _ = interception.forward(given.args, given.kwargs, inference=False)
        problem = interception.relay.problem
        absent = [catch for index, catch in enumerate(catches) if index not in seen]
        if problem is None and absent:
            problem = f"{describe_key(absent[0].key)} never appeared"
        if problem is not None:
            raise OtherPathError(
                f"{type(self._model).__name__} took another path in the probe on "
                f"{inputs.describe()} than when it was traced: {problem}. A plan needs "
                "a path that does not depend on the batch size or on the values of "
                "single samples."
            )
        return Sighting(
            values=tuple(seen[index][2] for index in range(len(catches))),
            order=tuple(seen),
            unsafe=frozenset(
                index
                for index, (tensor, version, clone) in seen.items()
                if _is_unsafe(tensor, version, clone)
            ),
            output=_tensors(output),
            caught=tuple(seen[index][:2] for index in range(len(catches))),
        )


@contextmanager
def preserved_tensors(model: nn.Module) -> Iterator["LeftTensors"]:
    """Restore the model's buffers and tensor attributes on exit.

    Yields an object whose `found` tells whether the forward left new tensors on the
    model meanwhile: made in inference mode, they would break a later training.
    """
    before = _state(model)
    values = {
        id(tensor): (tensor, tensor.detach().clone())
        for tensor in model.buffers()
        if not (tensor.is_meta or tensor.is_inference())
    }
    left = LeftTensors(model, before)
    try:
        yield left
    finally:
        with torch.no_grad():
            for tensor, value in values.values():
                if not torch.equal(tensor, value):
                    tensor.copy_(value)


class LeftTensors:
    """Compares the tensors that a model holds with those it held before."""

    def __init__(self, model: nn.Module, before: Mapping[str, int]) -> None:
        self._model = model
        self._before = before

    @property
    def found(self) -> bool:
        """Return whether the model holds tensors that it did not hold before."""
        known = set(self._before.values())
        return any(key not in known for key in _state(self._model).values())


def _state(model: nn.Module) -> dict[str, int]:
    """Return the ids of all tensors in the attributes of all modules."""
    found = {}
    for name, module in model.named_modules():
        for path, tensor in leaves(dict(vars(module))):
            found[f"{name}:{path}"] = id(tensor)
    return found


def _tensors(output: Any) -> tuple[Tensor, ...]:
    return tuple(tensor for _, tensor in leaves(output))


def is_batched(tensor: Tensor) -> bool:
    """Return whether `tensor` exists inside a transform such as vmap only."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def _memory(tensor: Tensor) -> int:
    """Return the address of a tensor's memory; 0 where it has none."""
    return tensor.untyped_storage().data_ptr()


def _is_unsafe(tensor: Tensor, version: int | None, clone: Tensor) -> bool:
    if version is None or tensor._version != version:
        return True
    if tensor.layout is not torch.strided or tensor.is_quantized or is_batched(tensor):
        return True
    # Writes through numpy, `.data` or an extension are not counted.
    if not torch.equal(tensor, clone):
        return True
    # A small view would keep all of its memory alive.
    return bool(tensor.untyped_storage().nbytes() > tensor.numel() * tensor.itemsize)


def first_line(error: BaseException) -> str:
    """Return the type and the first line of an error's message."""
    return traceback.format_exception_only(error)[0].strip().splitlines()[0]

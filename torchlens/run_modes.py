"""The torch settings under which a plan's forwards run, restored after each.

They stand around every single forward: between two of them the caller's code must find
torch as it left it.
"""

from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

import torch
from torch import nn

from .model_access import compiler_is_loaded

__all__ = ["Autocast", "RunModes", "ambient_autocast", "training_mode"]


@dataclass(frozen=True, slots=True)
class Autocast:
    """Autocast as it was when a plan was made: device type and dtype, or off."""

    device_type: str
    dtype: str | None = None

    @property
    def is_ambient(self) -> bool:
        """Return whether autocast stands like this now."""
        if self.dtype is None:
            return not torch.is_autocast_enabled(self.device_type)
        return ambient_autocast(self.device_type) == self

    def context(self) -> AbstractContextManager[object]:
        """Return a context in which autocast stands like this."""
        if self.dtype is None:
            return torch.autocast(self.device_type, enabled=False)
        return torch.autocast(self.device_type, getattr(torch, self.dtype))


def ambient_autocast(device_type: str) -> Autocast:
    """Return autocast as it stands now for `device_type`."""
    if not torch.is_autocast_enabled(device_type):
        return Autocast(device_type)
    dtype = str(torch.get_autocast_dtype(device_type)).removeprefix("torch.")
    return Autocast(device_type, dtype)


class RunModes:
    """Builds the contexts of one forward; what it cannot need is left out."""

    def __init__(self, autocast: Autocast) -> None:
        self._autocast = autocast

    def enter(self, stack: ExitStack, *, inference: bool) -> None:
        """Enter no_grad or inference mode, and the rest, on `stack`."""
        stack.enter_context(torch.inference_mode() if inference else torch.no_grad())
        # Which kernels run would otherwise depend on whether anybody watches.
        if torch.backends.mha.get_fastpath_enabled():
            stack.callback(torch.backends.mha.set_fastpath_enabled, True)
            torch.backends.mha.set_fastpath_enabled(False)
        if not self._autocast.is_ambient:
            stack.enter_context(self._autocast.context())
        if compiler_is_loaded():
            stack.enter_context(torch.compiler.set_stance("force_eager"))


def training_mode(model: nn.Module, training: bool) -> AbstractContextManager[object]:
    """Return a context in which every module of `model` is in the given mode.

    Modules are set one by one and restored to their own former mode: `model.train()`
    may be overridden, and a model may hold some modules in the other mode on purpose.
    """
    stack = ExitStack()
    changed = [module for module in model.modules() if module.training is not training]
    if training:
        # Train mode is asked for as the model has it, frozen parts included.
        changed = [] if model.training else changed
    for module in changed:
        module.training = training
        stack.callback(setattr, module, "training", not training)
    return stack

"""The torch settings under which a plan's forwards run, restored after each.

They stand around every single forward: between two of them the caller's code must find
torch as it left it.
"""

from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

import torch
from torch import nn

from .model_state import EAGER_AND_UNFUSED

__all__ = ["Autocast", "ModuleModes", "RunModes", "ambient_autocast", "training_mode"]


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


class ModuleModes:
    """The train/eval modes of a model's modules, set for one forward at a time.

    Whoever takes rows on the fly may train another part of the same model in between,
    or take rows of it elsewhere, and calls `train()` as often as it likes.
    """

    def __init__(self, model: nn.Module, training: bool) -> None:
        """Note what the modes are to be: as the model has them, or changed as asked."""
        with training_mode(model, training):
            self._modules = list(model.modules())
            self._wanted = [module.training for module in self._modules]

    def enter(self, stack: ExitStack) -> None:
        """Set the modes until `stack` closes."""
        found = self._read()
        stack.callback(self._set, found)
        if found != self._wanted:
            self._set(self._wanted)

    def _read(self) -> list[bool]:
        return [module.training for module in self._modules]

    def _set(self, flags: list[bool]) -> None:
        if self._read() == flags:
            return
        for module, flag in zip(self._modules, flags, strict=True):
            if module.training is not flag:
                module.training = flag


class RunModes:
    """Builds the contexts of one forward; what it cannot need is left out.

    Attributes:
        modules: Modes that the modules get; `None` leaves them as they are.
    """

    def __init__(self, autocast: Autocast) -> None:
        """Take autocast; the modules' modes stay, unless `modules` is set later."""
        self._autocast = autocast
        self.modules: ModuleModes | None = None

    def enter(self, stack: ExitStack, *, inference: bool) -> None:
        """Enter no_grad or inference mode, and the rest, on `stack`."""
        if self.modules is not None:
            self.modules.enter(stack)
        stack.enter_context(torch.inference_mode() if inference else torch.no_grad())
        stack.enter_context(EAGER_AND_UNFUSED)
        if not self._autocast.is_ambient:
            stack.enter_context(self._autocast.context())


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

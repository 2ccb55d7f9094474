"""One model with the catches of a plan put on it, and forwards run under them.

Knows which tensor appeared where and when; what happens to it is decided by whoever
gave `receive`: the replayer, the probe, or a recording.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import nn

from .arming import arm, suspend, trim_mode_stack
from .callers import Callers
from .catches import Catch, Halt, Receive, Relay
from .errors import CaptureError, PlanError
from .guards import CompositeGuards
from .hooks import Found, has_output_hooks, install_module_catches
from .model_access import original_module
from .model_state import TURNS
from .run_modes import RunModes

__all__ = ["Interception"]


class Interception:
    """Context in which `forward` runs the model and hands caught tensors on.

    `receive` gets the index of the catch and the tensor; it may raise `Halt`.
    """

    def __init__(
        self,
        model: nn.Module,
        catches: Sequence[Catch],
        receive: Receive,
        modes: RunModes,
    ) -> None:
        self._model = model
        self._catches = tuple(catches)
        self._modes = modes
        self._guards = CompositeGuards()
        self._composite = any(catch.composite for catch in self._catches)
        self._stack = ExitStack()
        self._wrapped: list[nn.Module] = []  # had no forward hooks of the user's
        self.relay = Relay(receive, Callers(Interception.forward.__code__))

    def __enter__(self) -> "Interception":
        try:
            self._install()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    @contextmanager
    def removed(self) -> Iterator[None]:
        """Take everything off the model for a while, so that it runs as it is."""
        self._remove()
        try:
            yield
        finally:
            self._install()

    def forward(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, inference: bool
    ) -> tuple[Any, bool]:
        """Run the model once; return its output and whether it was halted.

        Raises:
            CaptureError: If a forward of this installation is running already.
        """
        relay = self.relay
        if relay.thread:
            raise CaptureError(
                "This model is already running under these catches, and one capture "
                "cannot run inside another. Finish the first, or use two models."
            )
        if any(map(has_output_hooks, self._wrapped)):
            with self.removed():
                pass  # installed anew, now after the user's hooks
        depth = torch._C._len_torch_function_stack()
        with ExitStack() as stack:
            self._modes.enter(stack, inference=inference)
            if self._composite:
                stack.enter_context(self._guards)
            relay.begin()
            try:
                return self._model(*args, **kwargs), False
            except Halt:
                return None, True
            finally:
                relay.end()
                trim_mode_stack(depth)

    def _remove(self) -> None:
        with TURNS:
            self._stack.close()

    def _install(self) -> None:
        with TURNS:
            self._put_on()

    def _put_on(self) -> None:
        self.relay.counters.clear()  # those of an earlier installation
        by_module: dict[str, list[Found]] = {}
        by_armed: dict[str, list[Found]] = {}
        for index, catch in enumerate(self._catches):
            groups = by_armed if catch.via == "mode" else by_module
            groups.setdefault(catch.key.address, []).append((index, catch))
        # Ops first: their wrappers are the inner ones, so that a wrapper that catches
        # a module's output stands outside of them.
        modes = []
        for address, found in by_armed.items():
            module = self._module(address)
            names = {name for _, catch in found for name in catch.children}
            children = {self._module(name) for name in sorted(names)} - {module}
            modes.append((arm(module, found, self.relay, self._stack), children))
        for mode, children in modes:
            for child in children:
                suspend(child, mode, self._stack)
        self._wrapped = []
        for address, found in by_module.items():
            module = self._module(address)
            install_module_catches(module, found, self.relay, self._stack)
            hooked = has_output_hooks(module)
            if not hooked and all(catch.via == "hook" for _, catch in found):
                self._wrapped.append(module)

    def _module(self, address: str) -> nn.Module:
        if address == "self":
            return self._model
        try:
            return original_module(self._model.get_submodule(address))
        except AttributeError as error:
            raise PlanError(
                f"The plan catches a tensor in the module {address!r}, but "
                f"{type(self._model).__name__} has no such module. Plan again with "
                "this model."
            ) from error

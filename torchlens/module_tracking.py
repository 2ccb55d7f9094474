"""Follows the calls of every submodule while a capture runs.

Each module's `forward` is wrapped on the instance, so that direct calls of `.forward`
are seen too; a pre-hook and a hook tell a regular call, whose output may still be
replaced by the user's own hooks.  All of it is taken off again, whatever happens.
"""

import functools
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .call_sites import CallSites
from .capture_state import CaptureState, OpenCall
from .records import Path, SiteKey, TensorSpec
from .structures import leaves

__all__ = ["BOUNDARIES", "ModuleTracker"]

_Forward = Callable[..., Any]


def _wrap(tracker: "ModuleTracker", module: nn.Module, original: _Forward) -> _Forward:
    @functools.wraps(original)
    def traced_forward(*args: Any, **kwargs: Any) -> Any:
        # The bookkeeping reads tensors; the mode must not take that for the model's.
        with torch._C.DisableTorchFunction():
            call = tracker.begin(module, args, kwargs, sys._getframe(1))
        try:
            output = original(*args, **kwargs)
            if call.direct:
                with torch._C.DisableTorchFunction():
                    tracker.end(call, output)
            return output
        except BaseException:
            tracker.abandon(call)
            raise

    return traced_forward


BOUNDARIES = frozenset(
    constant
    for constant in _wrap.__code__.co_consts
    if getattr(constant, "co_name", "") == "traced_forward"
)


class ModuleTracker:
    """Opens a call when a module's forward begins and closes it with its outputs."""

    def __init__(
        self,
        addresses: dict[nn.Module, str],
        state: CaptureState,
        sites: CallSites,
    ) -> None:
        self._addresses = addresses
        self._state = state
        self._sites = sites
        self._handles: list[RemovableHandle] = []
        self._replaced: list[tuple[nn.Module, bool, Any]] = []
        self._expected: nn.Module | None = None
        self._call_counts: dict[str, int] = {}
        self._chains: dict[tuple[object, ...], int] = {}

    def install(self) -> None:
        """Put hooks and wrappers on every module."""
        for module in self._addresses:
            if isinstance(module, torch.jit.ScriptModule):
                continue  # takes no hooks; its result will be of unknown origin
            self._handles.append(module.register_forward_pre_hook(self._expect))
            self._handles.append(module.register_forward_hook(self._finish))
            own = "forward" in module.__dict__
            original = module.forward
            self._replaced.append((module, own, original if own else None))
            module.__dict__["forward"] = _wrap(self, module, original)

    def remove(self) -> None:
        """Leave every module as it was found."""
        for handle in self._handles:
            handle.remove()
        for module, own, original in self._replaced:
            if own:
                module.__dict__["forward"] = original
            else:
                module.__dict__.pop("forward", None)
        self._handles.clear()
        self._replaced.clear()

    def _expect(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._expected = module

    def _finish(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        stack = self._state.stack
        if stack and stack[-1].module_id == id(module) and not stack[-1].direct:
            with torch._C.DisableTorchFunction():
                self.end(stack[-1], output)

    def begin(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        frame: Any,
    ) -> OpenCall:
        """Open a call of `module`."""
        state = self._state
        direct = self._expected is not module
        self._expected = None
        address = self._addresses[module]
        count = self._call_counts[address] = self._call_counts.get(address, 0) + 1
        parent = state.stack[-1] if state.stack else None
        call_site = None if parent is None else self._sites.at(frame)
        identity = (
            None if parent is None else parent.chain,
            id(call_site),
            address,
        )
        inputs = []
        if parent is not None:
            for path, tensor in leaves((args, kwargs)):
                origin = state.origin(tensor)
                if origin.node is not None:
                    spec = state.nodes[origin.node].spec
                    inputs.append((path[1:], origin.node, spec))
        call = OpenCall(
            index=len(state.calls),
            module_id=id(module),
            address=address,
            call_index=count,
            parent=None if parent is None else parent.index,
            chain=self._chains.setdefault(identity, len(self._chains)),
            inputs=tuple(inputs),
            first_node=len(state.nodes),
            direct=direct,
            call_site=call_site,
            start_seconds=perf_counter(),
        )
        state.calls.append(call)
        state.stack.append(call)
        if parent is None:
            self._add_inputs(call, args, kwargs)
        return call

    def _add_inputs(
        self, call: OpenCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Make the model's own inputs the first nodes of the graph."""
        state = self._state
        inputs: list[tuple[Path, int, TensorSpec]] = []
        for path, tensor in leaves((args, kwargs)):
            known = state.table.node_of(tensor)
            if known is None:
                key = SiteKey("module_input", call.address, 1, path=path[1:])
                raw = state.boundary("input", "input", tensor, (), key, ())
                known = state.add(raw, tensor)
            inputs.append((path[1:], known, state.nodes[known].spec))
        call.inputs = tuple(inputs)
        call.first_node = len(state.nodes)

    def end(self, call: OpenCall, output: Any) -> None:
        """Close `call`, whose module returned `output`."""
        state = self._state
        outputs: list[tuple[Path, int, TensorSpec]] = []
        for path, tensor in leaves(output):
            key = SiteKey("module_output", call.address, call.call_index, path=path)
            origin = state.origin(tensor)
            node = origin.node
            if node is None or node < call.first_node:
                node = self._add_identity(call, path, key, tensor, origin.param)
            outputs.append((path, node, state.nodes[node].spec))
            if key == state.stop_at:
                self._close(call, outputs)
                state.maybe_stop(key)
        self._close(call, outputs)

    def _add_identity(
        self,
        call: OpenCall,
        path: Path,
        key: SiteKey,
        tensor: Tensor,
        param: str | None,
    ) -> int:
        """Add the op of a module that returns a tensor it did not make."""
        state = self._state
        source = state.table.node_of(tensor)
        raw = state.boundary(
            "op",
            "identity",
            tensor,
            () if source is None else (source,),
            key,
            (call.chain, "identity", path),
            () if param is None else (param,),
        )
        return state.add(raw, tensor)

    def _close(
        self, call: OpenCall, outputs: list[tuple[Path, int, TensorSpec]]
    ) -> None:
        call.outputs = tuple(outputs)
        call.end_node = len(self._state.nodes)
        call.duration_seconds = perf_counter() - call.start_seconds
        self._unwind(call)

    def abandon(self, call: OpenCall) -> None:
        """Close `call` and all calls inside it without outputs: an error passed by."""
        self._unwind(call)

    def _unwind(self, call: OpenCall) -> None:
        stack = self._state.stack
        if call in stack:
            while stack and stack.pop() is not call:
                pass

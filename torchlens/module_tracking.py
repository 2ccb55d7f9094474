"""Follows the calls of every submodule while a capture runs.

Two wrappers on each instance: one around a whole call, with the user's hooks, whose
result is the module's output; one around `forward`, which sees what the forward gets,
and direct calls of `.forward`.  Both are taken off again, whatever happens.
"""

import functools
import sys
import threading
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

import torch
from torch import nn

from .call_sites import CallSites
from .capture_state import CaptureState, OpenCall
from .records import Path, SiteKey, TensorSpec
from .structures import argument_leaves, leaves

__all__ = ["ModuleTracker", "call_sites"]

_Forward = Callable[..., Any]


def _wrap_call(
    tracker: "ModuleTracker", module: nn.Module, original: _Forward
) -> _Forward:
    def traced_call(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != tracker.thread:
            return original(*args, **kwargs)
        depth = len(tracker.stack)
        tracker.expected = module
        try:
            output = original(*args, **kwargs)
            if len(tracker.stack) > depth:
                # The bookkeeping reads tensors; that is not the model's doing.
                with torch._C.DisableTorchFunction():
                    tracker.end(tracker.stack[depth], output)
            return output
        except BaseException as error:
            tracker.expected = None
            tracker.unwind(depth, error)
            raise

    return traced_call


def _wrap_forward(
    tracker: "ModuleTracker", module: nn.Module, original: _Forward
) -> _Forward:
    def traced_forward(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != tracker.thread:
            return original(*args, **kwargs)
        depth = len(tracker.stack)
        with torch._C.DisableTorchFunction():
            call = tracker.begin(module, args, kwargs, sys._getframe(1))
        try:
            output = original(*args, **kwargs)
            if call.direct:
                with torch._C.DisableTorchFunction():
                    tracker.end(call, output)
            return output
        except BaseException as error:
            tracker.unwind(depth, error)
            raise

    # Some models look at the signature of their parts.
    traced_forward.__wrapped__ = original  # type: ignore[attr-defined]
    return traced_forward


@functools.lru_cache(maxsize=1)
def call_sites() -> CallSites:
    """Return the call sites that end at the wrappers of this module.

    Code does not change, so that every capture of the process shares what is known.
    """
    ends = (_inner_code(_wrap_forward), ModuleTracker.call.__code__)
    return CallSites(frozenset(ends))


def _inner_code(function: _Forward) -> Any:
    """Return the code of the function that `function` makes."""
    return next(c for c in function.__code__.co_consts if hasattr(c, "co_code"))


class ModuleTracker:
    """Opens a call when a module's forward begins and closes it with its outputs.

    Attributes:
        stack: The calls that are open, outermost first.
        expected: The module whose call has begun and whose forward has not.
        thread: Calls made in other threads are not the capture's.
        failure: Id of the last error that left a call, with that call.
    """

    def __init__(
        self,
        addresses: Mapping[nn.Module, str],
        state: CaptureState,
        sites: CallSites,
    ) -> None:
        self.stack = state.stack
        self.expected: nn.Module | None = None
        self.thread = threading.get_ident()
        self.failure: tuple[int, OpenCall] | None = None
        self._addresses = addresses
        self._state = state
        self._sites = sites
        self._replaced: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._call_counts: dict[str, int] = {}
        self._chains: dict[tuple[object, ...], int] = {}
        self._entered = False  # the root's forward

    def install(self) -> None:
        """Put the wrappers on every module."""
        for module in self._addresses:
            if isinstance(module, torch.jit.ScriptModule):
                continue  # takes no wrappers; its result will be of unknown origin
            attributes = module.__dict__
            new: dict[str, _Forward | None] = {
                "forward": _wrap_forward(self, module, module.forward),
                "_call_impl": _wrap_call(self, module, module._call_impl),
            }
            if attributes.get("_compiled_call_impl") is not None:
                new["_compiled_call_impl"] = None
            own = {name: attributes[name] for name in new if name in attributes}
            self._replaced.append((attributes, own))
            attributes.update(new)

    def remove(self) -> None:
        """Leave every module as it was found."""
        for attributes, own in self._replaced:
            for name in ("forward", "_call_impl"):
                attributes.pop(name, None)
            attributes.update(own)
        self._replaced.clear()

    def call(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run the root; its call is open for the user's own hooks on it too."""
        with torch._C.DisableTorchFunction():
            root = self._open(model, None, None, direct=False)
            self._add_inputs(root, args, kwargs)
        try:
            output = model(*args, **kwargs)
            with torch._C.DisableTorchFunction():
                self.end(root, output)
            return output
        except BaseException as error:
            self.unwind(0, error)
            raise

    def begin(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        frame: Any,
    ) -> OpenCall:
        """Open a call of `module`, whose forward begins."""
        direct = self.expected is not module
        self.expected = None
        root = self.stack[0]
        if not self._entered and self._addresses[module] == root.address:
            self._entered = True
            return root
        state = self._state
        address = self._addresses[module]
        inputs = []
        for path, tensor in argument_leaves(args, kwargs):
            known, ref = state.origin(tensor)
            node = known.node
            if ref.written_by is not None:
                number = self._call_counts.get(address, 0) + 1
                key = SiteKey("module_input", address, number, path=path)
                node = state.add_identity(tensor, ref, key)
            if node is not None:  # not a parameter or buffer
                inputs.append((path, node, state.nodes[node].spec))
        call = self._open(module, self.stack[-1], self._sites.at(frame), direct=direct)
        call.inputs = tuple(inputs)
        return call

    def _open(
        self,
        module: nn.Module,
        parent: OpenCall | None,
        call_site: Any,
        *,
        direct: bool,
    ) -> OpenCall:
        state = self._state
        address = self._addresses[module]
        count = self._call_counts[address] = self._call_counts.get(address, 0) + 1
        chain = None if parent is None else parent.chain
        identity = (chain, id(call_site), address)
        call = OpenCall(
            index=len(state.calls),
            address=address,
            call_index=count,
            parent=None if parent is None else parent.index,
            chain=self._chains.setdefault(identity, len(self._chains)),
            inputs=(),
            first_node=len(state.nodes),
            direct=direct,
            call_site=call_site,
            start_seconds=perf_counter(),
        )
        state.calls.append(call)
        self.stack.append(call)
        return call

    def _add_inputs(
        self, call: OpenCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Make the model's own inputs the first nodes of the graph."""
        state = self._state
        inputs: list[tuple[Path, int, TensorSpec]] = []
        for path, tensor in argument_leaves(args, kwargs):
            node = state.table.node_of(tensor)
            if node is None:
                key = SiteKey("module_input", call.address, 1, path=path)
                raw = state.boundary("input", "input", tensor, (), key)
                node = len(state.nodes)
                state.add(raw, tensor)
            inputs.append((path, node, state.nodes[node].spec))
        call.inputs = tuple(inputs)
        call.first_node = len(state.nodes)

    def end(self, call: OpenCall, output: Any) -> None:
        """Close `call`, whose module returned `output`."""
        state = self._state
        outputs: list[tuple[Path, int, TensorSpec]] = []
        try:
            for path, tensor in leaves(output):
                key = SiteKey("module_output", call.address, call.call_index, path=path)
                known, ref = state.origin(tensor)
                node = known.node
                if node is None or node < call.first_node or ref.written_by is not None:
                    node = state.add_identity(tensor, ref, key)
                outputs.append((path, node, state.nodes[node].spec))
                state.maybe_stop(key)
        finally:
            call.outputs = tuple(outputs)
            self._close(self.stack.index(call))

    def unwind(self, depth: int, error: BaseException) -> None:
        """Close the calls above `depth` without outputs: an error passes by."""
        if len(self.stack) > depth:
            if self.failure is None or self.failure[0] != id(error):
                self.failure = id(error), self.stack[-1]
            self._close(depth)

    def _close(self, depth: int) -> None:
        now = perf_counter()
        while len(self.stack) > depth:
            call = self.stack.pop()
            call.end_node = len(self._state.nodes)
            call.duration_seconds = now - call.start_seconds

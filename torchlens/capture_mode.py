"""The function mode that turns each torch call of a capture into nodes."""

import sys
from collections.abc import Callable, Mapping
from time import perf_counter
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .call_sites import CallSites
from .capture_state import CaptureState, RawNode
from .function_facts import FunctionFacts, facts_of, type_name
from .records import ArgRef, CallSite, Path, SiteKey
from .structures import leaves
from .tensor_tracking import memory_key

__all__ = ["CaptureMode"]


class CaptureMode(TorchFunctionMode):
    """Records every torch call made while it is on."""

    def __init__(self, state: CaptureState, sites: CallSites) -> None:
        super().__init__()
        self._state = state
        self._sites = sites
        self._facts: dict[Callable[..., Any], FunctionFacts] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        facts = self._facts.get(func)
        if facts is None:
            facts = self._facts[func] = facts_of(func)
        if not facts.is_op:
            return func(*args, **kwargs)
        state = self._state
        if facts.writes:
            state.before_write(args[0])
        elif "out" in kwargs:
            state.before_write(kwargs["out"])
        if facts.random:
            state.keep_random_state()
        frame = sys._getframe(1)
        call = _Call(facts, frame, self._sites)
        # The arguments' origins are read before the call: it may write into them.
        given = _Arguments(state)
        template = tuple(map(given.template, args)) if args else ()
        named = {key: given.template(value) for key, value in kwargs.items()}
        start = perf_counter()
        result = func(*args, **kwargs)
        call.duration_seconds = perf_counter() - start
        if facts.writes and (result is None or result is NotImplemented):
            if result is NotImplemented:
                return result
            outputs: list[tuple[Path, torch.Tensor]] = list(leaves(args[0]))
        elif isinstance(result, torch.Tensor):
            outputs = [((), result)]
        else:
            outputs = list(leaves(result))
        if outputs:
            call.record(state, func, given, template, named, outputs)
        return result


class _Arguments:
    """Collects parents, parameters and buffers while the arguments are copied."""

    def __init__(self, state: CaptureState) -> None:
        self._state = state
        self.tensors: list[torch.Tensor] = []
        self.parents: list[int] = []
        self.params: list[str] = []
        self.buffers: list[str] = []

    def template(self, value: Any) -> Any:
        """Return `value` with every tensor replaced by where it comes from."""
        if isinstance(value, torch.Tensor):
            return self._origin(value)
        kind = type(value)
        if kind is tuple or kind is list:
            return kind([self.template(item) for item in value])
        if kind is slice:
            return slice(*map(self.template, (value.start, value.stop, value.step)))
        if kind is dict:
            return {key: self.template(item) for key, item in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return kind(*map(self.template, value))
        return value

    def _origin(self, tensor: torch.Tensor) -> ArgRef:
        ref = self._state.origin(tensor)
        self.tensors.append(tensor)
        for node in (ref.node, ref.written_by):
            if node is not None and node not in self.parents:
                self.parents.append(node)
        if ref.param is not None and ref.param not in self.params:
            self.params.append(ref.param)
        if ref.buffer is not None and ref.buffer not in self.buffers:
            self.buffers.append(ref.buffer)
        return ref


class _Call:
    """One torch call on its way to becoming nodes."""

    __slots__ = ("call_site", "duration_seconds", "facts", "name", "type")

    def __init__(
        self, facts: FunctionFacts, frame: FrameType, sites: CallSites
    ) -> None:
        self.facts = facts
        self.call_site: CallSite = sites.at(frame)
        spelled = sites.operator(frame, facts.name)
        self.name = spelled or facts.name
        self.type = type_name(spelled) if spelled else facts.type
        self.duration_seconds = 0.0

    def record(
        self,
        state: CaptureState,
        func: Callable[..., Any],
        given: _Arguments,
        template: tuple[Any, ...],
        named: Mapping[str, Any],
        outputs: list[tuple[Path, torch.Tensor]],
    ) -> None:
        """Append one node per output tensor."""
        owner = state.stack[-1]
        site_id = id(self.call_site)
        count = owner.counts.get((site_id, self.name), 0) + 1
        owner.counts[site_id, self.name] = count
        params = tuple(given.params)
        identity = (
            (owner.address, params, self.name)
            if params
            else (owner.chain, site_id, self.name)
        )
        state.num_calls += 1
        number = state.num_calls
        parents, buffers = tuple(given.parents), tuple(given.buffers)
        writes = self.facts.writes or "out" in named
        memories = {memory_key(tensor) for tensor in given.tensors}
        last_key = None
        for path, tensor in outputs:
            layer, pass_index = state.layer_of((*identity, path), self.type)
            key = SiteKey(
                "op",
                owner.address,
                owner.call_index,
                self.name,
                self.call_site.digest,
                count,
                path,
            )
            memory = memory_key(tensor)
            shares = memory in memories
            node = RawNode(
                kind="op",
                type=self.type,
                func_name=self.name,
                layer=layer,
                pass_index=pass_index,
                spec=state.spec_of(tensor),
                parents=parents,
                params=params,
                buffers=buffers,
                module_call=owner.index,
                call=number,
                path=path,
                num_outputs=len(outputs),
                inplace=writes,
                view=shares and not writes,
                requires_grad=tensor.requires_grad,
                func=func,
                args=template,
                kwargs=named,
                call_site=self.call_site,
                duration_seconds=self.duration_seconds,
                key=key,
            )
            index = state.add(node, tensor)
            if writes:
                state.table.wrote(memory, index)
            last_key = key
            if key == state.stop_at:
                break
        if last_key is not None:
            state.maybe_stop(last_key)

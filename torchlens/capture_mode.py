"""The function mode that turns each torch call of a capture into nodes."""

import sys
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .call_conditions import conditions_of
from .call_sites import CallSites
from .capture_state import CaptureState, OpenCall, RawCall, RawNode
from .function_facts import FunctionFacts, facts_of, type_name
from .records import ArgRef, Path, SiteKey
from .structures import leaves

_NOTHING: Mapping[str, Any] = {}
_PLAIN = frozenset({bool, float, int, str, type(None)})

__all__ = ["CaptureMode"]


class CaptureMode(TorchFunctionMode):
    """Records every torch call made while it is on."""

    def __init__(self, state: CaptureState, sites: CallSites) -> None:
        super().__init__()
        self._state = state
        self._sites = sites
        self._facts: dict[Callable[..., Any], FunctionFacts] = {}
        self._spelled: dict[str, str] = {}  # label types of operators

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or _NOTHING
        facts = self._facts.get(func)
        if facts is None:
            facts = self._facts[func] = facts_of(func)
        if not facts.is_op:
            return func(*args, **kwargs)
        state = self._state
        # The arguments' origins are read before the call: it may write into them.
        given = _Arguments(state)
        template = tuple(given.templates(args))
        named = kwargs
        if kwargs:
            values = given.templates(tuple(kwargs.values()))
            named = dict(zip(kwargs, values, strict=True))
        written = None
        if facts.writes or "out" in kwargs:
            written = _written(facts, args, kwargs)
            state.before_write(written)
        if facts.random:
            state.generators.note(args, kwargs)
        if state.full:
            conditions = conditions_of(args, kwargs, random=facts.random)
            if conditions is not None:
                state.conditions[state.num_calls + 1] = conditions
        start = perf_counter()
        result = func(*args, **kwargs)
        duration = perf_counter() - start
        outputs: Sequence[tuple[Path, torch.Tensor]]
        if isinstance(result, torch.Tensor):
            outputs = (((), result),)
        elif result is NotImplemented:
            return result
        else:
            outputs = leaves(written if result is None else result)
        if outputs:
            call = self._call(sys._getframe(1), facts, len(outputs))
            call.func = func
            call.args = template
            call.kwargs = named
            call.parents = tuple(given.parents)
            call.params = tuple(given.params)
            call.buffers = tuple(given.buffers)
            call.inplace = written is not None
            call.duration_seconds = duration
            self._add(call, given, outputs, written)
        return result

    def _call(
        self, frame: FrameType, facts: FunctionFacts, num_outputs: int
    ) -> RawCall:
        state = self._state
        name, kind = facts.name, facts.type
        spelled = self._sites.operator(frame, name)
        if spelled is not None:
            name = spelled
            kind = self._spelled.get(name) or self._spelled.setdefault(
                name, type_name(name)
            )
        state.num_calls += 1
        call = RawCall(state.num_calls, name, kind, state.stack[-1].index)
        call.call_site = self._sites.at(frame)
        call.num_outputs = num_outputs
        return call

    def _add(
        self,
        call: RawCall,
        given: "_Arguments",
        outputs: Sequence[tuple[Path, torch.Tensor]],
        written: Any,
    ) -> None:
        """Append one node per output tensor."""
        state = self._state
        owner = state.stack[-1]
        site = call.call_site
        assert site is not None
        place = (id(site), call.name)
        count = owner.counts[place] = owner.counts.get(place, 0) + 1
        identity = _identity(call, owner)
        first_node = len(state.nodes)
        for path, tensor in outputs:
            layer, pass_index = state.layer_of((*identity, path), call.type)
            key = SiteKey(
                "op",
                owner.address,
                owner.call_index,
                call.name,
                site.digest,
                count,
                path,
            )
            node = RawNode(
                "op",
                call,
                layer,
                pass_index,
                state.spec_of(tensor),
                path,
                False,
                tensor.requires_grad,
                key,
            )
            known = state.add(node, tensor)
            node.view = written is None and known.memory in given.memories
            if state.stop_at is not None and key == state.stop_at:
                break
        if written is not None:
            for _, tensor in leaves(written):
                state.wrote(tensor, first_node)
        state.maybe_stop(key)


def _identity(call: RawCall, owner: OpenCall) -> tuple[object, ...]:
    """Return what passes of one layer have in common."""
    if call.params:
        return (owner.address, call.params, call.name)
    return (owner.chain, id(call.call_site), call.name)


def _written(
    facts: FunctionFacts, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...] | Any:
    """Return the arguments that a call writes into."""
    written = []
    for position, name in facts.writes:
        if position < len(args):
            written.append(args[position])
        elif name in kwargs:
            written.append(kwargs[name])
        elif not name and kwargs:
            written.append(next(iter(kwargs.values())))
    if "out" in kwargs:
        written.append(kwargs["out"])
    return written[0] if len(written) == 1 else written


class _Arguments:
    """Collects parents, parameters and buffers while the arguments are copied."""

    __slots__ = ("_state", "buffers", "memories", "params", "parents")

    def __init__(self, state: CaptureState) -> None:
        self._state = state
        self.memories: list[int] = []
        self.parents: list[int] = []
        self.params: list[str] = []
        self.buffers: list[str] = []

    def templates(self, values: Sequence[Any]) -> list[Any]:
        """Return `values` with every tensor replaced by where it comes from."""
        return [
            value
            if type(value) in _PLAIN
            else self._origin(value)
            if isinstance(value, torch.Tensor)
            else self._template(value)
            for value in values
        ]

    def _template(self, value: Any) -> Any:
        kind = type(value)
        if kind is tuple or kind is list:
            return kind(self.templates(value))
        if kind is slice:
            return slice(*self.templates((value.start, value.stop, value.step)))
        if kind is dict:
            items = self.templates(tuple(value.values()))
            return dict(zip(value, items, strict=True))
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return kind(*self.templates(value))
        return value

    def _origin(self, tensor: torch.Tensor) -> ArgRef:
        known, ref = self._state.origin(tensor)
        self.memories.append(known.memory)
        node = ref.node
        if node is not None:
            if node not in self.parents:
                self.parents.append(node)
        elif ref.param is not None:
            if ref.param not in self.params:
                self.params.append(ref.param)
        elif ref.buffer is not None and ref.buffer not in self.buffers:
            self.buffers.append(ref.buffer)
        if ref.written_by is not None and ref.written_by not in self.parents:
            self.parents.append(ref.written_by)
        return ref

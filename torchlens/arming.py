"""Catching single ops: a function mode that is on inside one module's forward only.

The mode costs about a microsecond for every torch call it sees, so it is pushed when
an armed module's forward begins and popped when it ends, and it is off inside the
modules that this one calls.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .call_sites import CallSites
from .catches import Catch, Relay, describe_key
from .function_facts import FunctionFacts, facts_of
from .hooks import Found, replace_forward, send, too_many_calls

_push = torch._C._push_on_torch_function_stack
_pop = torch._C._pop_torch_function_stack
_depth = torch._C._len_torch_function_stack
_peek = torch._C._get_function_stack_at

__all__ = ["arm", "suspend", "trim_mode_stack"]


def arm(
    module: nn.Module, found: Sequence[Found], relay: Relay, stack: ExitStack
) -> "_SiteMode":
    """Put a mode for the op sites `found` on `module`, and return it."""
    mode = _SiteMode(relay, found)
    replace_forward(module, _armed(module, mode, relay, found), stack)
    return mode


def suspend(child: nn.Module, mode: "_SiteMode", stack: ExitStack) -> None:
    """Turn `mode` off while `child` runs.

    Comes after every `arm`: a child that is armed itself must lose its parent's mode
    before it gets its own.
    """
    replace_forward(child, _suspended(child, mode), stack)


def trim_mode_stack(length: int) -> None:
    """Pop what an interrupted forward left on torch's function mode stack."""
    while _depth() > length:
        _pop()


class _Watch:
    """The wanted ops of one module call, by call site digest."""

    __slots__ = ("check", "counts", "limits", "sites")

    def __init__(self, found: Sequence[Found], relay: Relay) -> None:
        self.check = relay.checker(found[0][1])
        self.sites: dict[tuple[str, str], dict[int, list[Found]]] = {}
        self.limits: dict[tuple[str, str], int] = {}
        for index, catch in found:
            place = (catch.torch_name, catch.key.call_site)
            by_ordinal = self.sites.setdefault(place, {})
            by_ordinal.setdefault(catch.key.ordinal, []).append((index, catch))
            self.limits[place] = catch.num_seen
        self.counts: dict[tuple[str, str], int] = {}


class _SiteMode(TorchFunctionMode):
    """Hands on the results of the wanted calls made straight from an armed forward."""

    def __init__(self, relay: Relay, found: Sequence[Found]) -> None:
        super().__init__()
        self.relay = relay
        self.names = frozenset(catch.torch_name for _, catch in found)
        self.known: dict[Any, FunctionFacts | None] = {}
        self.call_sites = CallSites(frozenset({_ARMED_CODE}))
        self.watch: _Watch | None = None

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **kwargs) if kwargs else func(*args)
        try:
            facts = self.known[func]
        except KeyError:
            found = facts_of(func)
            self.known[func] = facts = found if found.name in self.names else None
        if facts is not None and self.relay.thread == get_ident():
            value = _written(facts, args, kwargs) if result is None else result
            self._look(facts.name, value)
        return result

    def _look(self, name: str, value: Any) -> None:
        watch = self.watch
        if watch is None:
            return
        site = self.call_sites.at(sys._getframe(2))
        place = (name, site.digest)
        by_ordinal = watch.sites.get(place)
        if by_ordinal is None:
            return
        ordinal = watch.counts.get(place, 0) + 1
        watch.counts[place] = ordinal
        found = by_ordinal.get(ordinal)
        if found is not None:
            send(self.relay, found, value)
        elif ordinal > watch.limits[place]:
            catch = next(iter(by_ordinal.values()))[0][1]
            self.relay.diverge(
                f"{describe_key(catch.key)} ran {ordinal} times, where the planned "
                f"path runs it {watch.limits[place]} times"
            )


def _written(
    facts: FunctionFacts, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> Any:
    """Return what a call that returns nothing wrote to, as `x[i] = v` does."""
    given = kwargs or {}
    written = [
        args[position] if position < len(args) else given.get(name)
        for position, name in facts.writes
    ]
    return written[0] if len(written) == 1 else written


def _armed(
    module: nn.Module, mode: _SiteMode, relay: Relay, found: Sequence[Found]
) -> Callable[..., Any]:
    inner = module.forward
    by_call: dict[int, list[Found]] = {}
    for index, catch in found:
        by_call.setdefault(catch.key.call_index, []).append((index, catch))
    watches = {call: _Watch(wanted, relay) for call, wanted in by_call.items()}
    last = found[0][1]
    return _armed_forward(inner, mode, relay, watches, relay.new_counter(), last)


def _armed_forward(
    inner: Callable[..., Any],
    mode: _SiteMode,
    relay: Relay,
    watches: Mapping[int, _Watch],
    calls: list[int],
    catch: Catch,
) -> Callable[..., Any]:
    name, limit = catch.key.address, catch.num_calls

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not relay.thread or relay.thread != get_ident():
            return inner(*args, **kwargs)
        calls[0] = call = calls[0] + 1
        watch = watches.get(call)
        outer = mode.watch
        if watch is None:
            if call > limit:
                too_many_calls(relay, name, limit)
            # Not a wanted call, though one inside a wanted one may be.
            mode.watch = None
            try:
                return inner(*args, **kwargs)
            finally:
                mode.watch = outer
        watch.check(sys._getframe(1))
        watch.counts.clear()
        mode.watch = watch
        depth = _depth()
        if depth and _peek(depth - 1) is mode:
            # The module called itself: the mode is on already.
            try:
                return inner(*args, **kwargs)
            finally:
                mode.watch = outer
        _push(mode)
        try:
            return inner(*args, **kwargs)
        finally:
            mode.watch = outer
            depth = _depth()
            if depth and _peek(depth - 1) is mode:
                _pop()

    return forward


def _forward_code() -> Any:
    """Return the code of an armed forward: where a call site's chain of frames ends."""
    return next(
        constant
        for constant in _armed_forward.__code__.co_consts
        if getattr(constant, "co_name", "") == "forward"
    )


_ARMED_CODE = _forward_code()


def _suspended(child: nn.Module, mode: "_SiteMode") -> Callable[..., Any]:
    inner = child.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if mode.watch is None:
            return inner(*args, **kwargs)
        depth = _depth()
        if not depth or _peek(depth - 1) is not mode:
            return inner(*args, **kwargs)
        _pop()
        try:
            return inner(*args, **kwargs)
        finally:
            _push(mode)

    return forward

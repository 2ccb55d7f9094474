"""Catching inputs and outputs of module calls, by hooks or by wrapping a forward.

Everything put on a module is taken off again by the `ExitStack` it is entered on.  The
closures are the hot path: what can be decided per installation is decided here, once.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from sys import _getframe
from typing import Any

from torch import Tensor, nn

from .catches import Catch, Relay, describe_key
from .structures import get_at

Found = tuple[int, Catch]
Send = Callable[[Any], None]

__all__ = ["install_module_catches", "replace_forward", "send", "too_many_calls"]


def install_module_catches(
    module: nn.Module, found: Sequence[Found], relay: Relay, stack: ExitStack
) -> None:
    """Install the module sites of one module: `found` are (site index, catch)."""
    calls = relay.new_counter()
    inputs = _by_call(found, "module_input")
    outputs = _by_call(found, "module_output")
    limit = found[0][1].num_seen
    name = found[0][1].key.address
    if any(catch.via == "wrap" for _, catch in found):
        _wrap(module, relay, calls, limit, name, inputs, outputs, stack)
        return
    if inputs:
        stack.callback(
            module.register_forward_pre_hook(
                _pre_hook(relay, calls, limit, name, inputs), with_kwargs=True
            ).remove
        )
        if not outputs:
            return
        # The pre-hook has counted this call already.
        hook = _output_hook(relay, calls, outputs)
    else:
        hook = _counting_hook(relay, calls, limit, name, outputs)
    stack.callback(module.register_forward_hook(hook).remove)


def replace_forward(
    module: nn.Module, forward: Callable[..., Any], stack: ExitStack
) -> None:
    """Put `forward` on the instance until the stack closes."""
    own = module.__dict__
    previous = own.get("forward")

    def restore() -> None:
        if previous is None:
            own.pop("forward", None)
        else:
            own["forward"] = previous

    own["forward"] = forward
    stack.callback(restore)


def _by_call(found: Sequence[Found], kind: str) -> dict[int, list[Found]]:
    calls: dict[int, list[Found]] = {}
    for index, catch in found:
        if catch.key.kind == kind:
            calls.setdefault(catch.key.call_index, []).append((index, catch))
    return calls


def send(relay: Relay, found: Sequence[Found], value: Any) -> None:
    """Hand on the tensors at the paths of `found` inside `value`."""
    for index, catch in found:
        path = catch.key.path
        try:
            tensor = get_at(value, path) if path else value
        except (LookupError, TypeError):
            tensor = None
        if isinstance(tensor, Tensor):
            relay.receive(index, tensor)
        else:
            relay.diverge(
                f"{describe_key(catch.key)} is no tensor in this batch: "
                f"{type(value).__name__} holds {type(tensor).__name__} there"
            )


def too_many_calls(relay: Relay, name: str, limit: int) -> None:
    """Say that a module was called more often than planned."""
    relay.diverge(
        f"the module {name!r} was called {limit + 1} times, where the planned path "
        f"calls it {limit} times"
    )


def _counting_hook(
    relay: Relay,
    calls: list[int],
    limit: int,
    name: str,
    outputs: dict[int, list[Found]],
) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if relay.active:
            calls[0] = call = calls[0] + 1
            if call in outputs:
                relay.check_caller(outputs[call][0][1], _getframe(1))
                send(relay, outputs[call], output)
            elif call > limit:
                too_many_calls(relay, name, limit)

    if limit > 1 or len(outputs[1]) > 1 or outputs[1][0][1].key.path:
        return hook
    index, catch = outputs[1][0]

    def plain_hook(module: nn.Module, args: Any, output: Any) -> None:
        if relay.active:
            if calls[0]:
                too_many_calls(relay, name, 1)
            calls[0] = 1
            relay.check_caller(catch, _getframe(1))
            if isinstance(output, Tensor):
                relay.receive(index, output)
            else:
                send(relay, outputs[1], output)

    return plain_hook


def _output_hook(
    relay: Relay, calls: list[int], outputs: dict[int, list[Found]]
) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if relay.active and calls[0] in outputs:
            send(relay, outputs[calls[0]], output)

    return hook


def _pre_hook(
    relay: Relay,
    calls: list[int],
    limit: int,
    name: str,
    inputs: dict[int, list[Found]],
) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        if relay.active:
            calls[0] = call = calls[0] + 1
            if call in inputs:
                relay.check_caller(inputs[call][0][1], _getframe(1))
                send(relay, inputs[call], _Arguments(args, kwargs))
            elif call > limit:
                too_many_calls(relay, name, limit)

    return hook


class _Arguments:
    """Looks an argument up by position or keyword, as the first step of a path."""

    __slots__ = ("args", "kwargs")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args = args
        self.kwargs = kwargs

    def __getitem__(self, part: int | str) -> Any:
        return self.args[part] if isinstance(part, int) else self.kwargs[part]


def _wrap(
    module: nn.Module,
    relay: Relay,
    calls: list[int],
    limit: int,
    name: str,
    inputs: dict[int, list[Found]],
    outputs: dict[int, list[Found]],
    stack: ExitStack,
) -> None:
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not relay.active:
            return inner(*args, **kwargs)
        # Numbered on entry, so that a module that calls itself keeps its numbers.
        calls[0] = call = calls[0] + 1
        if call > limit:
            too_many_calls(relay, name, limit)
        found = inputs.get(call) or outputs.get(call)
        if found:
            relay.check_caller(found[0][1], _getframe(1))
        if call in inputs:
            send(relay, inputs[call], _Arguments(args, kwargs))
        output = inner(*args, **kwargs)
        if call in outputs and relay.active:
            send(relay, outputs[call], output)
        return output

    replace_forward(module, forward, stack)

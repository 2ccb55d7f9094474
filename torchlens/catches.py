"""How the tensor of one site is caught during a forward, and what is known meanwhile.

A `Catch` is the portable half, part of a plan.  A `Relay` is the state of one forward
that the installed hooks and wrappers share: they hand it tensors, it hands them on.
"""

from collections.abc import Callable
from dataclasses import dataclass
from threading import get_ident
from types import FrameType
from typing import Literal

from torch import Tensor

from .callers import Callers
from .records import SiteKey
from .structures import format_path

Via = Literal["hook", "wrap", "mode"]
Receive = Callable[[int, Tensor], None]

__all__ = ["Catch", "Halt", "Receive", "Relay", "Via", "describe_key"]


class Halt(BaseException):
    """Ends a forward early; no `Exception`, so that models do not catch it by mistake.

    Never leaves this package.
    """


@dataclass(frozen=True, slots=True)
class Catch:
    """Where one tensor appears and how it is caught there.

    Attributes:
        key: Structural identity of the site.
        via: "hook" for a module called as usual, "wrap" for one whose `forward` is
            called directly or inside itself, "mode" for an op.
        num_seen: How often the traced forward called the module, or ran the op at its
            call site within the module call; more is another path.
        torch_name: Name of the op's torch function, before operators are told apart.
        composite: Whether the op runs inside one of torch's Python functions.
        children: Addresses of the modules that the op's module calls.
        num_calls: How often the traced forward called the module.
        caller: Digest of the place from which the module was called.
        caller_ordinal: Which of the calls from there it was, from 1.
    """

    key: SiteKey
    via: Via
    num_seen: int = 1
    torch_name: str = ""
    composite: bool = False
    children: tuple[str, ...] = ()
    num_calls: int = 1
    caller: str = ""
    caller_ordinal: int = 1


class Relay:
    """What the hooks of one installation share during one forward.

    `thread` is the thread of that forward while tensors are wanted, else 0: another
    thread may run the same model meanwhile, and its tensors are not ours.  Hooks look
    whether it is 0 first: Dynamo cannot compile through a question for the thread.
    `doubtful` tells that a module was called from another place than planned: whether
    it is the planned call shows only when the forward has made all of its calls.
    """

    __slots__ = ("callers", "counters", "doubtful", "problem", "receive", "thread")

    def __init__(self, receive: Receive, callers: Callers) -> None:
        self.thread = 0
        self.doubtful = False
        self.callers = callers
        self.problem: str | None = None
        self.receive = receive
        self.counters: list[list[int]] = []

    def new_counter(self) -> list[int]:
        """Return a one-item list that `begin` sets to zero."""
        counter = [0]
        self.counters.append(counter)
        return counter

    def begin(self) -> None:
        """Start a forward."""
        self.problem = None
        self.doubtful = False
        for counter in self.counters:
            counter[0] = 0
        self.thread = get_ident()

    def end(self) -> None:
        """Want no tensors any more."""
        self.thread = 0

    def checker(self, catch: Catch) -> Callable[[FrameType], None]:
        """Return what notes a call that came from another place than planned."""
        if not catch.caller:
            return _accept
        comes_from_there = self.callers.checker(catch.caller)

        def check(frame: FrameType) -> None:
            if not comes_from_there(frame):
                self.doubtful = True

        return check

    def diverge(self, problem: str) -> None:
        """Note the first departure from the plan and end the forward."""
        if self.problem is None:
            self.problem = problem
        self.thread = 0
        raise Halt


def _accept(frame: FrameType) -> None:
    """Accept a call of unknown place."""


def describe_key(key: SiteKey) -> str:
    """Return the site in words, for messages."""
    place = f"call {key.call_index} of {key.address!r}"
    path = format_path(key.path)
    if key.kind == "op":
        return f"{key.func_name}{path} (execution {key.ordinal}) in {place}"
    side = "output" if key.kind == "module_output" else "input"
    return f"the {side}{path} of {place}"

"""From where in a model's code a module was called: tells its calls apart by place.

The number of a call is no identity: on a branch with an extra call before it, the
second call is what the first one is elsewhere.  A place is the whole chain of
instructions from the model's own forward down, torch's and our frames left out.
"""

from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from torch import nn

from .call_sites import digest_of
from .graph import Graph
from .records import ModuleCall

_OUR_FOLDER = str(Path(__file__).parent)
_CALL = nn.Module._call_impl.__code__
_TORCH_CODES = frozenset(
    {
        _CALL,
        nn.Module._wrapped_call_impl.__code__,
        *(code for code in _CALL.co_consts if isinstance(code, CodeType)),
    }
)

__all__ = ["Callers", "caller_of", "call_from"]


def caller_of(graph: Graph, call: ModuleCall) -> tuple[str, int]:
    """Return the digest of a call's place, and its ordinal there, from 1."""
    place = _place(graph, call)
    calls = graph.calls_of(call.address)
    earlier = (other for other in calls if other.call_index < call.call_index)
    return place, 1 + sum(_place(graph, other) == place for other in earlier)


def call_from(
    graph: Graph, address: str, place: str, ordinal: int
) -> ModuleCall | None:
    """Return the call of a module that `caller_of` describes so, if there is one."""
    calls = graph.calls_of(address)
    same = [call for call in calls if _place(graph, call) == place]
    return same[ordinal - 1] if len(same) >= ordinal else None


def _place(graph: Graph, call: ModuleCall) -> str:
    steps: tuple[tuple[CodeType, int], ...] = ()
    above: ModuleCall | None = call
    while above is not None:
        if above.call_site is not None:
            own = (step for step in above.call_site.steps if not _is_passed(step[0]))
            steps = (*own, *steps)
        above = None if above.parent is None else graph.module_calls[above.parent]
    return digest_of(steps)


class Callers:
    """Says from where the module that runs now was called."""

    def __init__(self, stop: CodeType) -> None:
        self._stop = stop

    def checker(self, place: str) -> Callable[[FrameType], bool]:
        """Return a test whether a frame was called from `place`.

        A hot path, run for every module site: the chain that fitted last is compared
        frame by frame before anything is digested, torch's frames being stepped over.
        """
        known: list[tuple[CodeType, int, bool]] = []
        stop = self._stop

        def check(frame: FrameType) -> bool:
            current: Any = frame
            for code, offset, from_call in known:
                if current.f_code is not code or current.f_lasti != offset:
                    break
                current = current.f_back
                if from_call:  # _call_impl is always called by _wrapped_call_impl
                    current = current.f_back
            else:
                if known and current.f_code is stop:
                    return True
            chain, found = self._walk(frame)
            if found != place:
                return False
            known[:] = chain
            return True

        return check

    def _walk(self, start: FrameType) -> tuple[list[tuple[CodeType, int, bool]], str]:
        steps: list[tuple[CodeType, int]] = []
        chain = []
        frame: FrameType | None = start
        while frame is not None and frame.f_code is not self._stop:
            code, offset = frame.f_code, frame.f_lasti
            if not _is_passed(code):
                steps.append((code, offset))
            chain.append((code, offset, code is _CALL))
            frame = frame.f_back
            if code is _CALL and frame is not None:
                frame = frame.f_back
        return chain, digest_of(tuple(reversed(steps)))


def _is_passed(code: CodeType) -> bool:
    return code in _TORCH_CODES or code.co_filename.startswith(_OUR_FOLDER)

"""From where in a model's code a module was called: tells its calls apart by place.

The number of a call is no identity: on a branch with an extra call before it, the
second call is what the first one is elsewhere.  A place is the whole chain of
instructions from the model's own forward down, torch's and our frames left out.
"""

from pathlib import Path
from types import CodeType, FrameType

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
    """Says from where the module that runs now was called.

    A hot path: it walks up to the model's own forward for every module site, 0.2
    microseconds a frame, so torch's frames are stepped over and digests are cached.
    """

    def __init__(self, stop: CodeType) -> None:
        self._stop = stop
        # Values keep the code objects alive, whose ids are in the keys.
        self._known: dict[tuple[int, ...], tuple[str, list[CodeType]]] = {}

    def place(self, frame: FrameType | None) -> str:
        """Return the digest of the place, as `caller_of` does for a traced call."""
        key: list[int] = []
        add, start, stop = key.append, frame, self._stop
        while frame is not None:
            code = frame.f_code
            if code is _CALL:  # always called by _wrapped_call_impl
                frame = frame.f_back
                if frame is not None:
                    frame = frame.f_back
                continue
            if code is stop:
                break
            add(id(code))
            add(frame.f_lasti)
            frame = frame.f_back
        known = self._known.get(tuple(key))
        if known is None:
            known = self._known[tuple(key)] = self._digest(start)
        return known[0]

    def _digest(self, frame: FrameType | None) -> tuple[str, list[CodeType]]:
        steps: list[tuple[CodeType, int]] = []
        codes = []
        while frame is not None and frame.f_code is not self._stop:
            codes.append(frame.f_code)
            if not _is_passed(frame.f_code):
                steps.append((frame.f_code, frame.f_lasti))
            frame = frame.f_back
        return digest_of(tuple(reversed(steps))), codes


def _is_passed(code: CodeType) -> bool:
    return code in _TORCH_CODES or code.co_filename.startswith(_OUR_FOLDER)

"""Opens torch's composite Python functions to a function mode.

`F.normalize` and its like ask `has_torch_function*` first and, under any mode, hand
themselves over whole.  While these guards answer False in torch's own modules, the body
runs and the mode sees the innermost calls instead.
"""

import functools
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, ClassVar

_NAMES = (
    "has_torch_function",
    "has_torch_function_unary",
    "has_torch_function_variadic",
)

__all__ = ["CompositeGuards"]


def _answer_false(*_: object) -> bool:
    return False


@functools.lru_cache(maxsize=1)
def _guarded(num_modules: int) -> tuple[tuple[dict[str, Any], str], ...]:
    """Return each torch module's namespace that holds a guard, with the guard's name.

    Cached on the number of loaded modules, since scanning them costs a millisecond.
    """
    found: list[tuple[dict[str, Any], str]] = []
    for name, module in list(sys.modules.items()):
        if not name.startswith("torch.") or name == "torch.overrides":
            continue
        namespace = getattr(module, "__dict__", {})
        found.extend((namespace, guard) for guard in _NAMES if guard in namespace)
    return tuple(found)


class CompositeGuards:
    """Context in which torch's guards answer False; entering twice is harmless.

    The guards are the process's, and so is the count of who needs them open: two
    forwards in two threads end in any order.
    """

    _lock = threading.Lock()
    _depth = 0
    _saved: ClassVar[list[tuple[dict[str, Any], str, Callable[..., bool]]]] = []

    def open(self) -> None:
        """Make the guards answer False."""
        shared = CompositeGuards
        with shared._lock:
            shared._depth += 1
            if shared._depth > 1:
                return
            for namespace, guard in _guarded(len(sys.modules)):
                shared._saved.append((namespace, guard, namespace[guard]))
                namespace[guard] = _answer_false

    def close(self) -> None:
        """Undo one `open`; the last one restores the guards."""
        shared = CompositeGuards
        with shared._lock:
            shared._depth -= 1
            if shared._depth:
                return
            for namespace, guard, original in shared._saved:
                namespace[guard] = original
            shared._saved.clear()

    def __enter__(self) -> "CompositeGuards":
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

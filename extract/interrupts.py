"""Stopping early and well: a signal or a time limit ends a run between two batches.

Whether the block in work is finished or dropped follows from how long its rest will
take; either way the store holds whole blocks only, and the same command goes on later.
"""

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

__all__ = ["REQUEUE_CODE", "RequeueExit", "StopWatch"]

REQUEUE_CODE = 75
"""Exit code that says: not finished, run the same command again (EX_TEMPFAIL)."""

# Schedulers usually kill 30 s after the signal; writing the block needs its share.
_GRACE_SECONDS = 15.0


class RequeueExit(SystemExit):
    """Ends the process with `REQUEUE_CODE`; the store is whole and can be continued.

    It is a `SystemExit`, so that a job script ends with the code that its scheduler
    understands even when nothing catches it.
    """

    def __init__(self, message: str) -> None:
        super().__init__(REQUEUE_CODE)
        self.message = message

    def __str__(self) -> str:
        return self.message


class StopWatch:
    """Knows whether to go on, from SIGTERM, SIGUSR1 and a time limit.

    Used as a context manager, it catches the signals in the main thread and restores
    their handlers.
    """

    def __init__(self, time_limit_seconds: float | None = None) -> None:
        self._started = time.monotonic()
        self._limit = time_limit_seconds
        self._signalled_at: float | None = None
        self._signal = ""
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopWatch":
        if threading.current_thread() is threading.main_thread():
            for name in ("SIGTERM", "SIGUSR1"):
                number = getattr(signal, name, None)
                if number is None:
                    continue
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._signalled_at is None:
            self._signalled_at = time.monotonic()
            self._signal = signal.Signals(number).name
            self._mute_lost_children()

    def _mute_lost_children(self) -> None:
        """Keep torch from raising in the middle of anything when a worker is gone.

        Schedulers signal whole process groups, so the loader's workers may die of the
        signal that asks this process to stop; the loader notices it by itself.
        """
        number = getattr(signal, "SIGCHLD", None)
        handler = None if number is None else signal.getsignal(number)
        # None is a handler that was not set from Python and could not be put back.
        if number is not None and handler is not None:
            self._previous[number] = handler
            signal.signal(number, signal.SIG_DFL)

    @property
    def signalled(self) -> bool:
        """Whether a signal asked to stop."""
        return self._signalled_at is not None

    @property
    def reason(self) -> str:
        """Why the run stops, in words."""
        if self._signal:
            return f"{self._signal} was received"
        return f"the time limit of {self._limit:g} s is near"

    def must_stop(self, needed_seconds: float) -> bool:
        """Return whether the next `needed_seconds` of work do not fit any more.

        Args:
            needed_seconds: Estimate for the rest of the block, its writing included.
        """
        now = time.monotonic()
        if self._signalled_at is not None:
            if now + needed_seconds > self._signalled_at + _GRACE_SECONDS:
                return True
        return self._limit is not None and now + needed_seconds > (
            self._started + self._limit
        )

    def may_begin(self, needed_seconds: float) -> bool:
        """Return whether a new block of `needed_seconds` may be begun."""
        return not self.signalled and not self.must_stop(needed_seconds)

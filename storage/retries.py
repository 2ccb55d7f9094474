"""Trying again where that can help: with pauses that grow and are never in step."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from torchlens.errors import StoreError

from .failures import classify

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Patience:
    """How often to try and how long to pause in between.

    Attributes:
        attempts: Tries in all; the default ones take about a minute and a half.
        first_seconds: The longest first pause; each later one may be twice as long.
        longest_seconds: No pause is longer.
    """

    attempts: int = 10
    first_seconds: float = 0.25
    longest_seconds: float = 20.0

    def pause(self, attempt: int) -> float:
        """Return the seconds to wait after a failed attempt, numbered from 0."""
        longest = min(self.longest_seconds, self.first_seconds * 2.0**attempt)
        # Not the module's own generator: its state is the user's seed.  Jitter keeps
        # many workers from coming back all at once.
        return longest * random.Random().uniform(0.5, 1.0)


def persist(action: Callable[[], T], patience: Patience, verb: str, where: str) -> T:
    """Return what `action` returns, trying again while that can help.

    Raises:
        FileExistsError: If the object is there already.
        FileNotFoundError: If there is no such object.
        EOFError: If the range asked for begins past the object's end.
        NotImplementedError: If the place does not know the condition on a put.
        StoreError: If nothing helps; it says what failed, where, and what to do.
    """
    for attempt in range(patience.attempts):
        try:
            return action()
        except Exception as error:
            failure = classify(error)
            if failure is None:
                raise
            if failure.kind == "exists":
                raise FileExistsError(where) from error
            if failure.kind == "absent":
                raise FileNotFoundError(where) from error
            if failure.kind == "empty":
                raise EOFError(where) from error
            if failure.kind == "unsupported":
                raise NotImplementedError(failure.reason) from error
            if failure.kind == "final" or attempt + 1 == patience.attempts:
                tries = f", {attempt + 1} times" if failure.kind == "again" else ""
                raise StoreError(
                    f"Cannot {verb} {where}: {failure.reason}{tries}. {failure.remedy}"
                ) from error
            time.sleep(patience.pause(attempt))
    raise AssertionError("unreachable: patience has at least one attempt")

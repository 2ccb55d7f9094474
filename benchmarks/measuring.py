"""CPU seconds of ways of doing the same work, taken in turns."""

from collections.abc import Callable, Sequence
from time import process_time

__all__ = ["interleaved"]


def interleaved(
    ways: Sequence[Callable[[], object]],
    *,
    rounds: int,
    seconds_per_turn: float = 0.02,
) -> list[list[float]]:
    """Return the CPU seconds per call of each way, round by round.

    Args:
        ways: What to compare; each is called once first, to warm up.
        rounds: How often each has its turn.
        seconds_per_turn: A turn repeats a way until about this much is spent.
    """
    repeats = []
    for way in ways:
        way()
        repeats.append(max(1, round(seconds_per_turn / max(_timed(way, 1), 1e-6))))
    seconds: list[list[float]] = [[] for _ in ways]
    for _ in range(rounds):
        for way, number, found in zip(ways, repeats, seconds, strict=True):
            found.append(_timed(way, number))
    return seconds


def _timed(way: Callable[[], object], repeats: int) -> float:
    start = process_time()
    for _ in range(repeats):
        way()
    return (process_time() - start) / repeats

"""What a run shows while it works, and where its time went.

The seconds of the main thread are split into stages that follow one another, so they
add up to the wall time; what writer threads do meanwhile is told apart from them.
"""

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Progress", "RunSummary", "Stage", "StageClock"]

Stage = Literal["prepare", "load", "forward", "copy", "write", "other"]
_STAGES: tuple[Stage, ...] = ("prepare", "load", "forward", "copy", "write", "other")
_STEADY: tuple[Stage, ...] = ("load", "forward", "copy", "write")
_WORDS = {
    "prepare": "preparing",
    "load": "reading data",
    "forward": "forward",
    "copy": "copying to the host",
    "write": "writing",
    "other": "bookkeeping",
}


class StageClock:
    """Seconds per stage of the thread that runs the model; "other" between stages."""

    def __init__(self) -> None:
        self.seconds: dict[Stage, float] = dict.fromkeys(_STAGES, 0.0)
        self._started = self._since = time.perf_counter()
        self._current: Stage = "other"

    @contextmanager
    def stage(self, name: Stage) -> Iterator[None]:
        """Count the time inside the `with` for a stage, and not for the one around."""
        outer = self._current
        self._turn_to(name)
        try:
            yield
        finally:
            self._turn_to(outer)

    def _turn_to(self, name: Stage) -> None:
        now = time.perf_counter()
        self.seconds[self._current] += now - self._since
        self._since = now
        self._current = name

    @property
    def wall_seconds(self) -> float:
        """Seconds since the clock was made."""
        return time.perf_counter() - self._started

    @property
    def bottleneck(self) -> Stage:
        """The stage of the steady run that took longest."""
        return max(_STEADY, key=lambda name: self.seconds[name])


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What one call did.

    Attributes:
        rows: Rows of the store.
        rows_done: Rows that this call computed.
        blocks: Blocks of the store.
        blocks_done: Blocks that this call committed.
        bytes_done: Bytes of activations that this call wrote.
        stage_seconds: Seconds of the main thread by stage; they add up to the wall.
        writer_seconds: Busy seconds of the writer threads, beside the main thread.
        wall_seconds: From call to return.
        skipped_ids: Rows that could not be read.
        counts: Per layer, values that are not finite or did not fit the dtype.
        place: Where the arrays are.
        missing_rows: Per layer, how many rows took a path without it.
    """

    rows: int
    rows_done: int
    blocks: int
    blocks_done: int
    bytes_done: int
    stage_seconds: dict[Stage, float]
    writer_seconds: float
    wall_seconds: float
    skipped_ids: tuple[str, ...]
    counts: dict[str, dict[str, Any]]
    place: str
    missing_rows: Mapping[str, int] = field(default_factory=dict)

    @property
    def bottleneck(self) -> Stage:
        """The stage of the steady run that took longest."""
        return max(_STEADY, key=lambda name: self.stage_seconds[name])

    def __str__(self) -> str:
        if not self.blocks_done:
            return (
                f"nothing to do: {self.blocks} of {self.blocks} blocks committed "
                f"({self.rows} rows in {self.place})"
            )
        steady = max(self.wall_seconds - self.stage_seconds["prepare"], 1e-9)
        stages = ", ".join(
            f"{_WORDS[name]} {seconds:.1f} s"
            for name, seconds in self.stage_seconds.items()
        )
        lines = [
            f"{self.rows_done} of {self.rows} rows computed, {self.blocks_done} of "
            f"{self.blocks} blocks, {self.bytes_done / 1e6:.1f} MB in "
            f"{self.wall_seconds:.1f} s "
            f"({self.rows_done / steady:.1f} rows/s, "
            f"{self.bytes_done / 1e6 / steady:.1f} MB/s)",
            f"{stages}; most time went into {_WORDS[self.bottleneck]}; writer threads "
            f"were busy for {self.writer_seconds:.1f} s",
            f"arrays in {self.place}",
        ]
        lines += self._troubles()
        return "\n".join(lines)

    def _troubles(self) -> Iterator[str]:
        if self.skipped_ids:
            yield f"skipped, unreadable: {_some(self.skipped_ids)}"
        for layer, rows in self.missing_rows.items():
            yield f"{layer}: {rows} rows took a path without it and are empty"
        for layer, counts in self.counts.items():
            if counts["nonfinite_values"]:
                yield (
                    f"{layer}: {counts['nonfinite_values']} values in "
                    f"{counts['nonfinite_rows']} rows are NaN or infinite: "
                    f"{_some(counts['nonfinite_ids'])}"
                )
            if counts["overflowed_values"]:
                yield (
                    f"{layer}: {counts['overflowed_values']} values in "
                    f"{counts['overflowed_rows']} rows did not fit the dtype: "
                    f"{_some(counts['overflowed_ids'])}"
                )


def _some(ids: Any, shown: int = 5) -> str:
    text = ", ".join(ids[:shown])
    return text if len(ids) <= shown else f"{text} ... ({len(ids)} listed)"


class Progress:
    """A bar over rows on standard error, or nothing when not wanted."""

    def __init__(self, wanted: bool, *, total_rows: int, done_rows: int) -> None:
        self._bar: Any = None
        if wanted:
            from tqdm import tqdm

            self._bar = tqdm(
                total=total_rows,
                initial=done_rows,
                unit="row",
                file=sys.stderr,
                dynamic_ncols=True,
            )
        self._bytes = 0
        self._shown = time.perf_counter()

    def advance(self, rows: int, row_bytes: int, clock: StageClock) -> None:
        """Move by the rows of one batch, and say what the run waits for."""
        self._bytes += rows * row_bytes
        if self._bar is None:
            return
        now = time.perf_counter()
        if now - self._shown > 1.0:
            busy = max(clock.wall_seconds - clock.seconds["prepare"], 1e-9)
            self._bar.set_postfix_str(
                f"{self._bytes / 1e6 / busy:.0f} MB/s, "
                f"bound by {_WORDS[clock.bottleneck]}",
                refresh=False,
            )
            self._shown = now
        self._bar.update(rows)

    def close(self) -> None:
        """Remove nothing and draw the last state."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def say(wanted: bool, text: str) -> None:
    """Print one message of the run on standard error."""
    if wanted:
        print(text, file=sys.stderr, flush=True)

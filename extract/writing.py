"""Finished rows on their way to the store, in threads, within a byte budget.

The model's thread asks for a buffer, fills it and hands it over.  When the budget is
used up it waits, so a slow filesystem slows the forward and memory stays as it is.
The first error anywhere ends the run at the next batch; a block without all of its
rows is never committed.
"""

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from torchlens.errors import NonFiniteError, StoreError, TorchLensError

from .pieces import OpenBlock, Piece, to_numpy
from .statistics import LayerCounts, count_nonfinite

__all__ = ["BlockPipe", "NonFinite"]

NonFinite = Literal["raise", "keep", "saturate"]


class BlockPipe:
    """Writer threads behind a bounded store of buffers.

    Used as a context manager: leaving it with an error drops what is queued, leaving
    it normally has written everything.
    """

    def __init__(
        self,
        *,
        budget_bytes: int,
        fill: Mapping[str, Tensor],
        nonfinite: NonFinite = "keep",
        num_threads: int = 1,
    ) -> None:
        """Make the threads.

        Args:
            budget_bytes: Bytes of all buffers together, filled and free.
            fill: For each layer, the scalar that stands for "no value".
            nonfinite: What to do about values that are not finite.
            num_threads: A block is always written by the same thread, in order.
        """
        self._budget = budget_bytes
        self._fill = fill
        self._nonfinite = nonfinite
        self._free: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
        self._held_bytes = 0
        self._queued_bytes = 0
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._queues: list[queue.SimpleQueue[tuple[OpenBlock, Piece] | None]] = [
            queue.SimpleQueue() for _ in range(num_threads)
        ]
        self._threads = [
            threading.Thread(target=self._work, args=(tasks,), daemon=True)
            for tasks in self._queues
        ]
        self.busy_seconds = 0.0
        self.committed_blocks = 0
        self.committed_bytes = 0
        self.counts: dict[str, LayerCounts] = defaultdict(LayerCounts)

    def __enter__(self) -> "BlockPipe":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._fail(error)
        for tasks in self._queues:
            tasks.put(None)
        for thread in self._threads:
            thread.join()
        self._free.clear()

    def buffer(
        self, staging: Any, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        """Return a buffer within the budget; waits for the writers when it is used up.

        Raises:
            TorchLensError: If a writer failed.
        """
        key = (shape, dtype)
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        with self._changed:
            while True:
                self._raise_error()
                if self._free[key]:
                    return self._free[key].pop()
                if self._held_bytes + size > self._budget:
                    self._drop_free()
                # With nothing queued no waiting would ever free a byte.
                if self._held_bytes + size <= self._budget or not self._queued_bytes:
                    self._held_bytes += size
                    break
                self._changed.wait()
        buffer: Tensor = staging.empty(shape, dtype)
        return buffer

    def _drop_free(self) -> None:
        for buffers in self._free.values():
            self._held_bytes -= sum(buffer.nbytes for buffer in buffers)
            buffers.clear()

    def put(self, block: OpenBlock, piece: Piece) -> None:
        """Hand rows over to be written; their buffer must not be touched any more."""
        with self._changed:
            self._raise_error()
            block.queued += 1
            self._queued_bytes += piece.buffer.nbytes
        self._queues[block.block.index % len(self._queues)].put((block, piece))

    def seal(self, block: OpenBlock) -> None:
        """Say that all rows of a block were handed over: it can be committed."""
        with self._changed:
            self._raise_error()
            block.sealed = True
            ready = block.queued == 0
        if ready:
            self._commit(block)

    def check(self) -> None:
        """Raise the first error of a writer, if there was one."""
        with self._changed:
            self._raise_error()

    def drain(self) -> None:
        """Return when everything handed over is written."""
        with self._changed:
            while self._queued_bytes and self._error is None:
                self._changed.wait()
            self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if self._error is None:
                self._error = error
            self._changed.notify_all()

    def _work(self, tasks: "queue.SimpleQueue[tuple[OpenBlock, Piece] | None]") -> None:
        while (task := tasks.get()) is not None:
            block, piece = task
            begun = time.perf_counter()
            try:
                if self._error is None:
                    self._write(block, piece)
                    self._finish(block)
            except BaseException as error:
                self._fail(_with_place(error, block, piece))
            with self._changed:
                self.busy_seconds += time.perf_counter() - begun
                self._queued_bytes -= piece.buffer.nbytes
                self._free[(tuple(piece.buffer.shape), piece.buffer.dtype)].append(
                    piece.buffer
                )
                self._changed.notify_all()

    def _write(self, block: OpenBlock, piece: Piece) -> None:
        counts = block.counts[piece.layer]
        if piece.overflowed is not None and bool(piece.overflowed.any()):
            counts.add_overflowed(piece.overflowed, piece.ids)
        bad = count_nonfinite(piece.rows)
        if bad is not None:
            counts.add_nonfinite(bad, piece.ids)
        # A wrapped integer is a valid number: no reader could tell.
        wraps = counts.overflowed_values and not _has_infinity(piece.rows.dtype)
        if counts and (
            self._nonfinite == "raise" or (wraps and self._nonfinite != "saturate")
        ):
            raise _refused(piece, counts)
        for hole in piece.holes:
            piece.rows[hole] = self._fill[piece.layer]
        row = block.block.start + piece.start
        block.writer.write(piece.layer, to_numpy(piece.rows), row)
        with self._changed:
            self.committed_bytes += piece.rows.nbytes

    def _finish(self, block: OpenBlock) -> None:
        with self._changed:
            block.queued -= 1
            ready = block.sealed and block.queued == 0
        if ready:
            self._commit(block)

    def _commit(self, block: OpenBlock) -> None:
        facts = block.facts
        block.writer.commit(
            ids=facts.ids,
            metadata=facts.metadata,
            failed=facts.failed,
            counters={
                name: counts.to_json()
                for name, counts in block.counts.items()
                if counts
            },
            batches={"rows": facts.batch_rows, "missing": facts.missing},
            seconds=facts.seconds,
        )
        with self._changed:
            self.committed_blocks += 1
            for name, counts in block.counts.items():
                if counts:
                    self.counts[name].merge(counts)


def _refused(piece: Piece, counts: LayerCounts) -> NonFiniteError:
    ids = counts.nonfinite_ids + counts.overflowed_ids
    what = []
    if counts.nonfinite_values:
        what.append(f"{counts.nonfinite_values} values that are NaN or infinite")
    if counts.overflowed_values:
        what.append(f"{counts.overflowed_values} values too large for the dtype")
    keep = 'nonfinite="keep" to store and count them, '
    return NonFiniteError(
        f"The layer {piece.layer!r} has {' and '.join(what)}, in the samples "
        f"{_some(ids)}. Pass {keep if _has_infinity(piece.rows.dtype) else ''}"
        f'nonfinite="saturate" to cut them to the largest value, or a wider dtype.'
    )


def _has_infinity(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _some(ids: Sequence[str]) -> str:
    return ", ".join(map(repr, ids[:5])) + (" ..." if len(ids) > 5 else "")


def _with_place(error: BaseException, block: OpenBlock, piece: Piece) -> BaseException:
    place = (
        f"while writing layer {piece.layer!r}, block {block.block.index} "
        f"(rows {block.block.start} to {block.block.stop - 1})"
    )
    if isinstance(error, TorchLensError | MemoryError):
        error.add_note(place)
        return error
    wrapped = StoreError(f"Writing failed {place}: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped

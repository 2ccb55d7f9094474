"""The loop: pending blocks, one after the other, batch by batch.

Reading, forward and writing overlap in the loader's workers and the writer threads;
what happens here happens in order, and may stop between any two batches.
"""

import time
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchlens.plans import CapturePlan, torch_dtype
from torchlens.storage import StoreWriter

from .blocks import Block
from .config import Settings
from .filling import BlockFiller, LayerTarget
from .forecast import PiecePlan
from .forwarding import BatchRunner
from .interrupts import RequeueExit, StopWatch
from .job import Job
from .loading import LoadedBatch, load_batches
from .pieces import OpenBlock
from .progress import Progress, StageClock
from .sample_ids import UniqueIds
from .staging import CudaStaging, DirectStaging, Staging
from .writing import BlockPipe

__all__ = ["OpenRun", "WorkResult", "work_blocks"]


@dataclass(frozen=True, slots=True)
class OpenRun:
    """A run in the store, and what of the job is left to do in it.

    The run's own layout wins over ours, and it stores only layers that no earlier run
    has; `plan` is cut down to those.
    """

    writer: StoreWriter
    plan: CapturePlan
    batch_size: int
    pieces: PiecePlan
    blocks: tuple[Block, ...]
    pending: tuple[Block, ...]


@dataclass(slots=True)
class WorkResult:
    """What working the pending blocks came to."""

    rows: int = 0
    blocks: int = 0
    num_bytes: int = 0
    writer_seconds: float = 0.0
    skipped_ids: list[str] = field(default_factory=list)
    missing_rows: dict[str, int] = field(default_factory=dict)
    counts: dict[str, dict[str, Any]] = field(default_factory=dict)


def work_blocks(
    job: Job, run: OpenRun, settings: Settings, watch: StopWatch, clock: StageClock
) -> WorkResult:
    """Work the pending blocks and commit each when all of its rows are there.

    Raises:
        RequeueExit: If it had to stop; every block is whole or not there.
    """
    result = WorkResult()
    if not run.pending:
        return result
    with clock.stage("prepare"):
        worker = _Worker(job, run, settings, watch, clock, result)
    worker.work()
    return result


class _Worker:
    """The moving parts of one call, and the loop over them."""

    def __init__(
        self,
        job: Job,
        run: OpenRun,
        settings: Settings,
        watch: StopWatch,
        clock: StageClock,
        result: WorkResult,
    ) -> None:
        self._job = job
        self._run = run
        self._watch = watch
        self._clock = clock
        self._result = result
        self._runner = BatchRunner(
            job.model,
            run.plan,
            job.rule,
            device=job.device,
            on_divergence=settings.on_divergence,
            check_model=not job.plan_is_checked,
            clock=clock,
        )
        targets = {
            site.name: LayerTarget(
                site.row_shape,
                torch_dtype(site.stored_dtype),
                run.pieces.rows[site.name],
            )
            for site in run.plan.sites
        }
        self._row_bytes = sum(target.row_bytes for target in targets.values())
        self._pipe = BlockPipe(
            budget_bytes=run.pieces.budget_bytes,
            fill={name: _fill_value(target.dtype) for name, target in targets.items()},
            nonfinite=settings.nonfinite,
        )
        self._filler = BlockFiller(
            self._pipe,
            _staging(job.device),
            targets,
            saturate=settings.nonfinite == "saturate",
        )
        self._batches = load_batches(
            job.source,
            run.pending,
            run.batch_size,
            job.make,
            on_error=settings.on_error,
            pin_memory=_pins_memory(job),
        )
        self._unique = UniqueIds()
        left = sum(map(len, run.pending))
        self._bar = Progress(
            settings.progress, total_rows=job.num_rows, done_rows=job.num_rows - left
        )
        self._began = time.monotonic()

    def work(self) -> None:
        """Work block after block until all are done or it is time to stop."""
        with (
            closing(self._bar),
            closing(self._batches),
            self._runner.replayer,
            self._pipe,
        ):
            stopped = False
            for block in self._run.pending:
                may_begin = self._watch.may_begin(self._seconds_for(len(block)))
                if not may_begin or not self._work_block(block):
                    stopped = True
                    break
            with self._clock.stage("write"):
                self._pipe.drain()
        self._fold_in_pipe()
        if stopped:
            raise RequeueExit(self._describe_stop())

    def _work_block(self, block: Block) -> bool:
        """Work one block; returns whether it was finished and not dropped."""
        began = time.monotonic()
        open_block = OpenBlock(block, self._run.writer.block(block.index))
        facts = open_block.facts
        columns = self._job.metadata.of_rows(range(block.start, block.stop))
        facts.metadata.update(columns)
        self._filler.begin(open_block)
        for rows in block.batches(self._run.batch_size):
            if self._watch.must_stop(self._seconds_for(block.stop - rows.start)):
                return False
            batch = self._next_batch()
            if batch is None:
                return False
            self._check(batch, rows)
            if rows.stop == block.stop:
                facts.seconds = time.monotonic() - began
            self._runner.run(batch, open_block, self._filler)
            for name in self._runner.replayer.missing if batch.rows else ():
                known = self._result.missing_rows.get(name, 0)
                self._result.missing_rows[name] = known + len(batch.rows)
            self._result.rows += len(batch.rows)
            self._bar.advance(len(rows), self._row_bytes, self._clock)
        return True

    def _next_batch(self) -> LoadedBatch | None:
        """Return the next batch, or `None` when a signal took the loader's workers."""
        try:
            with self._clock.stage("load"):
                return next(self._batches)
        except (RuntimeError, ConnectionError, EOFError) as error:
            # torch has no type for a lost worker, but names it in the message.
            lost = not isinstance(error, RuntimeError) or "worker" in str(error)
            if self._watch.signalled and lost:
                return None
            raise

    def _check(self, batch: LoadedBatch, rows: range) -> None:
        if batch.all_rows != list(rows):
            raise AssertionError(f"The loader gave rows {batch.all_rows} for {rows}.")
        self._pipe.check()
        if self._job.make.ids.from_items:
            self._unique.add(rows.start, batch.ids)
        if batch.failures:
            failed = {failure.row for failure in batch.failures}
            self._result.skipped_ids += [
                name for row, name in zip(rows, batch.ids, strict=True) if row in failed
            ]

    def _seconds_for(self, num_rows: int) -> float:
        """Estimate the time for rows from the pace so far; 0 before the first."""
        if not self._result.rows:
            return 0.0
        return num_rows * (time.monotonic() - self._began) / self._result.rows

    def _fold_in_pipe(self) -> None:
        pipe, result = self._pipe, self._result
        result.blocks = pipe.committed_blocks
        result.num_bytes = pipe.committed_bytes
        result.writer_seconds = pipe.busy_seconds
        result.counts = {name: c.to_json() for name, c in pipe.counts.items()}

    def _describe_stop(self) -> str:
        total = len(self._run.blocks)
        before = total - len(self._run.pending)
        done = before + self._result.blocks
        text = (
            f"Stopped early because {self._watch.reason}: {done} of {total} blocks are "
            f"committed in {self._run.writer.url}. Run the same command again to go on."
        )
        if not self._result.blocks:
            text += (
                " No block was finished this time: allow more time, or delete the "
                "store and use a smaller block_rows."
            )
        return text


def _staging(device: torch.device | None) -> Staging:
    if device is not None and device.type == "cuda":
        return CudaStaging(device)
    return DirectStaging()


def _pins_memory(job: Job) -> bool:
    wanted = job.source.options.pin_memory
    on_cuda = job.device is not None and job.device.type == "cuda"
    return on_cuda if wanted is None else wanted and torch.cuda.is_available()


def _fill_value(dtype: torch.dtype) -> Tensor:
    has_nan = dtype.is_floating_point or dtype.is_complex
    return torch.tensor(float("nan") if has_nan else 0, dtype=dtype)

"""`extract_dataset`: a dataset through a model into a store, block by block.

Read it from top to bottom: what is asked for becomes a job, the job is forecast and
opened as a run, its missing blocks are worked one after the other, and when all are
committed the store is published.
"""

import dataclasses
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchlens.errors import ResumeError
from torchlens.lookup import Layers
from torchlens.plans import CapturePlan
from torchlens.storage import ArraySpec, Layout, RunSpec, Store, open_run

from .blocks import cut_blocks, pending_blocks
from .config import (
    OnDivergence,
    Settings,
    as_dtype_names,
    as_location,
)
from .earlier_runs import explain_refusal, find_plan, stored_layers
from .forecast import choose_layout, forecast_run, plan_pieces
from .interrupts import StopWatch
from .job import DataOptions, Job, make_job
from .loading import OnError
from .memory_limits import host_memory_room
from .model_call import Inputs
from .progress import RunSummary, StageClock, say
from .working import OpenRun, WorkResult, work_blocks
from .writing import NonFinite

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["extract_dataset", "run_extraction"]


def extract_dataset(
    model: nn.Module,
    dataset: object,
    layers: Layers | CapturePlan,
    *,
    output_dir: str | os.PathLike[str] | None,
    batch_size: int | None = None,
    ids: Callable[[Any], object] | str | Iterable[object] | None = None,
    metadata: "Mapping[str, Any] | Iterable[str] | pd.DataFrame | None" = None,
    inputs: Inputs = None,
    collate: Callable[[list[Any]], Any] | None = None,
    transform: Callable[[Any], Any] | None = None,
    num_workers: int = 0,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | Mapping[str, str | torch.dtype] | None = None,
    allow: Collection[str] = (),
    block_rows: int | None = None,
    overwrite: bool = False,
    max_bytes: int | None = None,
    on_divergence: OnDivergence = "raise",
    on_error: OnError = "raise",
    nonfinite: NonFinite = "keep",
    preprocess: Any = None,
    fingerprint: str | None = None,
    time_limit: float | None = None,
    progress: bool = True,
) -> Store:
    """Run a dataset through a model and store what the layers compute, row by row.

    Row i of every array is item i of the dataset.  Running the same call again
    continues where an earlier one ended; a finished store is returned at once.  The
    model runs in eval mode and is left as it was; it is never moved.

    Args:
        model: Any module; wrappers of DDP and torch.compile are looked through.
        dataset: A map-style or iterable Dataset, a DataLoader (its dataset, collate
            function, workers and batch size are used), a tensor, an array, a list of
            items, or the path of a folder of images.  Iterable ones are read once more
            to count them.
        layers: Labels, module addresses, selectors, a mapping from names of your own
            to them, or a `CapturePlan`.
        output_dir: Path or URL of the store; `None` keeps it in memory.
        batch_size: Samples run together; default the DataLoader's, else 32.
        ids: A callable on an item, the name of an entry of dict items or of a metadata
            column, or all ids in order; default the entry "id", else file names, else
            row numbers.
        metadata: Columns for the samples table: a mapping or DataFrame with a value a
            row, or names of entries of dict items.
        inputs: What of a batch the model gets, where it is not plain: a key, a tuple of
            keys for positional arguments, a mapping from parameters to keys, or a
            callable on the collated batch.
        collate: Joins a list of items into a batch; default torch's.
        transform: Turns an RGB image of a folder into a tensor; for folders only.
        num_workers: Processes that read items.
        device: Where the model must be; inputs go there.
        dtype: What floating-point layers are cast to, one for all or a mapping from
            names of layers; default as the model makes them.
        allow: What is refused unless named here: "constants" (layers without a batch
            axis), "mixing" (values that depend on the other samples of a batch),
            "fixed_batch" (models that take batches of one size only).
        block_rows: Rows of a block, a power of two; default chosen.
        overwrite: Delete a store that is there.
        max_bytes: Refuse a store larger than this.
        on_divergence: "raise", or "retrace" batches that take another path than
            planned and leave empty what they do not have.
        on_error: "raise", or "skip" items that cannot be read, empty and listed.
        nonfinite: "keep" and count NaN, infinities and overflow on cast; "raise" on
            them; or "saturate", which cuts overflow to the largest value.
        preprocess: JSON that says how the data was prepared; a store is continued only
            under the same.
        fingerprint: Says which data this is, instead of a digest of a few items.
        time_limit: Seconds after which to stop between two batches.
        progress: Whether to show a bar and a summary on standard error.

    Returns:
        The finished store, open for reading.

    Raises:
        DataError: If the dataset or its ids break a rule.
        InputError: If an item does not say what the model's inputs are.
        BudgetError: If the run cannot fit the disk, the memory or `max_bytes`.
        ResumeError: If another run is in the store; every differing field is named.
        PathDivergenceError: If a batch takes another path than planned.
        NonFiniteError: If values are not finite and `nonfinite` is "raise".
        RequeueExit: If SIGTERM or `time_limit` ended the run early; it exits with 75.

    Example:
        >>> import torch, torchlens as tl
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU())
        >>> store = tl.extract_dataset(
        ...     model, torch.randn(10, 3), ["1"], output_dir=None, progress=False
        ... )
        >>> store["1"].shape
        (10, 4)
    """
    settings = Settings(
        output_dir=as_location(output_dir),
        batch_size=batch_size,
        block_rows=block_rows,
        max_bytes=max_bytes,
        time_limit_seconds=time_limit,
        on_divergence=on_divergence,
        on_error=on_error,
        nonfinite=nonfinite,
        overwrite=overwrite,
        progress=progress,
    )
    options = DataOptions(
        ids=ids,
        metadata=metadata,
        inputs=inputs,
        collate=collate,
        transform=transform,
        num_workers=num_workers,
        preprocess=preprocess,
        fingerprint=fingerprint,
        device=device,
        dtype=as_dtype_names(dtype),
        allow=allow,
    )
    store, summary = run_extraction(model, dataset, layers, settings, options)
    say(progress, str(summary))
    return store


def run_extraction(
    model: nn.Module,
    dataset: object,
    layers: Layers | CapturePlan,
    settings: Settings,
    options: DataOptions,
) -> tuple[Store, RunSummary]:
    """Do what `extract_dataset` says, and return the summary too."""
    clock = StageClock()
    with StopWatch(settings.time_limit_seconds) as watch:
        with clock.stage("prepare"):
            job = make_job(
                model,
                dataset,
                layers,
                options,
                batch_size=settings.batch_size,
                saturate=settings.nonfinite == "saturate",
                find_plan=lambda request: find_plan(settings, request),
            )
            run = open_job(job, settings)
        with run.writer:
            result = work_blocks(job, run, settings, watch, clock)
            with clock.stage("write"):
                run.writer.consolidate()
                store = run.writer.open_store()
    return store, summarise(run, result, clock, store)


def open_job(job: Job, settings: Settings) -> OpenRun:
    """Forecast the job, refuse what cannot fit, and open or create its run."""
    room = host_memory_room()
    batch_size = job.batch_size
    layout = choose_layout(
        job.num_rows,
        job.arrays,
        batch_size=batch_size,
        block_rows=settings.block_rows,
        room=room,
    )

    def forecast(arrays: Mapping[str, ArraySpec], layout: Layout, rows: int) -> None:
        found = forecast_run(
            arrays,
            layout,
            plan_pieces(arrays, layout, batch_size, room),
            batch_size=batch_size,
            rows_left=rows,
            output_dir=settings.output_dir,
            room=room,
        )
        found.check(settings.max_bytes)
        say(settings.progress, f"forecast: {found}")

    known = stored_layers(settings)
    new = {name: spec for name, spec in job.arrays.items() if name not in known}
    if new:
        # Before anything is created or deleted.
        forecast(new, layout, job.num_rows)
    spec = RunSpec(
        num_rows=job.num_rows,
        arrays=job.arrays,
        identity=job.identity,
        provenance=job.provenance,
        block_rows=layout.block_rows,
        batch_size=batch_size,
    )
    try:
        writer = open_run(settings.output_dir, spec, overwrite=settings.overwrite)
    except ResumeError as error:
        raise explain_refusal(error) from None
    blocks = cut_blocks(job.num_rows, writer.layout.block_rows)
    pending = pending_blocks(blocks, writer.committed())
    if pending and not new:
        forecast(writer.arrays, writer.layout, sum(map(len, pending)))
    sites = tuple(site for site in job.plan.sites if site.name in writer.arrays)
    return OpenRun(
        writer=writer,
        plan=dataclasses.replace(job.plan, sites=sites),
        batch_size=min(batch_size, writer.layout.block_rows),
        pieces=plan_pieces(writer.arrays, writer.layout, batch_size, room),
        blocks=blocks,
        pending=pending,
    )


def summarise(
    run: OpenRun, result: WorkResult, clock: StageClock, store: Store
) -> RunSummary:
    """Say what one call did."""
    return RunSummary(
        rows=run.blocks[-1].stop,
        rows_done=result.rows,
        blocks=len(run.blocks),
        blocks_done=result.blocks,
        bytes_done=result.num_bytes,
        stage_seconds=dict(clock.seconds),
        writer_seconds=result.writer_seconds,
        wall_seconds=clock.wall_seconds,
        skipped_ids=tuple(result.skipped_ids),
        missing_rows=result.missing_rows,
        counts=result.counts,
        place=store.zarr_path,
    )

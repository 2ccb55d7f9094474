"""open_run and open_store: from a place to a writer or a reader."""

import warnings
from collections.abc import Mapping
from typing import Any

from torchlens.errors import StoreError, TorchLensWarning

from .consolidate import committed_blocks
from .objects import Location, ObjectStore, open_objects, refuses_second_put
from .run_record import GROUP, ORDER, ROOT_METADATA, SAMPLES
from .run_spec import RunSpec
from .runs import is_store, join_or_create, read_runs
from .store import Store
from .writer import StoreWriter


def open_run(
    url: Location,
    spec: RunSpec,
    *,
    overwrite: bool = False,
    fsync: bool = False,
    writer: Mapping[str, Any] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> StoreWriter:
    """Start a run, join one that was begun, or add layers to a finished store.

    Running the same command again is how a run resumes: the writer's `missing()` says
    what is left.  Layers that a finished store has already are not written again; the
    writer's `arrays` are those that remain.

    Args:
        url: Directory or fsspec URL; None for a private in-memory store.
        spec: What to store, and the facts that must match to continue.
        overwrite: Delete the store that is there first.  Nothing else ever deletes.
        fsync: Wait for the disk before an object counts, against power loss.
        writer: Facts about this writer for its commit records, such as rank and job.
        storage_options: Options of the client that opens a URL, such as `key`,
            `secret` and `endpoint_url` for S3; never stored.  Without them its usual
            environment and configuration count.

    Raises:
        ResumeError: If another run is there; every differing field is named.
        StoreError: If nothing can be written there, or it is not ours to overwrite.
        ManifestError: If the store's records are damaged or of an unknown version.
    """
    objects = open_objects(url, fsync=fsync, storage_options=storage_options)
    if overwrite:
        delete_store(objects)
    if not refuses_second_put(objects, "_run/tmp"):
        objects.give_up_conditions()
        warnings.warn(
            f"{objects.url} lets a second writer overwrite what the first has put: it "
            "ignores the condition that an object be new. Each object is now looked "
            "for first and then put without it, so run one writer at a time there.",
            TorchLensWarning,
            stacklevel=2,
        )
    run = join_or_create(objects, spec)
    return StoreWriter(objects, run, writer=writer)


def open_store(
    url: Location,
    *,
    allow_partial: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Store:
    """Open a store for reading.

    Args:
        url: Directory or fsspec URL, or the `objects` of an in-memory writer.
        allow_partial: Show a running job too: its committed rows, nothing else.
        storage_options: Options of the fsspec file system.

    Raises:
        StoreError: If there is no store, or it is unfinished and partial reading was
            not asked for.
        ManifestError: If its records are damaged or of an unknown version.
    """
    objects = open_objects(url, storage_options=storage_options)
    runs = read_runs(objects)
    if not runs:
        raise StoreError(
            f"{objects.url} is not a store: it has no {ORDER}. Give the folder that "
            "was the output directory of an extraction."
        )
    if not allow_partial and not any(run.finished for run in runs):
        run = runs[-1].record
        total = run.layout.num_blocks
        missing = total - len(committed_blocks(objects, run))
        raise StoreError(
            f"The store at {objects.url} is unfinished: {missing} of {total} blocks "
            "are missing"
            + (", and it is not published" if not missing else "")
            + ". Run the same command again to finish it, or open it with "
            "allow_partial=True to see the rows that are committed."
        )
    return Store(objects, runs, allow_partial=allow_partial)


def delete_store(objects: ObjectStore) -> None:
    """Delete a store of ours; do nothing where nothing is.

    What says that the store is finished goes first, then what says that rows exist,
    then the rows, and what says whose they are goes last: a kill in between leaves an
    unfinished store, which the same command overwrites or a plain one completes.

    Raises:
        StoreError: If the place holds something else.
    """
    if not is_store(objects):
        if objects.list("", recursive=True):
            raise StoreError(
                f"{objects.url} is not empty and not a store of ours, so it is not "
                "overwritten. Choose another place, or empty it yourself."
            )
        return
    runs = objects.list("_run", recursive=True)
    data = objects.list(GROUP, recursive=True)
    published = [ROOT_METADATA, *(key for key in data if key.endswith("/zarr.json"))]
    identity = [k for k in runs if k.endswith("/run.json") or k.startswith(ORDER)]
    claims = [key for key in runs if key not in set(identity)]
    finished = [key for key in runs if key.endswith("/manifest.json")]
    order = [*finished, *published, SAMPLES, *claims, *data, *sorted(identity)[::-1]]
    for key in dict.fromkeys(order):
        objects.delete(key)
    objects.prune()

"""The runs of one root: which there are, whether one may be joined, started, or not.

`_run/order/000000.json` and so on name the runs that count, in order; creating the next
number is what decides between two jobs that start at once.
"""

import platform
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from torchlens.errors import ManifestError, ResumeError, StoreError

from .checksums import sha256_hex
from .layer_paths import assign_paths
from .layout import plan_layout
from .objects import ObjectStore
from .run_record import (
    GROUP,
    ORDER,
    SAMPLES,
    RunRecord,
    dump,
    load,
    parse_run,
    run_document,
)
from .run_spec import ArraySpec, RunSpec, differences


@dataclass(frozen=True, slots=True)
class KnownRun:
    """A run of a root, and whether it is finished."""

    record: RunRecord
    finished: bool


def read_runs(objects: ObjectStore) -> tuple[KnownRun, ...]:
    """Return the runs of a root in the order they were started.

    Raises:
        ManifestError: If a record is damaged or of an unknown version.
    """
    runs = []
    for key, size in sorted(objects.list(ORDER).items()):
        if not size:
            continue  # claimed by a writer that died before naming its run
        where = f"{objects.url}/{key}"
        run_id = str(load(objects.get(key), where).get("run_id"))
        if len(run_id) != 64 or not run_id.isalnum():
            raise ManifestError(f"{where} names no run: the record is damaged.")
        run_key = f"_run/{run_id}/run.json"
        try:
            data = objects.get(run_key)
        except FileNotFoundError:
            raise ManifestError(
                f"{where} names a run whose {run_key} is gone. Restore it, or extract "
                "again with overwrite=True."
            ) from None
        record = parse_run(data, run_id, f"{objects.url}/{run_key}")
        finished = bool(objects.size(record.manifest_key))
        runs.append(KnownRun(record, finished))
    return tuple(runs)


def is_store(objects: ObjectStore) -> bool:
    """Return whether a store of ours, finished or not, is at the place."""
    return bool(objects.list(ORDER))


def join_or_create(objects: ObjectStore, spec: RunSpec) -> RunRecord:
    """Return the run that `spec` continues, or start one.

    Raises:
        ResumeError: If another run is in the way; every differing field is named.
        StoreError: If data that is not ours lies where a store's would.
    """
    for _ in range(100):
        runs = read_runs(objects)
        if not runs:
            _refuse_foreign_data(objects)
        found = _find(objects, runs, spec)
        if found is not None:
            return found
        created = _create(objects, runs, spec)
        if created is not None:
            return created
        # Another job named the next run first: look again, join it or refuse.
    raise StoreError(
        f"The store at {objects.url} does not keep what is written into "
        f"{ORDER}. Check the file system, or use another place."
    )


def _find(
    objects: ObjectStore, runs: tuple[KnownRun, ...], spec: RunSpec
) -> RunRecord | None:
    """Return the run to join, None if one must be created."""
    if not runs:
        return None
    stored = {
        name: run.record for run in runs if run.finished for name in run.record.arrays
    }
    lines = _against(runs[0].record, spec)
    for name in sorted(spec.arrays.keys() & stored.keys()):
        lines += _array_lines(stored[name].arrays[name], spec.arrays[name], name)
    wanted = {n: array for n, array in spec.arrays.items() if n not in stored}
    unfinished = [run.record for run in runs if not run.finished]
    for record in unfinished if wanted else []:
        lines += _layer_lines(record, wanted)
    _refuse(objects, lines)
    if not wanted:
        return stored[next(iter(spec.arrays))]
    return unfinished[-1] if unfinished else None


def _against(record: RunRecord, spec: RunSpec) -> list[str]:
    """Return a line for each field of all layers in which `spec` differs from a run."""
    lines = differences(record.layout.num_rows, spec.num_rows, "num_rows")
    return lines + differences(record.identity, spec.identity, "identity")


def _layer_lines(record: RunRecord, wanted: Mapping[str, ArraySpec]) -> list[str]:
    """Return a line for each layer in which an unfinished run differs."""
    lines = []
    for name in sorted(record.arrays.keys() | wanted.keys()):
        if name not in wanted:
            lines.append(f"layer {name!r}: in the unfinished run, now absent")
        elif name not in record.arrays:
            lines.append(f"layer {name!r}: not in the unfinished run, now asked for")
        else:
            lines += _array_lines(record.arrays[name], wanted[name], name)
    return lines


def _array_lines(stored: ArraySpec, wanted: ArraySpec, name: str) -> list[str]:
    where = f"layer {name!r}"
    lines = differences(
        list(stored.row_shape), list(wanted.row_shape), f"{where} row_shape"
    )
    lines += differences(stored.dtype, wanted.dtype, f"{where} dtype")
    return lines + differences(stored.identity, wanted.identity, f"{where} identity")


def _refuse(objects: ObjectStore, lines: list[str]) -> None:
    if not lines:
        return
    listed = "\n".join(f"  {line}" for line in lines)
    raise ResumeError(
        f"The store at {objects.url} was begun by a run that differs from this one in "
        f"what determines its values:\n{listed}\n"
        "Continue it with the settings it was begun with, choose another place, or "
        "delete it by asking for overwrite=True."
    )


def _create(
    objects: ObjectStore, runs: tuple[KnownRun, ...], spec: RunSpec
) -> RunRecord | None:
    """Start a run for the layers not stored yet; None if another job was faster."""
    from .zarr_store import array_documents, zarr_version

    stored = {name for run in runs for name in run.record.arrays}
    taken = [path for run in runs for path in run.record.paths.values()]
    arrays = {name: a for name, a in spec.arrays.items() if name not in stored}
    layout = plan_layout(
        spec.num_rows,
        arrays,
        spec.batch_size,
        block_rows=spec.block_rows,
        world_size=spec.world_size,
    )
    paths = assign_paths(arrays, taken)
    body = run_document(
        layout,
        arrays,
        paths,
        array_documents(spec.num_rows, arrays, paths, layout.arrays),
        spec.identity,
        spec.provenance,
        {
            "zarr": zarr_version(),
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
    )
    run_id = sha256_hex(body)
    record = parse_run(body, run_id, f"the new run at {objects.url}")
    run_key = record.folder("run.json")
    objects.put_new(run_key, [body])
    order_key = f"{ORDER}/{len(runs):06d}.json"
    if objects.put_new(order_key, [dump({"run_id": run_id})]):
        return record
    if not objects.size(order_key):
        # Left empty by a writer that died on a file system without links.
        objects.replace(order_key, [dump({"run_id": run_id})])
    elif load(objects.get(order_key), order_key).get("run_id") != run_id:
        objects.delete(run_key)
    return None


def _refuse_foreign_data(objects: ObjectStore) -> None:
    if objects.list(GROUP, recursive=True) or objects.size(SAMPLES) is not None:
        raise StoreError(
            f"{objects.url} holds a {GROUP} or {SAMPLES} that no run of ours made. "
            "Move it away, or choose another place."
        )

"""Publish a finished run: check every record, then write the metadata, root last.

Each step creates the same object whoever does it, so two finishers at once, or a kill
in between, do no harm.  Only the root's metadata is ever replaced, when layers join.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from torchlens.errors import DataError, ManifestError, StoreError

from .checksums import ids_digest
from .manifest import (
    CommitRecord,
    ObjectRecord,
    parse_commit,
    read_commit,
    read_object,
)
from .objects import ObjectStore, missing_object
from .run_record import GROUP, ROOT_METADATA, SAMPLES, RunRecord, dump, load
from .runs import read_runs
from .shards import encoded_bytes

_COMMIT = re.compile(r"b(\d{8,})\.json")


def committed_blocks(objects: ObjectStore, run: RunRecord) -> frozenset[int]:
    """Return the blocks that have a commit record, by one listing."""
    found = set()
    for key, size in objects.list(run.folder("commits")).items():
        match = _COMMIT.fullmatch(key.rsplit("/", 1)[-1])
        # An empty record is a name claimed by a writer that died (no links there).
        if match and size and int(match[1]) < run.layout.num_blocks:
            found.add(int(match[1]))
    return frozenset(found)


def read_samples_record(objects: ObjectStore, run: RunRecord) -> ObjectRecord:
    """Return what a finished run's manifest says of the samples table."""
    where = f"{objects.url}/{run.manifest_key}"
    body = load(objects.get(run.manifest_key), where)
    return read_object(body.get("samples"), where)


def read_commits(
    objects: ObjectStore, run: RunRecord, *, finished: bool
) -> tuple[CommitRecord, ...]:
    """Return the commit records in order, a finished run's from its manifest."""
    if finished:
        where = f"{objects.url}/{run.manifest_key}"
        blocks = load(objects.get(run.manifest_key), where).get("blocks")
        if not isinstance(blocks, list) or len(blocks) != run.layout.num_blocks:
            raise ManifestError(f"{where} does not list every block: it is damaged.")
        return tuple(
            read_commit(body, run, block, f"{where}, block {block}")
            for block, body in enumerate(blocks)
        )
    records = []
    for block in sorted(committed_blocks(objects, run)):
        key = run.commit_key(block)
        records.append(
            parse_commit(objects.get(key), run, block, f"{objects.url}/{key}")
        )
    return tuple(records)


def consolidate(objects: ObjectStore, run: RunRecord) -> bool:
    """Publish `run` if every block is committed; return whether it is published."""
    if not objects.size(run.manifest_key):
        if len(committed_blocks(objects, run)) < run.layout.num_blocks:
            return False
        commits = read_commits(objects, run, finished=False)
        check_records(objects, run, commits)
        samples = _publish_samples(objects, run, commits)
        blocks = [commit.to_json() for commit in commits]
        body = dump(
            {"run_id": run.run_id, "samples": samples.to_json(), "blocks": blocks}
        )
        if not objects.put_new(run.manifest_key, [body]):
            if not objects.size(run.manifest_key):
                objects.replace(run.manifest_key, [body])
    for key, document in run.documents.items():
        _publish(objects, f"{GROUP}/{key}", dump(document, readable=True))
    _publish_root(objects)
    objects.sweep()
    return True


def check_records(
    objects: ObjectStore, run: RunRecord, commits: Sequence[CommitRecord]
) -> None:
    """Check recorded keys against required ones, and recorded sizes against objects.

    Raises:
        ManifestError: If a record has too few or too many keys.
        StoreError: If an object is gone or has another size.
    """
    for commit in commits:
        recorded = {record.key for record in commit.objects}
        required = run.required_keys(commit.block)
        if recorded != required:
            raise ManifestError(
                f"The commit record of block {commit.block} at {objects.url} does not "
                f"name the objects its run requires: {_keys(required - recorded)} "
                f"missing, {_keys(recorded - required)} not required. It was written "
                "with another layout; delete the record and run the command again."
            )
    sizes = object_sizes(objects, run)
    for record in (record for commit in commits for record in commit.objects):
        if record.key not in sizes:
            raise missing_object(objects, record.key)
        if sizes[record.key] != record.nbytes:
            raise StoreError(
                f"The object {record.key!r} of the store at {objects.url} has "
                f"{sizes[record.key]} bytes, {record.nbytes} were recorded. It is "
                "damaged; delete the block's commit record and run the command again."
            )


def object_sizes(objects: ObjectStore, run: RunRecord) -> dict[str, int]:
    """Return key to size of a run's objects, by one listing per folder."""
    folders = [f"{GROUP}/{path}" for path in run.paths.values()]
    sizes: dict[str, int] = {}
    for folder in [*folders, run.folder("samples")]:
        sizes.update(objects.list(folder, recursive=True))
    return sizes


def array_document(run: RunRecord, path: str) -> bytes:
    """Return the bytes an array's published metadata must have."""
    return dump(run.documents[f"{path}/zarr.json"], readable=True)


def root_document(runs: Iterable[RunRecord]) -> bytes:
    """Return the bytes of the root group's metadata for some finished runs."""
    arrays: dict[str, Any] = {}
    for run in runs:
        for path in run.paths.values():
            arrays[path] = run.documents[f"{path}/zarr.json"]
    return dump(
        {
            "zarr_format": 3,
            "node_type": "group",
            "attributes": {},
            "consolidated_metadata": {
                "kind": "inline",
                "must_understand": False,
                "metadata": arrays,
            },
        }
    )


def _publish_samples(
    objects: ObjectStore, run: RunRecord, commits: Sequence[CommitRecord]
) -> ObjectRecord:
    from .sample_table import decode_ids, join_parts

    parts = [objects.get(run.samples_key(commit.block)) for commit in commits]
    ids: list[str] = []
    for commit, part in zip(commits, parts, strict=True):
        key = run.samples_key(commit.block)
        block_ids = decode_ids(part, f"{objects.url}/{key}")
        if ids_digest(block_ids) != commit.ids_sha256:
            raise ManifestError(
                f"The ids in {key} at {objects.url} are not those that were committed."
            )
        ids += block_ids
    _check_unique(ids)
    table = join_parts(parts, f"{objects.url}/{run.folder('samples')}")
    if not objects.put_new(SAMPLES, [table]):
        stored = objects.get(SAMPLES)
        if not stored:
            objects.replace(SAMPLES, [table])
        elif decode_ids(stored, f"{objects.url}/{SAMPLES}") != ids:
            raise DataError(
                f"The sample ids of this run are not those in {SAMPLES} at "
                f"{objects.url}. Use another place for another dataset."
            )
        else:
            table = stored
    facts = encoded_bytes(table)
    return ObjectRecord(SAMPLES, facts.nbytes, f"{facts.crc32c:08x}", facts.content)


def _check_unique(ids: Sequence[str]) -> None:
    if len(set(ids)) == len(ids):
        return
    rows: dict[str, int] = {}
    for row, sample_id in enumerate(ids):
        if sample_id in rows:
            raise DataError(
                f"The sample id {sample_id!r} belongs to row {rows[sample_id]} and to "
                f"row {row}. Ids must be unique: give others, then extract again with "
                "overwrite=True."
            )
        rows[sample_id] = row


def _publish(objects: ObjectStore, key: str, data: bytes) -> None:
    if objects.put_new(key, [data]):
        return
    stored = objects.get(key)
    if not stored:
        objects.replace(key, [data])
    elif stored != data:
        raise ManifestError(
            f"{key} at {objects.url} is not the metadata that the run pinned, so its "
            "objects would be read wrongly. Delete that file and run the command again."
        )


def _publish_root(objects: ObjectStore) -> None:
    # Two runs may finish at once: whoever writes last has seen both manifests,
    # because each looks again after writing.
    for _ in range(100):
        finished = [run.record for run in read_runs(objects) if run.finished]
        data = root_document(finished)
        try:
            if objects.get(ROOT_METADATA) == data:
                return
            objects.replace(ROOT_METADATA, [data])
        except FileNotFoundError:
            objects.put_new(ROOT_METADATA, [data])
    raise StoreError(
        f"{ROOT_METADATA} at {objects.url} does not keep what is written into it."
    )


def _keys(keys: Iterable[str]) -> str:
    listed = sorted(keys)
    shown = ", ".join(listed[:3]) or "none"
    return shown if len(listed) <= 3 else f"{shown} and {len(listed) - 3} more"

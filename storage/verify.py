"""Check a store against its commit records, and those against the pinned metadata."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchlens.errors import ManifestError

from .checksums import crc32c, ids_digest
from .consolidate import (
    array_document,
    object_sizes,
    read_commits,
    root_document,
)
from .manifest import GROUP, ROOT_METADATA, SAMPLES, CommitRecord, RunRecord
from .objects import ObjectStore
from .runs import KnownRun
from .shards import check_shard


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: the object, its block if it has one, and what it is."""

    key: str
    reason: str
    run_id: str = ""
    block: int | None = None


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `verify` found.

    Attributes:
        problems: Everything wrong, empty for a sound store.
        missing_blocks: How many blocks are not committed; no problem in itself.
        num_objects: Objects looked at.
        num_bytes: Their bytes by the records.
        deep: Whether every object was read.
    """

    problems: tuple[Problem, ...]
    missing_blocks: int
    num_objects: int
    num_bytes: int
    deep: bool

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    @property
    def bad_keys(self) -> tuple[str, ...]:
        """The keys with problems, each once."""
        return tuple(dict.fromkeys(problem.key for problem in self.problems))

    def summary(self) -> str:
        """Return the report as text."""
        how = "read and checked" if self.deep else "compared by size"
        lines = [
            f"{self.num_objects} objects ({self.num_bytes / 1e6:.1f} MB) {how}: "
            f"{len(self.problems) or 'no'} problems."
        ]
        if self.missing_blocks:
            lines.append(f"{self.missing_blocks} blocks are not committed yet.")
        lines += [f"  {problem.key}: {problem.reason}" for problem in self.problems]
        return "\n".join(lines)


def verify_runs(
    objects: ObjectStore, runs: Sequence[KnownRun], *, deep: bool
) -> VerifyReport:
    """Check the objects of some runs; see `Store.verify`."""
    problems: list[Problem] = []
    missing = num_objects = num_bytes = 0
    for run in runs:
        record = run.record
        try:
            commits = read_commits(objects, record, finished=run.finished)
        except (ManifestError, FileNotFoundError) as error:
            problems.append(Problem(record.manifest_key, str(error), record.run_id))
            continue
        missing += record.layout.num_blocks - len(commits)
        num_objects += sum(len(commit.objects) for commit in commits)
        num_bytes += sum(o.nbytes for commit in commits for o in commit.objects)
        problems += _check_objects(objects, record, commits, deep)
        if run.finished:
            problems += _check_published(objects, record)
            problems += _check_commit_files(objects, record, commits)
            if deep:
                problems += _check_ids(objects, record, commits)
    finished = [run.record for run in runs if run.finished]
    if finished and _get(objects, ROOT_METADATA) != root_document(finished):
        reason = "it is not the metadata of the finished runs"
        problems.append(Problem(ROOT_METADATA, reason))
    return VerifyReport(tuple(problems), missing, num_objects, num_bytes, deep)


def _check_objects(
    objects: ObjectStore,
    run: RunRecord,
    commits: Sequence[CommitRecord],
    deep: bool,
) -> Iterator[Problem]:
    sizes = object_sizes(objects, run)
    shards = {
        run.shard_key(name, shard): (name, shard)
        for name in run.arrays
        for shard in range(run.formats[name].num_shards)
    }
    for commit in commits:
        recorded = {record.key for record in commit.objects}
        for key in sorted(run.required_keys(commit.block) ^ recorded):
            wrong = "is recorded but not required" if key in recorded else "is required"
            reason = f"it {wrong} by the pinned metadata"
            reason += "" if key in recorded else " but not recorded"
            yield Problem(key, reason, run.run_id, commit.block)
        for record in commit.objects:
            reason = ""
            if record.key not in sizes:
                reason = "it is gone"
            elif sizes[record.key] != record.nbytes:
                reason = f"it has {sizes[record.key]} bytes, not {record.nbytes}"
            elif deep:
                reason = _read_and_check(
                    objects, run, record.key, record.crc32c, shards.get(record.key)
                )
            if reason:
                yield Problem(record.key, reason, run.run_id, commit.block)


def _read_and_check(
    objects: ObjectStore,
    run: RunRecord,
    key: str,
    checksum: str,
    shard: tuple[str, int] | None,
) -> str:
    try:
        data = objects.get(key)
    except FileNotFoundError:
        return "it is gone"
    if f"{crc32c(data):08x}" != checksum:
        return "its crc32c is not the recorded one"
    if shard is None:
        return ""
    name, number = shard
    form = run.formats[name]
    if form.plain:
        return check_shard(form, data, number) or ""
    from .zarr_store import decodes_with_zarr

    start, stop = form.rows_of(number)
    path, inner = run.paths[name], form.key(number)
    sound = decodes_with_zarr(run.documents, path, inner, data, start, stop)
    return "" if sound else "it does not decode"


def _check_published(objects: ObjectStore, run: RunRecord) -> Iterator[Problem]:
    for path in run.paths.values():
        key = f"{GROUP}/{path}/zarr.json"
        if _get(objects, key) != array_document(run, path):
            reason = "it is not the metadata that the run pinned"
            yield Problem(key, reason, run.run_id)


def _check_commit_files(
    objects: ObjectStore, run: RunRecord, commits: Sequence[CommitRecord]
) -> Iterator[Problem]:
    """Compare the commit records with the copies that the manifest holds."""
    try:
        originals = read_commits(objects, run, finished=False)
    except ManifestError as error:
        yield Problem(run.folder("commits"), str(error), run.run_id)
        return
    by_block = {commit.block: commit for commit in originals}
    for commit in commits:
        if by_block.get(commit.block) != commit:
            reason = "it is gone or differs from its copy in the manifest"
            key = run.commit_key(commit.block)
            yield Problem(key, reason, run.run_id, commit.block)


def _check_ids(
    objects: ObjectStore, run: RunRecord, commits: Sequence[CommitRecord]
) -> Iterator[Problem]:
    from .sample_table import decode_ids

    try:
        ids = decode_ids(objects.get(SAMPLES), SAMPLES)
    except (ManifestError, FileNotFoundError) as error:
        yield Problem(SAMPLES, str(error), run.run_id)
        return
    digests = [ids_digest(ids[commit.start : commit.stop]) for commit in commits]
    wrong = [
        c.block for c, d in zip(commits, digests, strict=True) if d != c.ids_sha256
    ]
    if wrong or len(ids) != run.layout.num_rows or len(set(ids)) != len(ids):
        reason = f"its ids are not those that were committed (blocks {wrong[:5]})"
        yield Problem(SAMPLES, reason, run.run_id)


def _get(objects: ObjectStore, key: str) -> bytes:
    try:
        return objects.get(key)
    except FileNotFoundError:
        return b""

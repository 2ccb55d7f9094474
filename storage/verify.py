"""Check a store against its commit records, and those against the pinned metadata."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchlens.errors import ManifestError

from .checksums import ids_digest
from .consolidate import (
    array_document,
    object_sizes,
    read_commits,
    read_samples_record,
    root_document,
)
from .manifest import CommitRecord, ObjectRecord
from .objects import ObjectStore
from .run_record import GROUP, ROOT_METADATA, SAMPLES, RunRecord
from .runs import KnownRun
from .shards import ShardDamage, encoded_bytes


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
            problems += _check_samples(objects, record, commits, deep)
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
                reason = _read_and_check(objects, run, record, shards.get(record.key))
            if reason:
                yield Problem(record.key, reason, run.run_id, commit.block)


def _read_and_check(
    objects: ObjectStore,
    run: RunRecord,
    record: ObjectRecord,
    shard: tuple[str, int] | None,
) -> str:
    try:
        data = objects.get(record.key)
        found = run.inspect(*shard, data) if shard else encoded_bytes(data)
    except FileNotFoundError:
        return "it is gone"
    except ShardDamage as damage:
        return str(damage)
    if f"{found.crc32c:08x}" != record.crc32c:
        return "its crc32c is not the recorded one"
    if found.content != record.content:
        return "it is sound, but not the object that was recorded"
    return ""


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


def _check_samples(
    objects: ObjectStore, run: RunRecord, commits: Sequence[CommitRecord], deep: bool
) -> Iterator[Problem]:
    """Compare the samples table with the manifest, and its ids with the commits."""
    from .sample_table import decode_ids

    data = _get(objects, SAMPLES)
    reason = ""
    try:
        record = read_samples_record(objects, run)
        if len(data) != record.nbytes:
            reason = f"it has {len(data)} bytes, not {record.nbytes}"
        elif deep and encoded_bytes(data).content != record.content:
            reason = "it is not the table that was recorded"
        elif deep:
            ids = decode_ids(data, SAMPLES)
            digests = [ids_digest(ids[c.start : c.stop]) for c in commits]
            if digests != [c.ids_sha256 for c in commits]:
                reason = "its ids are not those that were committed"
    except ManifestError as error:
        reason = str(error)
    if reason:
        yield Problem(SAMPLES, reason, run.run_id)


def _get(objects: ObjectStore, key: str) -> bytes:
    try:
        return objects.get(key)
    except FileNotFoundError:
        return b""

"""Commit records: what a finished block leaves behind, and the manifest of them all.

Whatever is read here may be damaged or foreign, so every field is checked before use
and every failure names the object.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchlens.errors import ManifestError

from .run_record import RunRecord, load


@dataclass(frozen=True, slots=True)
class ObjectRecord:
    """An object of a committed block: its key, size and checksums.

    Attributes:
        crc32c: Of the object's bytes.
        content: Tells it from any other sound object, see `shards.Encoded`.
    """

    key: str
    nbytes: int
    crc32c: str
    content: str

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON."""
        return {
            "key": self.key,
            "nbytes": self.nbytes,
            "crc32c": self.crc32c,
            "content": self.content,
        }


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """What a finished block leaves behind, written after all of its objects.

    Attributes:
        start: First row.
        stop: Row after the last.
        ids_sha256: Digest of the block's sample ids in order.
        objects: Every shard and the block's part of the samples table.
        failed: Rows that could not be computed; they hold the fill value.
        counters: Whatever the engine counted.
        batches: Which rows ran together, as the engine puts it.
        writer: Who wrote it: attempt, host, process, versions.
    """

    run_id: str
    block: int
    start: int
    stop: int
    ids_sha256: str
    objects: tuple[ObjectRecord, ...]
    failed: tuple[int, ...] = ()
    counters: Mapping[str, Any] = field(default_factory=dict)
    batches: Any = None
    seconds: float | None = None
    writer: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON."""
        return {
            "run_id": self.run_id,
            "block": self.block,
            "start": self.start,
            "stop": self.stop,
            "ids_sha256": self.ids_sha256,
            "objects": [record.to_json() for record in self.objects],
            "failed": list(self.failed),
            "counters": dict(self.counters),
            "batches": self.batches,
            "seconds": self.seconds,
            "writer": dict(self.writer),
        }


def parse_commit(data: bytes, run: RunRecord, block: int, where: str) -> CommitRecord:
    """Parse a commit record and check it against its run.

    Raises:
        ManifestError: If it is damaged, or of another run or block.
    """
    return read_commit(load(data, where), run, block, where)


def read_object(body: Any, where: str) -> ObjectRecord:
    """Check an object record's JSON and return it."""
    try:
        return ObjectRecord(
            str(body["key"]),
            int(body["nbytes"]),
            str(body["crc32c"]),
            str(body["content"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ManifestError(f"{where} garbles an object: {error!r}.") from error


def read_commit(
    body: Mapping[str, Any], run: RunRecord, block: int, where: str
) -> CommitRecord:
    """Check a commit record's JSON against its run and return it."""
    try:
        record = CommitRecord(
            run_id=str(body["run_id"]),
            block=int(body["block"]),
            start=int(body["start"]),
            stop=int(body["stop"]),
            ids_sha256=str(body["ids_sha256"]),
            objects=tuple(read_object(entry, where) for entry in body["objects"]),
            failed=tuple(int(row) for row in body["failed"]),
            counters=dict(body["counters"]),
            batches=body["batches"],
            seconds=body["seconds"],
            writer=dict(body["writer"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ManifestError(f"{where} lacks or garbles a field: {error!r}.") from error
    found = (record.run_id, record.block, record.start, record.stop)
    if found != (run.run_id, block, *run.layout.span(block)):
        raise ManifestError(
            f"{where} is the record of run {record.run_id[:12]}, block {record.block}, "
            f"rows {record.start} to {record.stop}; that is not its place."
        )
    return record

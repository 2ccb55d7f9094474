"""One block on its way into the store: whole shards out, then the commit record."""

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from torchlens.errors import DataError, ManifestError, StoreError

from .checksums import ids_digest
from .dtypes import as_carrier, carrier
from .manifest import CommitRecord, ObjectRecord, parse_commit
from .run_record import dump
from .run_spec import as_json
from .shards import (
    Encoded,
    ShardDamage,
    empty_rows_of,
    encode_shard,
    encoded_bytes,
    is_fill,
)

if TYPE_CHECKING:
    from .writer import StoreWriter


class BlockWriter:
    """Takes the rows of one block, layer by layer, and commits them.

    One thread at a time; several blocks may be written at once by as many threads.
    Rows are on disk or copied when `write` returns, so buffers may be reused.
    """

    def __init__(self, writer: "StoreWriter", block: int) -> None:
        self._writer = writer
        self._run = writer.run
        self._objects = writer.objects
        self.block = block
        self.start, self.stop = self._run.layout.span(block)
        self._next = dict.fromkeys(self._run.arrays, self.start)
        self._buffers: dict[str, NDArray[Any]] = {}
        self._records: list[ObjectRecord] = []
        self._lost: set[int] = set()
        self._began = time.monotonic()

    def write(
        self, name: str, rows: NDArray[Any], start_row: int | None = None
    ) -> None:
        """Write rows of one layer; whole shards leave at once, the rest is copied.

        Args:
            name: The layer.
            rows: Values of shape [n, *row_shape], of the layer's dtype; bfloat16 as
                uint16 bit patterns.  The whole block or any pieces of it in order.
            start_row: Dataset index of the first row, to be checked; None continues
                where the last piece ended.

        Raises:
            DataError: If shape, dtype or place do not fit.
            StoreError: If the place cannot be written.
        """
        rows = self._checked(name, rows, start_row)
        shard_rows = self._run.formats[name].shard_rows
        taken = 0
        while taken < len(rows):
            row = self._next[name]
            shard = row // shard_rows
            begin = shard * shard_rows
            end = min(begin + shard_rows, self.stop)
            piece = rows[taken : taken + end - row]
            if len(piece) < end - begin:
                buffer = self._buffer(name, shard_rows)
                buffer[row - begin : row - begin + len(piece)] = piece
                whole = buffer[: end - begin]
            else:
                whole = piece
            self._next[name] = row + len(piece)
            taken += len(piece)
            if self._next[name] == end:
                self._put_shard(name, shard, whole)

    def commit(
        self,
        ids: Sequence[str],
        metadata: Mapping[str, Sequence[Any]] | None = None,
        failed: Sequence[int] = (),
        counters: Mapping[str, Any] | None = None,
        batches: Any = None,
        seconds: float | None = None,
    ) -> bool:
        """Declare the block complete; from here on its rows exist.

        Args:
            ids: One id per row of the block.
            metadata: Column name to one value per row.
            failed: Dataset indices of rows that hold no value, only fill.
            counters: Numbers worth keeping, as JSON.
            batches: How the rows were batched, as JSON.
            seconds: What the block took; None measures from the first call.

        Returns:
            False if another writer committed the same block first, which is fine.

        Raises:
            DataError: If ids or metadata do not fit the block, or differ from those
                that another writer or run stored for the same rows.
            StoreError: If a layer is incomplete, or the place cannot be written.
        """
        ids = self._checked_ids(ids)
        metadata = metadata or {}
        self._check_columns(metadata)
        outside = [row for row in failed if not self.start <= row < self.stop]
        if outside:
            raise DataError(f"Failed rows {outside} are not in block {self.block}.")
        for name, row in self._next.items():
            if row != self.stop:
                raise StoreError(
                    f"Block {self.block} cannot be committed: of layer {name!r} "
                    f"{row - self.start} rows of {self.stop - self.start} are written."
                )
        self._writer.check_stored_ids(self.start, ids, metadata)
        self._put_samples(ids, metadata)
        if seconds is None:
            seconds = time.monotonic() - self._began
        record = CommitRecord(
            run_id=self._run.run_id,
            block=self.block,
            start=self.start,
            stop=self.stop,
            ids_sha256=ids_digest(ids),
            objects=tuple(sorted(self._records, key=lambda record: record.key)),
            failed=tuple(sorted({int(row) for row in failed} | self._lost)),
            counters=as_json(counters or {}, "counters"),
            batches=as_json({"batches": batches}, "batches")["batches"],
            seconds=round(float(seconds), 6),
            writer=self._writer.signature,
        )
        return self._put_record(record)

    def _checked(
        self, name: str, rows: NDArray[Any], start_row: int | None
    ) -> NDArray[Any]:
        spec = self._run.arrays.get(name)
        if spec is None:
            raise DataError(
                f"The run stores no layer {name!r}; it stores {sorted(self._next)}."
            )
        rows = np.asarray(rows)
        if rows.shape[1:] != spec.row_shape or not rows.ndim:
            raise DataError(
                f"Rows of layer {name!r} have shape [n, {_sizes(spec.row_shape)}]; an "
                f"array of shape {list(rows.shape)} came."
            )
        row = self._next[name]
        if start_row is not None and start_row != row:
            raise DataError(
                f"Rows of layer {name!r} must come in order: row {row} is next, row "
                f"{start_row} came."
            )
        if row + len(rows) > self.stop:
            raise DataError(
                f"Block {self.block} holds rows {self.start} to {self.stop - 1}; rows "
                f"up to {row + len(rows) - 1} came for layer {name!r}."
            )
        return as_carrier(rows, spec.dtype)

    def _buffer(self, name: str, shard_rows: int) -> NDArray[Any]:
        buffer = self._buffers.get(name)
        if buffer is None:
            spec = self._run.arrays[name]
            rows = min(shard_rows, self.stop - self.start)
            buffer = np.empty((rows, *spec.row_shape), carrier(spec.dtype))
            self._buffers[name] = buffer
        return buffer

    def _put_shard(self, name: str, shard: int, rows: NDArray[Any]) -> None:
        form = self._run.formats[name]
        key = self._run.shard_key(name, shard)
        if form.plain:
            encoded = encode_shard(form, rows)
        else:
            from .zarr_store import encode_with_zarr

            path = self._run.paths[name]
            start, _ = form.rows_of(shard)
            encoded = encoded_bytes(
                encode_with_zarr(self._run.documents, path, start, rows)
            )
        if not self._objects.put_new(key, encoded.parts):
            encoded = self._adopt(name, shard, key, encoded, rows)
        self._record(key, encoded)

    def _adopt(
        self, name: str, shard: int, key: str, ours: Encoded, rows: NDArray[Any]
    ) -> Encoded:
        """Take over the object of a dead or rival writer; replace it if it is torn."""
        form = self._run.formats[name]
        data = self._objects.get(key)
        try:
            theirs = self._run.inspect(name, shard, data)
        except ShardDamage:
            self._objects.replace(key, ours.parts)
            return ours
        if form.plain and theirs.content != ours.content:
            # A row the other could not compute stays empty: say so in the record.
            lost = empty_rows_of(form, data, shard) & ~is_fill(form, rows)
            start, _ = form.rows_of(shard)
            self._lost |= {start + int(row) for row in np.flatnonzero(lost)}
        return theirs

    def _put_samples(
        self, ids: Sequence[str], metadata: Mapping[str, Sequence[Any]]
    ) -> None:
        from .sample_table import decode_ids, encode_part

        key = self._run.samples_key(self.block)
        data = encode_part(self.start, ids, metadata)
        if not self._objects.put_new(key, [data]):
            theirs = self._objects.get(key)
            try:
                self._check_same_ids(decode_ids(theirs, key), ids)
                data = theirs
            except ManifestError:
                self._objects.replace(key, [data])
        self._record(key, encoded_bytes(data))

    def _put_record(self, record: CommitRecord) -> bool:
        key = self._run.commit_key(self.block)
        data = dump(record.to_json())
        if self._objects.put_new(key, [data]):
            return True
        theirs = self._objects.get(key)
        if not theirs:
            self._objects.replace(key, [data])
            return True
        other = parse_commit(theirs, self._run, self.block, key)
        if other.ids_sha256 != record.ids_sha256:
            raise self._other_ids()
        return other.writer.get("attempt") == record.writer.get("attempt")

    def _record(self, key: str, encoded: Encoded) -> None:
        checksum = f"{encoded.crc32c:08x}"
        record = ObjectRecord(key, encoded.nbytes, checksum, encoded.content)
        self._records.append(record)

    def _checked_ids(self, ids: Sequence[str]) -> list[str]:
        ids = list(ids)
        rows = self.stop - self.start
        if len(ids) != rows:
            raise DataError(
                f"Block {self.block} has {rows} rows; {len(ids)} ids came with it."
            )
        wrong = [value for value in ids if not isinstance(value, str)]
        if wrong:
            raise DataError(f"Sample ids must be text; {wrong[0]!r} came.")
        seen: set[str] = set()
        for value in ids:
            if value in seen:
                raise DataError(
                    f"The sample id {value!r} comes twice in rows {self.start} to "
                    f"{self.stop - 1}. Ids must be unique."
                )
            seen.add(value)
        return ids

    def _check_columns(self, metadata: Mapping[str, Sequence[Any]]) -> None:
        rows = self.stop - self.start
        for name, values in metadata.items():
            if len(values) != rows:
                raise DataError(
                    f"The metadata column {name!r} has {len(values)} values for the "
                    f"{rows} rows of block {self.block}."
                )

    def _check_same_ids(self, theirs: Sequence[str], ours: Sequence[str]) -> None:
        if list(theirs) != list(ours):
            raise self._other_ids()

    def _other_ids(self) -> DataError:
        return DataError(
            f"Another writer stored other sample ids for rows {self.start} to "
            f"{self.stop - 1}. The dataset does not come in the same order each time: "
            "give it a fixed order, then extract again with overwrite=True."
        )


def _sizes(shape: Sequence[int]) -> str:
    return ", ".join(map(str, shape))

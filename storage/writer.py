"""StoreWriter: a run being written, block by block, by any number of processes."""

import os
import platform
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from uuid import uuid4

import numpy as np

from torchlens.errors import DataError

from .block_writer import BlockWriter
from .consolidate import committed_blocks, consolidate
from .layout import Layout
from .objects import ObjectStore
from .run_record import SAMPLES, RunRecord
from .run_spec import ArraySpec

if TYPE_CHECKING:
    from .store import Store


class StoreWriter:
    """Writes the blocks of one run; made by `open_run`.

    Safe to share between threads that write different blocks.  Closing it keeps what
    is committed; nothing else needs keeping.

    Attributes:
        run: The run's pinned record; its layout and metadata win over any default.
        objects: Where the store lies.
        signature: What each commit record says about its writer.
    """

    def __init__(
        self,
        objects: ObjectStore,
        run: RunRecord,
        *,
        writer: Mapping[str, Any] | None = None,
    ) -> None:
        self.run = run
        self.objects = objects
        self.signature = {
            "attempt": uuid4().hex,
            "host": platform.node(),
            "pid": os.getpid(),
            "numpy": np.__version__,
            **(writer or {}),
        }
        self._lock = threading.Lock()
        self._table: tuple[list[str], list[str]] | None = None
        self._joins_finished_store = bool(objects.size(SAMPLES))

    @property
    def url(self) -> str:
        """Where the store lies."""
        return self.objects.url

    @property
    def run_id(self) -> str:
        """The run's identity, the digest of its run.json."""
        return self.run.run_id

    @property
    def arrays(self) -> Mapping[str, ArraySpec]:
        """The layers this run stores: those asked for and not stored already."""
        return self.run.arrays

    @property
    def layout(self) -> Layout:
        """How the rows are cut."""
        return self.run.layout

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the run."""
        return self.run.layout.num_blocks

    def span(self, block: int) -> tuple[int, int]:
        """Return the rows [start, stop) of a block."""
        return self.run.layout.span(block)

    def committed(self) -> frozenset[int]:
        """Return the committed blocks, by one listing and no reads."""
        return committed_blocks(self.objects, self.run)

    def missing(self) -> tuple[int, ...]:
        """Return the blocks still to be written, in order."""
        committed = self.committed()
        return tuple(b for b in range(self.num_blocks) if b not in committed)

    def block(self, block: int) -> BlockWriter:
        """Begin (or begin again) a block."""
        return BlockWriter(self, block)

    def consolidate(self) -> bool:
        """Publish the run if every block is committed; any finisher may call this.

        Returns:
            Whether the run is published.

        Raises:
            ManifestError: If the records are not what the pinned metadata requires.
            StoreError: If an object is gone or has another size than recorded.
            DataError: If a sample id occurs twice.
        """
        return consolidate(self.objects, self.run)

    def open_store(self, *, allow_partial: bool = False) -> "Store":
        """Open what is written so far for reading, wherever it lies."""
        from .opening import open_store

        return open_store(self.objects, allow_partial=allow_partial)

    def close(self) -> None:
        """Forget the run; what is committed stays."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def check_stored_ids(
        self, start: int, ids: Sequence[str], metadata: Mapping[str, Sequence[Any]]
    ) -> None:
        """Raise DataError unless rows fit the samples table of a finished store."""
        if not self._joins_finished_store:
            return
        stored, columns = self._stored_table()
        if stored[start : start + len(ids)] != list(ids):
            raise DataError(
                f"Rows {start} to {start + len(ids) - 1} have other sample ids than "
                f"the store at {self.url} has. Layers are added for the same dataset "
                "in the same order; use another place for another dataset."
            )
        new = sorted(set(metadata) - set(columns))
        if new:
            raise DataError(
                f"The metadata columns {new} are not in the samples table of the "
                f"store at {self.url}, which is never rewritten. Leave them out."
            )

    def _stored_table(self) -> tuple[list[str], list[str]]:
        with self._lock:
            if self._table is None:
                from .sample_table import column_names, decode_ids

                data = self.objects.get(SAMPLES)
                where = f"{self.url}/{SAMPLES}"
                self._table = decode_ids(data, where), column_names(data, where)
            return self._table

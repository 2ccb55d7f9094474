"""Store: what a place holds, read-only: layers, ids, metadata, provenance."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from torchlens.errors import DataError

from .consolidate import read_commits
from .layer_reader import LayerReader
from .manifest import CommitRecord
from .objects import ObjectStore
from .run_record import GROUP, SAMPLES, VERSION
from .runs import KnownRun
from .verify import VerifyReport, verify_runs

if TYPE_CHECKING:
    import pandas as pd


class Store:
    """The rows of a store as they were when it was opened; made by `open_store`.

    Indexing gives a layer: `store["layer4"][:10]`.

    Attributes:
        objects: Where the store lies.
        complete: Whether every run that was begun there is finished.
    """

    def __init__(
        self, objects: ObjectStore, runs: Sequence[KnownRun], *, allow_partial: bool
    ) -> None:
        self.objects = objects
        self.complete = all(run.finished for run in runs)
        self._all_runs = tuple(runs)
        self._partial = allow_partial
        self._runs = [run for run in runs if run.finished or allow_partial]
        self._by_layer = {name: run for run in self._runs for name in run.record.arrays}
        self._commits = {
            run.record.run_id: read_commits(objects, run.record, finished=run.finished)
            for run in self._runs
        }
        self._readers: dict[str, LayerReader] = {}
        self._ids: tuple[str, ...] | None = None
        self._row_of_id: dict[str, int] | None = None

    @property
    def url(self) -> str:
        """Where the store lies."""
        return self.objects.url

    @property
    def zarr_path(self) -> str:
        """What plain zarr, dask or xarray open, once the store is finished."""
        return f"{self.url}/{GROUP}"

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the layers, in the order they were asked for."""
        return tuple(self._by_layer)

    @property
    def num_rows(self) -> int:
        """Rows of the dataset, committed or not."""
        return self._runs[0].record.layout.num_rows

    @property
    def committed_rows(self) -> int:
        """Rows of the dataset that the store's first run has committed."""
        return sum(stop - start for start, stop in self._spans(self._runs[0]))

    @property
    def commits(self) -> tuple[CommitRecord, ...]:
        """The commit records of all runs shown."""
        return tuple(c for commits in self._commits.values() for c in commits)

    @property
    def failed(self) -> tuple[int, ...]:
        """Dataset indices of rows that could not be read; they hold fill only."""
        return tuple(sorted({row for commit in self.commits for row in commit.failed}))

    @property
    def missing(self) -> dict[str, tuple[int, ...]]:
        """Dataset indices of rows where a layer holds only fill, by layer.

        The model took a path without that layer for them.
        """
        found: dict[str, list[int]] = {}
        for commit in self.commits:
            batches = commit.batches if isinstance(commit.batches, dict) else {}
            for name, rows in batches.get("missing", {}).items():
                found.setdefault(name, []).extend(rows)
        return {name: tuple(sorted(rows)) for name, rows in found.items() if rows}

    @property
    def counters(self) -> dict[str, dict[str, Any]]:
        """What was counted of each layer's values, such as NaN, with sample ids.

        Layers without anything to report are left out.
        """
        total: dict[str, dict[str, Any]] = {}
        for commit in self.commits:
            for layer, counts in commit.counters.items():
                known = total.setdefault(layer, {})
                for name, value in counts.items():
                    known[name] = known[name] + value if name in known else value
        return total

    @property
    def ids(self) -> tuple[str, ...]:
        """Sample ids of the committed rows, in dataset order."""
        if self._ids is None:
            from .sample_table import decode_ids

            where = f"{self.url}/{SAMPLES}"
            self._ids = tuple(
                value for part in self._samples() for value in decode_ids(part, where)
            )
        return self._ids

    @property
    def metadata(self) -> "pd.DataFrame":
        """The samples table: row, id and every metadata column."""
        return self.to_pandas()

    def to_pandas(self) -> "pd.DataFrame":
        """Return the samples table of the committed rows."""
        import pandas as pd

        from .sample_table import to_frame

        parts = self._samples()
        if not parts:
            return pd.DataFrame({"sample": [], "id": []})
        return to_frame(parts, f"{self.url}/{SAMPLES}")

    def __getitem__(self, layer: str) -> LayerReader:
        reader = self._readers.get(layer)
        if reader is None:
            run = self._by_layer.get(layer)
            if run is None:
                raise KeyError(
                    f"The store at {self.url} has no layer {layer!r}; it has "
                    f"{', '.join(self.layers)}."
                )
            spans = self._spans(run)
            reader = LayerReader(self, run.record, layer, spans)
            self._readers[layer] = reader
        return reader

    def __contains__(self, layer: object) -> bool:
        return layer in self._by_layer

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_layer)

    def __len__(self) -> int:
        """Return the number of layers, as a mapping of them would."""
        return len(self._by_layer)

    def __repr__(self) -> str:
        state = "" if self.complete else ", unfinished"
        return (
            f"<Store {self.url!r}: {len(self.layers)} layers, {self.committed_rows} of "
            f"{self.num_rows} rows{state}>"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.objects, self._all_runs, self._partial)

    def rows_of(self, ids: Sequence[str]) -> NDArray[np.int64]:
        """Return the dataset index of each sample id.

        Raises:
            DataError: If an id is unknown.
        """
        if isinstance(ids, str):
            raise DataError(f"ids must be a list of sample ids; the text {ids!r} came.")
        if self._row_of_id is None:
            rows = self._base_rows()
            self._row_of_id = dict(zip(self.ids, rows.tolist(), strict=True))
        unknown = [value for value in ids if value not in self._row_of_id]
        if unknown:
            raise DataError(
                f"The store at {self.url} has no sample {unknown[0]!r}"
                + (f" (nor {len(unknown) - 1} others asked for)" * (len(unknown) > 1))
                + f". Its ids look like {', '.join(map(repr, self.ids[:3]))}."
            )
        return np.array([self._row_of_id[value] for value in ids], np.int64)

    def ids_of_rows(self, rows: NDArray[np.int64]) -> tuple[str, ...]:
        """Return the sample id of each dataset index."""
        base = self._base_rows()
        ids = self.ids
        if len(base) == len(rows) and (base == rows).all():
            return ids
        return tuple(ids[i] for i in np.searchsorted(base, rows).tolist())

    def info(self) -> dict[str, Any]:
        """Return what the store holds and where it came from, as JSON would hold it."""
        return {
            "url": self.url,
            "zarr_path": self.zarr_path,
            "format_version": VERSION,
            "complete": self.complete,
            "num_rows": self.num_rows,
            "committed_rows": self.committed_rows,
            "failed_rows": list(self.failed),
            "missing_rows": {name: list(rows) for name, rows in self.missing.items()},
            "layers": {
                name: {
                    "shape": list(self[name].shape),
                    "dtype": self[name].dtype_name,
                    "bytes": self[name].nbytes,
                    "chunk_rows": run.record.layout.arrays[name][0],
                    "shard_rows": run.record.layout.arrays[name][1],
                    "path": f"{GROUP}/{run.record.paths[name]}",
                    "identity": run.record.arrays[name].identity,
                    "run_id": run.record.run_id,
                }
                for name, run in self._by_layer.items()
            },
            "runs": [
                {
                    "run_id": run.record.run_id,
                    "finished": run.finished,
                    "num_blocks": run.record.layout.num_blocks,
                    "committed_blocks": len(self._commits[run.record.run_id]),
                    "block_rows": run.record.layout.block_rows,
                    "identity": run.record.identity,
                    "provenance": run.record.provenance,
                    "versions": run.record.versions,
                }
                for run in self._runs
            ],
        }

    def verify(self, *, deep: bool = False) -> VerifyReport:
        """Compare the store with its commit records.

        Args:
            deep: Also read every object, check its crc32c and decode it.
        """
        return verify_runs(self.objects, self._runs, deep=deep)

    def _spans(self, run: KnownRun) -> list[tuple[int, int]]:
        spans: list[tuple[int, int]] = []
        for commit in self._commits[run.record.run_id]:
            if spans and spans[-1][1] == commit.start:
                spans[-1] = spans[-1][0], commit.stop
            else:
                spans.append((commit.start, commit.stop))
        return spans

    def _base_rows(self) -> NDArray[np.int64]:
        """Return the dataset index of each entry of `ids`."""
        spans = self._spans(self._runs[0])
        pieces = [np.arange(start, stop, dtype=np.int64) for start, stop in spans]
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)

    def _samples(self) -> list[bytes]:
        first = self._runs[0]
        if first.finished:
            return [self.objects.get(SAMPLES)]
        commits = self._commits[first.record.run_id]
        return [self.objects.get(first.record.samples_key(c.block)) for c in commits]


def _reopen(
    objects: ObjectStore, runs: Sequence[KnownRun], allow_partial: bool
) -> Store:
    """Unpickle: file descriptors and caches stay in their process."""
    return Store(objects, runs, allow_partial=allow_partial)

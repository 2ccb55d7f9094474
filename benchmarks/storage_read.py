"""Time to read a layer back, every chunk checked, against a raw memory map.

Two questions, page cache warm: a whole layer in order in pieces of 64 MiB, and 1 MiB
chunks in random order, which is what a shuffling trainer reads.  The map copies the
same rows out.  Store and map are opened anew each time.  Bars: 1.5 in order, 1.0 for
random chunks.

Run:  python benchmarks/storage_read.py [--folder DIR] [--rounds N] [--mib N]
"""

import argparse
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from torchlens.storage import ArraySpec, LayerReader, RunSpec, open_run, open_store

WIDTH = 4096
DTYPE = "float16"


class Copies:
    """The same rows as a store and as one raw file, and ways to read them."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        num_rows = num_bytes // (WIDTH * np.dtype(DTYPE).itemsize)
        values = np.random.default_rng(0).standard_normal((num_rows, WIDTH), dtype="f4")
        rows = np.maximum(values, 0).astype(DTYPE)
        self._folder = folder
        self._shape = rows.shape
        self._step = (64 << 20) // rows[0].nbytes
        spec = RunSpec(
            num_rows,
            {"layer": ArraySpec((WIDTH,), DTYPE)},
            block_rows=min(num_rows, 8192),
        )
        with open_run(folder / "store", spec) as writer:
            for number in writer.missing():
                start, stop = writer.span(number)
                block = writer.block(number)
                block.write("layer", rows[start:stop])
                block.commit([str(i) for i in range(start, stop)])
            writer.consolidate()
        rows.tofile(folder / "rows.bin")
        reader = self.store()
        self._chunk_rows = reader.chunk_rows
        self._order = np.random.default_rng(1).permutation(reader.num_chunks).tolist()

    def store(self) -> LayerReader:
        """Open the store's layer."""
        return open_store(self._folder / "store")["layer"]

    def map(self) -> NDArray[np.generic]:
        """Open the raw file."""
        path = self._folder / "rows.bin"
        return np.memmap(path, DTYPE, "r", shape=self._shape)

    def zarr(self) -> Any:
        """Open the store's layer with plain zarr."""
        path = self._folder / "store" / "data.zarr"
        return zarr.open_group(path, mode="r")["layer"]

    def in_order(self, source: Any) -> None:
        """Read everything in pieces."""
        for start in range(0, self._shape[0], self._step):
            np.array(source[start : start + self._step])[::64].max()

    def store_in_order(self) -> None:
        """Read everything in pieces, into fresh arrays."""
        reader = self.store()
        for start in range(0, self._shape[0], self._step):
            reader[start : start + self._step][::64].max()

    def chunks_in_order(self) -> None:
        """Read everything chunk by chunk."""
        for _, rows in self.store().iter_chunks():
            rows[::64].max()

    def at_random(self, source: Any) -> None:
        """Read chunks in random order into fresh arrays."""
        for chunk in self._order:
            start = chunk * self._chunk_rows
            np.array(source[start : start + self._chunk_rows])[::64].max()

    def chunks_at_random(self) -> None:
        """Read chunks in random order into the reused buffer."""
        for _, rows in self.store().iter_chunks(self._order):
            rows[::64].max()


def report(title: str, ways: dict[str, Callable[[], object]], rounds: int) -> None:
    """Time the ways in turn and print a line for each."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, read in ways.items():
            cpu, wall = time.process_time(), time.perf_counter()
            read()
            spent = time.process_time() - cpu, time.perf_counter() - wall
            if number:  # the first round warms the page cache
                times[name].append(spent)
    base = times["memmap"]
    for name, measured in times.items():
        cpu = statistics.median(
            a[0] / b[0] for a, b in zip(measured, base, strict=True)
        )
        wall = statistics.median(
            a[1] / b[1] for a, b in zip(measured, base, strict=True)
        )
        print(f"| {title} | {name} | {cpu:.2f} | {wall:.2f} |")


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=256)
    args = parser.parse_args()
    print(
        f"zarr {zarr.__version__}, numpy {np.__version__}, Python "
        f"{platform.python_version()}, {platform.processor() or platform.machine()}; "
        f"{args.mib} MiB of {DTYPE}, median of {args.rounds} interleaved rounds"
    )
    print("| read | way | CPU / memmap | wall / memmap |")
    print("|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        copies = Copies(Path(folder), args.mib << 20)
        in_order: dict[str, Callable[[], object]] = {
            "memmap": lambda: copies.in_order(copies.map()),
            "torchlens slices": copies.store_in_order,
            "torchlens iter_chunks": copies.chunks_in_order,
            "zarr itself": lambda: copies.in_order(copies.zarr()),
        }
        at_random: dict[str, Callable[[], object]] = {
            "memmap": lambda: copies.at_random(copies.map()),
            "torchlens iter_chunks": copies.chunks_at_random,
            "torchlens slices": lambda: copies.at_random(copies.store()),
            "zarr itself": lambda: copies.at_random(copies.zarr()),
        }
        report("in order", in_order, args.rounds)
        report("random chunks", at_random, args.rounds)


if __name__ == "__main__":
    main()

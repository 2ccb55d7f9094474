"""CPU and wall time to write a block as checksummed shards, against raw file writes.

Both write the same bytes, interleaved, to the folder given (default: memory-backed if
there is one, so that software is measured and not a disk).  Bar: 2.6 with zarr 3.1.6.

Run:  python benchmarks/storage_write.py [--folder DIR] [--rounds N] [--mib N]
"""

import argparse
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import zarr
from numpy.typing import NDArray

from torchlens.storage import ArraySpec, RunSpec, open_run

DTYPES = ("float16", "float32")
WIDTH = 4096
SHARD_BYTES = 64 << 20


def activations(rows: int, dtype: str) -> NDArray[np.generic]:
    """Return rows like those after a ReLU: half zeros."""
    values = np.random.default_rng(0).standard_normal((rows, WIDTH), dtype="f4")
    return np.maximum(values, 0).astype(dtype)


def write_raw(folder: Path, rows: NDArray[np.generic]) -> None:
    """Write one file per 64 MiB, as a hand-written loop would."""
    folder.mkdir()
    step = SHARD_BYTES // rows[0].nbytes
    for start in range(0, len(rows), step):
        rows[start : start + step].tofile(folder / f"{start}.bin")


def write_memmap(folder: Path, rows: NDArray[np.generic]) -> None:
    """Fill one preallocated memory map."""
    folder.mkdir()
    out = np.memmap(folder / "rows.bin", rows.dtype, "w+", shape=rows.shape)
    out[:] = rows


def write_store(folder: Path, rows: NDArray[np.generic]) -> None:
    """Write and commit one block of a store."""
    spec = RunSpec(
        num_rows=len(rows),
        arrays={"layer": ArraySpec((WIDTH,), rows.dtype.name)},
        block_rows=len(rows),
    )
    with open_run(folder, spec) as writer:
        block = writer.block(0)
        block.write("layer", rows)
        block.commit([str(i) for i in range(len(rows))])


def write_zarr(folder: Path, rows: NDArray[np.generic]) -> None:
    """Let zarr write the same shards itself."""
    row_bytes = rows[0].nbytes
    array = zarr.create_array(
        folder,
        shape=rows.shape,
        dtype=rows.dtype,
        chunks=((1 << 20) // row_bytes, WIDTH),
        shards=(SHARD_BYTES // row_bytes, WIDTH),
        compressors=[zarr.codecs.Crc32cCodec()],
        fill_value=float("nan"),
        config={"write_empty_chunks": True},
    )
    array[:] = rows


WRITERS: dict[str, Callable[[Path, NDArray[np.generic]], None]] = {
    "raw files": write_raw,
    "numpy memmap": write_memmap,
    "zarr itself": write_zarr,
    "torchlens store": write_store,
}


def measure(
    folder: Path, rows: NDArray[np.generic], rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Return (cpu, wall) seconds of every writer in every round."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in WRITERS}
    for number in range(rounds + 1):
        for name, write in WRITERS.items():
            target = folder / name.replace(" ", "-")
            cpu, wall = time.process_time(), time.perf_counter()
            write(target, rows)
            spent = time.process_time() - cpu, time.perf_counter() - wall
            shutil.rmtree(target)
            if number:  # the first round warms imports and pages
                times[name].append(spent)
    return times


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=256)
    args = parser.parse_args()
    shared_memory = Path("/dev/shm")
    parent = args.folder or (shared_memory if shared_memory.is_dir() else None)
    print(
        f"zarr {zarr.__version__}, numpy {np.__version__}, Python "
        f"{platform.python_version()}, {platform.processor() or platform.machine()}; "
        f"{args.mib} MiB a block, median of {args.rounds} interleaved rounds"
    )
    print("| dtype | writer | CPU / raw | wall / raw | CPU s per GB |")
    print("|---|---|---|---|---|")
    for dtype in DTYPES:
        rows = activations(
            (args.mib << 20) // (WIDTH * np.dtype(dtype).itemsize), dtype
        )
        with tempfile.TemporaryDirectory(dir=parent) as folder:
            times = measure(Path(folder), rows, args.rounds)
        raw = times["raw files"]
        for name, spent in times.items():
            cpu = [a[0] / b[0] for a, b in zip(spent, raw, strict=True)]
            wall = [a[1] / b[1] for a, b in zip(spent, raw, strict=True)]
            per_gb = statistics.median(a[0] for a in spent) / rows.nbytes * 1e9
            print(
                f"| {dtype} | {name} | {statistics.median(cpu):.2f} | "
                f"{statistics.median(wall):.2f} | {per_gb:.2f} |"
            )


if __name__ == "__main__":
    main()

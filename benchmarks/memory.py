"""Peak memory of an extraction of n rows and of 100 n: it must not grow.

Each size runs in a process of its own; the rows are made when they are asked for, so
that only what the engine holds can grow.  Bar: within 5 %.

    python benchmarks/memory.py [--rows N] [--times N]
"""

import argparse
import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

BAR = 1.05
WIDTH = 4096


class Generated(Dataset[Any]):
    """Rows that exist only while they are read."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> Tensor:
        return torch.full((64,), float(row % 97))


def run(num_rows: int, block_rows: int) -> None:
    """Extract and print the peak resident bytes of this process."""
    from torchlens.extract import extract_dataset

    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 64))
    with tempfile.TemporaryDirectory() as folder:
        extract_dataset(
            model,
            Generated(num_rows),
            ["0", "1", "2"],
            output_dir=f"{folder}/store",
            batch_size=64,
            block_rows=block_rows,
            progress=False,
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps(peak))


def main() -> None:
    """Print the peaks and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--block-rows", type=int, default=512)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        run(arguments.rows, arguments.block_rows)
        return
    sizes = (arguments.rows, arguments.rows * arguments.times)
    peaks = [_measure(size, arguments.block_rows) for size in sizes]
    print(
        f"{platform.machine()}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    )
    for size, peak in zip(sizes, peaks, strict=True):
        stored = size * (2 * WIDTH + 64) * 4
        print(
            f"{size:8} rows {stored / 1e6:10.0f} MB stored  peak {peak / 1e6:8.1f} MB"
        )
    print(f"ratio {peaks[1] / peaks[0]:.3f}, bar {BAR}")


def _measure(num_rows: int, block_rows: int) -> int:
    command = [sys.executable, __file__, "--child", "--rows", str(num_rows)]
    command += ["--block-rows", str(block_rows)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    peak: int = json.loads(output)
    return peak


if __name__ == "__main__":
    main()

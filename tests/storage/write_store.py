"""A small extraction without a model: run as a script by tests that kill it.

Rows depend on their index alone, so every attempt, in any process, makes the same ones.
"""

import argparse
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchlens.storage import ArraySpec, RunSpec, StoreWriter, open_run
from torchlens.storage.sample_table import encode_part

NUM_ROWS = 150
ARRAYS = {
    "conv": ArraySpec((4, 3), "float32", {"site": "conv.output"}),
    "fc[0]": ArraySpec((8,), "float16", {"site": "fc.output"}),
}


def make_spec(**changes: Any) -> RunSpec:
    """Return the specification, with some fields changed."""
    fields: dict[str, Any] = {
        "num_rows": NUM_ROWS,
        "arrays": ARRAYS,
        "identity": {"model": {"weights": "abc", "layers": 3}, "dataset": "numbers"},
        "provenance": {"note": "a test"},
        "block_rows": 8,
        "batch_size": 4,
    }
    return RunSpec(**(fields | changes))


def make_rows(name: str, start: int, stop: int) -> NDArray[Any]:
    """Return the rows [start, stop) of a layer of `ARRAYS`."""
    spec = ARRAYS[name]
    size = int(np.prod(spec.row_shape))
    index = np.arange(start, stop, dtype="float64")[:, None]
    values = np.sin(index * (1.5 + len(name)) + np.arange(size))
    return values.reshape(-1, *spec.row_shape).astype(spec.dtype)


def make_ids(start: int, stop: int) -> list[str]:
    """Return the sample ids of rows [start, stop)."""
    return [f"sample-{row:04d}" for row in range(start, stop)]


def write_block(writer: StoreWriter, block: int, pause: float = 0.0) -> bool:
    """Write and commit one block, in pieces of three rows."""
    start, stop = writer.span(block)
    target = writer.block(block)
    for name in writer.arrays:
        for row in range(start, stop, 3):
            target.write(name, make_rows(name, row, min(row + 3, stop)), row)
            time.sleep(pause)
    labels = [row % 7 for row in range(start, stop)]
    return target.commit(make_ids(start, stop), {"label": labels}, seconds=1.0)


def write_all(writer: StoreWriter, pause: float = 0.0) -> None:
    """Write whatever is missing, then publish."""
    for block in writer.missing():
        if block not in writer.committed():
            write_block(writer, block, pause)
    writer.consolidate()


def main() -> None:
    """Write a store and say so."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--pause", type=float, default=0.0)
    args = parser.parse_args()
    encode_part(0, ["x"], {})  # imports pyarrow and pandas, which takes long

    with open_run(args.url, make_spec()) as writer:
        print("started", flush=True)
        write_all(writer, args.pause)
        print("finished", flush=True)


if __name__ == "__main__":
    main()

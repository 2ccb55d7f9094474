"""A small extraction without a model: run as a script by tests that kill it.

Rows depend on their index alone, so every attempt, in any process, makes the same ones.
"""

import argparse
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
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


def write_all(writer: StoreWriter, pause: float = 0.0, first: int = 0) -> None:
    """Write whatever is missing, from block `first` on and round, then publish."""
    missing = writer.missing()
    for block in sorted(missing, key=lambda b: (b - first) % writer.num_blocks):
        if block not in writer.committed():
            write_block(writer, block, pause)
    writer.consolidate()


def run(arguments: Sequence[str]) -> None:
    """Write a store and say so."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--weights", default="abc")
    args = parser.parse_args(arguments)
    encode_part(0, ["x"], {})  # imports pyarrow and pandas, which takes long

    spec = make_spec()
    spec.identity["model"]["weights"] = args.weights
    with open_run(args.url, spec) as writer:
        print("started", flush=True)
        write_all(writer, args.pause, args.first)
        print("finished", flush=True)


def serve() -> None:
    """Start a writer for each line of standard input, and say its process id.

    Imports take longer than writing, so a writer is a fork of a process that has done
    them.  Each line is a JSON list: a file for the writer's output, then its arguments.
    """
    import s3fs  # noqa: F401

    encode_part(0, ["x"], {})
    for line in sys.stdin:
        log, *arguments = json.loads(line)
        child = os.fork()
        if child:
            print(child, flush=True)
            continue
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        status = 1
        try:
            run(arguments)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            print(f"exit {status}", flush=True)
            os._exit(status)


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        # Nobody waits for the writers, so that none stays behind as a zombie.
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        serve()
    else:
        run(sys.argv[1:])

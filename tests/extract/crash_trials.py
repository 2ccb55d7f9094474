"""Kills extractions with SIGKILL and finishes them; run by test_crash.py.

Usage: python crash_trials.py FOLDER TRIALS SEED, which prints one JSON line a trial.
It imports torch once and forks each run, which is what makes twenty trials quick.
"""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas  # noqa: F401  # imported before the forks, once for all of them
import pyarrow.parquet  # noqa: F401
import torch
import zarr  # noqa: F401
from torch import Tensor, nn

from torchlens.extract import extract_dataset
from torchlens.storage import open_store

NUM_ROWS, BLOCK_ROWS, BATCH_SIZE = 192, 8, 4
NUM_BLOCKS = NUM_ROWS // BLOCK_ROWS
LAYERS = ["0", "1", "4"]
SECONDS_PER_FORWARD = 0.02


class Slow(nn.Module):
    """Takes its time, so that a kill finds the run at work."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == BATCH_SIZE:
            time.sleep(SECONDS_PER_FORWARD)
        return x


def extract(folder: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        Slow(),
        nn.Linear(392, 5),
    )
    data = torch.randn(NUM_ROWS, 3, 9, 9)
    extract_dataset(
        model,
        data,
        LAYERS,
        output_dir=folder,
        batch_size=BATCH_SIZE,
        block_rows=BLOCK_ROWS,
        ids=[f"im{row}" for row in range(NUM_ROWS)],
        metadata={"age": list(range(NUM_ROWS))},
        progress=False,
    )


def forked(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
        os._exit(0)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def commits(folder: Path) -> int:
    return sum(
        1
        for path in folder.glob("_run/*/commits/b*.json")
        if not path.name.startswith(".")
    )


def kill_at_random(folder: Path, choose: random.Random) -> dict[str, Any]:
    """Run, kill after at least one commit, and say how far it was."""
    pid = forked(lambda: extract(folder))
    deadline = time.monotonic() + 60
    had = commits(folder)
    while commits(folder) == had and time.monotonic() < deadline:
        time.sleep(0.002)
    left = (NUM_BLOCKS - had) * BLOCK_ROWS / BATCH_SIZE * SECONDS_PER_FORWARD
    time.sleep(choose.random() * left * 0.9)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return {"killed": os.WIFSIGNALED(status), "commits": commits(folder)}


def files_of(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.relative_to(root).parts[0] != "_run"
    }


def check(folder: Path) -> None:
    store = open_store(folder)
    assert store.complete and store.verify(deep=True).ok


def wait_for(pid: int) -> int:
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def run_trial(folder: Path, wanted: dict[str, bytes], choose: random.Random) -> Any:
    """Kill a run, sometimes twice, let it finish, and compare."""
    kills = [kill_at_random(folder, choose)]
    if choose.random() < 0.25 and kills[0]["commits"] < NUM_BLOCKS - 2:
        kills.append(kill_at_random(folder, choose))
    code = wait_for(forked(lambda: extract(folder)))
    found = files_of(folder)
    names = wanted.keys() | found.keys()
    return {
        "kills": kills,
        "code": code,
        "differing": [n for n in names if wanted.get(n) != found.get(n)],
        "verified": wait_for(forked(lambda: check(folder))) == 0,
    }


def main(root: Path, num_trials: int, seed: int) -> None:
    torch.set_num_threads(1)
    choose = random.Random(seed)
    assert wait_for(forked(lambda: extract(root / "whole"))) == 0
    wanted = files_of(root / "whole")
    for trial in range(num_trials):
        line = run_trial(root / f"trial{trial}", wanted, choose)
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

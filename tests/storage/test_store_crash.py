"""Writers die at any moment; running the same command again makes the store whole."""

import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import torchlens
from torchlens.errors import StoreError
from torchlens.storage import open_run, open_store

ROUNDS = 4


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file of a store but those of its runs."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.relative_to(folder).parts[0] != "_run"
    }


def start(script: Path, folder: Path, pause: float = 0.0) -> "subprocess.Popen[str]":
    """Start a process that writes the small extraction."""
    root = Path(torchlens.__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": str(root)}
    return subprocess.Popen(
        [sys.executable, str(script), str(folder), "--pause", str(pause)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def finish(process: "subprocess.Popen[str]") -> str:
    """Wait for a process and return what it printed."""
    out, _ = process.communicate(timeout=120)
    return out


@pytest.mark.multiprocess
def test_a_store_killed_at_random_moments_is_byte_identical_in_the_end(
    tmp_path: Path, sample_script: Path, finished: Path, sample: ModuleType
) -> None:
    rng = random.Random(0)
    folder = tmp_path / "killed"
    commits: list[int] = []
    for _ in range(ROUNDS):
        process = start(sample_script, folder, pause=0.002)
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        time.sleep(rng.uniform(0.02, 0.25))
        process.send_signal(signal.SIGKILL)
        finish(process)
        commits.append(len(list(folder.glob("_run/*/commits/*.json"))))
        if commits[-1] < 19:
            with pytest.raises(StoreError, match="unfinished"):
                open_store(folder)
            assert not (folder / "data.zarr" / "zarr.json").exists()
            partial = open_store(folder, allow_partial=True)
            rows = partial["conv"].row_numbers
            expected = sample.make_rows("conv", 0, 150)[rows]
            np.testing.assert_array_equal(partial["conv"][:], expected)
    print("commits at each kill:", commits)
    assert any(0 < n < 19 for n in commits)
    process = start(sample_script, folder)
    assert "finished" in finish(process)
    assert process.returncode == 0
    assert contents(folder) == contents(finished)
    assert open_store(folder).verify(deep=True).ok


@pytest.mark.multiprocess
def test_two_writers_at_once_make_one_store(
    tmp_path: Path, sample_script: Path, finished: Path
) -> None:
    folder = tmp_path / "shared"
    processes = [start(sample_script, folder, pause=0.001) for _ in range(2)]
    for process in processes:
        assert "finished" in finish(process)
        assert process.returncode == 0
    assert contents(folder) == contents(finished)
    assert open_store(folder).verify(deep=True).ok
    assert len(list(folder.glob("_run/order/*"))) == 1


def test_threads_write_several_blocks_at_once(
    tmp_path: Path, finished: Path, sample: ModuleType
) -> None:
    folder = tmp_path / "threads"
    writer = open_run(folder, sample.make_spec())
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda b: sample.write_block(writer, b), range(19)))
    assert writer.consolidate()
    assert contents(folder) == contents(finished)


def test_threads_read_at_once(finished: Path, sample: ModuleType) -> None:
    reader = open_store(finished)["conv"]
    rows = sample.make_rows("conv", 0, 150)

    def check(seed: int) -> bool:
        index = np.random.default_rng(seed).integers(0, 150, 60)
        return bool((reader[index] == rows[index]).all())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(check, range(40)))


@pytest.mark.parametrize("length", [0, 1, 100, -1])
def test_a_torn_shard_without_a_commit_is_written_again(
    tmp_path: Path, finished: Path, sample: ModuleType, length: int
) -> None:
    folder = tmp_path / "torn"
    writer = open_run(folder, sample.make_spec())
    block = writer.block(2)
    block.write("conv", sample.make_rows("conv", 16, 24))
    shard = folder / "data.zarr" / "conv" / "c.2.0.0"
    shard.write_bytes(shard.read_bytes()[:length])
    sample.write_all(open_run(folder, sample.make_spec()))
    assert contents(folder) == contents(finished)


def test_a_whole_shard_of_a_dead_attempt_is_adopted(
    tmp_path: Path, sample: ModuleType
) -> None:
    """A rival may have committed those bytes already, so they win over ours."""
    writer = open_run(tmp_path, sample.make_spec())
    block = writer.block(0)
    theirs = sample.make_rows("conv", 0, 8) + np.float32(0.001)
    block.write("conv", theirs)
    sample.write_all(open_run(tmp_path, sample.make_spec()))
    store = open_store(tmp_path)
    np.testing.assert_array_equal(store["conv"][:8], theirs)
    assert store.verify(deep=True).ok


def test_rows_that_a_dead_attempt_left_empty_are_recorded_as_failed(
    tmp_path: Path, sample: ModuleType
) -> None:
    writer = open_run(tmp_path, sample.make_spec())
    rows = sample.make_rows("conv", 8, 16)
    rows[3] = np.nan
    writer.block(1).write("conv", rows)
    sample.write_all(open_run(tmp_path, sample.make_spec()))
    assert open_store(tmp_path).failed == (11,)


def test_a_torn_part_of_the_samples_table_is_written_again(
    tmp_path: Path, finished: Path, sample: ModuleType
) -> None:
    folder = tmp_path / "torn"
    writer = open_run(folder, sample.make_spec())
    sample.write_block(writer, 4)
    (folder / writer.run.commit_key(4)).unlink()
    part = folder / writer.run.samples_key(4)
    part.write_bytes(part.read_bytes()[:50])
    sample.write_all(open_run(folder, sample.make_spec()))
    assert contents(folder) == contents(finished)

"""Writers of a store on S3 die at any moment, start at once, or do not agree."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

import numpy as np
import pytest

import torchlens
from torchlens.errors import StoreError
from torchlens.storage import open_store
from torchlens.storage.remote_objects import RemoteObjects

pytestmark = [pytest.mark.s3, pytest.mark.multiprocess]

# How many writers are killed in each round.
ROUNDS = (1, 3, 2)
NUM_BLOCKS = 19


@pytest.fixture
def place(seaweed: Any, s3_url: str, s3_options: Any) -> RemoteObjects:
    """Return a fresh place on SeaweedFS."""
    return RemoteObjects(s3_url, s3_options(seaweed))


class Writers:
    """Starts writers and knows what they say."""

    def __init__(self, script: Path, folder: Path, environment: dict[str, str]) -> None:
        self._folder = folder
        self._server = subprocess.Popen(
            [sys.executable, str(script), "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )
        self._logs: dict[int, Path] = {}

    def start(self, url: str, *arguments: str) -> int:
        """Start a writer and return its process id."""
        log = self._folder / uuid4().hex
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps([str(log), url, *arguments]) + "\n")
        self._server.stdin.flush()
        process = int(self._server.stdout.readline())
        self._logs[process] = log
        return process

    def said(self, process: int) -> str:
        """Return what a writer has said so far."""
        log = self._logs[process]
        return log.read_text() if log.exists() else ""

    def wait(self, process: int, text: str = "exit ") -> str:
        """Wait until a writer says something, and return all that it said."""
        end = time.monotonic() + 120
        while text not in (said := self.said(process)):
            assert time.monotonic() < end and "exit 1" not in said, said
            time.sleep(0.01)
        return said

    def kill(self, process: int) -> None:
        """Kill a writer and wait until it is gone."""
        try:
            os.kill(process, signal.SIGKILL)
            while True:
                os.kill(process, 0)
                time.sleep(0.005)
        except ProcessLookupError:
            return  # it may have finished before

    def close(self) -> None:
        """End the process that starts writers."""
        self._server.kill()
        self._server.communicate()


@pytest.fixture(scope="module")
def writers(
    tmp_path_factory: pytest.TempPathFactory,
    sample_script: Path,
    seaweed_proxy: Any,
    s3: ModuleType,
) -> Iterator[Writers]:
    """Return what starts writers; they talk to the server itself, not to the proxy."""
    host, port = seaweed_proxy.upstream
    environment = {
        "PYTHONPATH": str(Path(torchlens.__file__).parents[1]),
        "AWS_ACCESS_KEY_ID": s3.KEY,
        "AWS_SECRET_ACCESS_KEY": s3.SECRET,
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    }
    made = Writers(sample_script, tmp_path_factory.mktemp("writers"), environment)
    yield made
    made.close()


def contents(objects: RemoteObjects) -> dict[str, bytes]:
    """Return every object of a store but those of its runs."""
    keys = objects.list("", recursive=True)
    return {key: objects.get(key) for key in keys if not key.startswith("_run/")}


def files(folder: Path) -> dict[str, bytes]:
    """Return the same of a store on disk."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.relative_to(folder).parts[0] != "_run"
    }


def num_commits(place: RemoteObjects) -> int:
    """Return how many blocks are committed."""
    keys = place.list("_run", recursive=True)
    return sum("/commits/" in key for key in keys)


def test_a_store_on_s3_killed_at_random_moments_is_whole_in_the_end(
    place: RemoteObjects, writers: Writers, finished: Path, sample: ModuleType
) -> None:
    rng = random.Random(1)
    kills: list[int] = []
    for count in ROUNDS:
        firsts = [str(i * NUM_BLOCKS // count) for i in range(count)]
        started = [
            writers.start(place.url, "--pause", "0.01", "--first", first)
            for first in firsts
        ]
        for process in started:
            writers.wait(process, "started")
        for process in rng.sample(started, count):
            time.sleep(rng.uniform(0.05, 0.8))
            writers.kill(process)
        kills.append(num_commits(place))
        if kills[-1] == NUM_BLOCKS:
            continue
        with pytest.raises(StoreError, match="unfinished"):
            open_store(place)
        assert place.size("data.zarr/zarr.json") is None
        partial = open_store(place, allow_partial=True)
        rows = partial["conv"].row_numbers
        expected = sample.make_rows("conv", 0, 150)[rows]
        np.testing.assert_array_equal(partial["conv"][:], expected)
    print("commits at each kill:", kills)
    assert any(0 < n < NUM_BLOCKS for n in kills), kills
    writers.wait(writers.start(place.url), "exit 0")
    assert contents(place) == files(finished)
    store = open_store(place)
    assert store.verify(deep=True).ok and store.num_rows == len(set(store.ids)) == 150


def test_two_identical_jobs_at_once_make_one_store_on_s3(
    place: RemoteObjects, writers: Writers, finished: Path
) -> None:
    jobs = [writers.start(place.url, "--first", first) for first in ("0", "9")]
    for job in jobs:
        writers.wait(job, "exit 0")
    assert len(place.list("_run/order")) == 1
    assert contents(place) == files(finished)
    assert open_store(place).verify(deep=True).ok


@pytest.mark.parametrize("where", ["s3", "local"])
def test_of_two_different_jobs_on_one_store_one_is_refused(
    request: pytest.FixtureRequest,
    where: str,
    tmp_path: Path,
    writers: Writers,
    sample: ModuleType,
) -> None:
    """Started at once: whichever comes second learns what differs."""
    place = request.getfixturevalue("place") if where == "s3" else tmp_path / "s"
    url = place.url if where == "s3" else str(place)
    jobs = [writers.start(url, "--weights", weights) for weights in ("abc", "xyz")]
    end = time.monotonic() + 120
    while not all("exit" in writers.said(job) for job in jobs):
        assert time.monotonic() < end
        time.sleep(0.05)
    said = [writers.said(job) for job in jobs]
    (refused,) = [text for text in said if "exit 1" in text]
    assert "ResumeError" in refused
    assert "identity.model.weights" in refused
    assert '"abc"' in refused and '"xyz"' in refused
    store = open_store(place)
    assert store.verify(deep=True).ok and store.committed_rows == 150
    np.testing.assert_array_equal(store["conv"][:], sample.make_rows("conv", 0, 150))

"""Stores on S3: the same store as on disk, whatever the network does to requests."""

import os
import pickle
import re
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data

import torchlens
from torchlens.errors import StoreError, TorchLensWarning
from torchlens.storage import Store, open_run, open_store
from torchlens.storage.remote_objects import RemoteObjects
from torchlens.storage.retries import Patience

pytestmark = pytest.mark.s3

QUICK = Patience(attempts=4, first_seconds=0.01)
CLIENTS = ("s3fs", "obstore")
BOTH = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
Options = Callable[..., dict[str, Any]]


@pytest.fixture(params=CLIENTS)
def objects(
    request: pytest.FixtureRequest, proxy: Any, s3_url: str, s3_options: Options
) -> RemoteObjects:
    """Return a fresh place on each server, through each client."""
    options = s3_options(proxy, request.param)
    return RemoteObjects(s3_url, options, patience=QUICK)


@pytest.fixture(params=CLIENTS)
def on_seaweed(
    request: pytest.FixtureRequest, seaweed: Any, s3_url: str, s3_options: Options
) -> RemoteObjects:
    """Return a fresh place on SeaweedFS, through each client."""
    options = s3_options(seaweed, request.param)
    return RemoteObjects(s3_url, options, patience=QUICK)


@pytest.fixture
def small(sample: ModuleType) -> Any:
    """Return the specification of the small extraction with five blocks only."""
    return sample.make_spec(num_rows=36)


@pytest.fixture
def on_disk(tmp_path: Path, sample: ModuleType, small: Any) -> dict[str, bytes]:
    """Return what `small` is on a local disk."""
    sample.write_all(open_run(tmp_path / "local", small))
    return files(tmp_path / "local")


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


def test_s3_objects_behave_as_files_do(objects: RemoteObjects) -> None:
    assert objects.put_new("a/b/c", [b"one", np.frombuffer(b"two", np.uint8)])
    assert not objects.put_new("a/b/c", [b"other"])
    assert objects.get("a/b/c") == b"onetwo"
    assert objects.size("a/b/c") == 6 and objects.size("a/b") is None
    assert objects.get_range("a/b/c", 1, 4) == b"net"
    assert objects.get_range("a/b/c", 2, None) == b"etwo"
    assert objects.get_range("a/b/c", -3, None) == b"two"
    assert objects.put_new("a/d", [b""])
    assert objects.get("a/d") == b""
    assert objects.get_range("a/d", -5, None) == b""
    assert objects.get_range("a/d", 0, None) == b""
    assert dict(objects.list("a")) == {"a/d": 0}
    assert dict(objects.list("a", recursive=True)) == {"a/d": 0, "a/b/c": 6}
    assert dict(objects.list("nowhere")) == {}
    assert dict(objects.list("nowhere", recursive=True)) == {}
    objects.replace("a/b/c", [b"new"])
    assert objects.get("a/b/c") == b"new"
    objects.delete("a/b/c")
    objects.delete("a/b/c")
    for gone in (lambda: objects.get("a/b/c"), lambda: objects.get_range("x", 0, 1)):
        with pytest.raises(FileNotFoundError):
            gone()


def test_one_of_many_racing_writers_wins_on_s3(on_seaweed: RemoteObjects) -> None:
    def put(number: int) -> bool:
        return on_seaweed.put_new("x", [str(number).encode() * 1000])

    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(put, range(16)))
    assert won.count(True) == 1
    assert on_seaweed.get("x") == str(won.index(True)).encode() * 1000


def test_a_store_on_s3_is_that_on_disk(
    objects: RemoteObjects, on_disk: dict[str, bytes], sample: ModuleType, small: Any
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sample.write_all(open_run(objects, small))
    assert contents(objects) == on_disk
    store = open_store(objects)
    assert store.verify(deep=True).ok
    expected = sample.make_rows("conv", 0, 36)
    np.testing.assert_array_equal(store["conv"][:], expected)
    again = pickle.loads(pickle.dumps(store))
    np.testing.assert_array_equal(again["conv"][[35, 3]], expected[[35, 3]])


@pytest.mark.parametrize(
    "faults", [("500", "503", "SlowDown"), ("cut", "lost answer", "cut answer")]
)
def test_a_store_is_whole_though_requests_fail(
    on_seaweed: RemoteObjects,
    seaweed: Any,
    faults: tuple[str, ...],
    on_disk: dict[str, bytes],
    sample: ModuleType,
    small: Any,
) -> None:
    """For each kind of object three requests fail, each in another way."""
    paths = ("probe", "order", "run.json", "commits", "/samples", "conv", "fc~", "mani")
    rules = [
        seaweed.inject(fault, "GET|PUT", path, times=1)
        for path in paths
        for fault in faults
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sample.write_all(open_run(on_seaweed, small))
    assert all(rule.met == 1 for rule in rules)
    assert contents(on_seaweed) == on_disk
    assert open_store(on_seaweed).verify(deep=True).ok


@pytest.mark.parametrize("path", ["probe", "order", "run.json", "commits", "conv"])
def test_an_object_whose_answer_was_lost_is_taken_for_ours(
    on_seaweed: RemoteObjects, seaweed: Any, path: str, sample: ModuleType, small: Any
) -> None:
    rule = seaweed.inject("lost answer", "PUT", path, times=1)
    writer = open_run(on_seaweed, small)
    assert sample.write_block(writer, 0), "our own commit was taken for a rival's"
    assert rule.met == 1
    assert writer.committed() == {0}


def test_a_failure_that_stays_ends_in_words_and_whole_blocks(
    on_seaweed: RemoteObjects, seaweed: Any, sample: ModuleType, small: Any
) -> None:
    writer = open_run(on_seaweed, small)
    sample.write_block(writer, 0)
    seaweed.inject("503", "PUT", "/fc~")
    with pytest.raises(
        StoreError,
        match=r"Cannot write s3://ready/.*/fc~5b0~5d/c\.1\.0: .*503.*, 4 times\. "
        "Run the same command again when the cause is gone",
    ):
        sample.write_block(writer, 1)
    seaweed.heal()
    assert open_run(on_seaweed, small).missing() == (1, 2, 3, 4)
    partial = open_store(on_seaweed, allow_partial=True)
    np.testing.assert_array_equal(partial["conv"][:], sample.make_rows("conv", 0, 8))
    sample.write_all(writer)
    assert open_store(on_seaweed).verify(deep=True).ok


def test_a_refusal_is_told_at_once(
    on_seaweed: RemoteObjects, seaweed: Any, sample: ModuleType, small: Any
) -> None:
    writer = open_run(on_seaweed, small)
    rule = seaweed.inject("403", "PUT", "/conv/")
    with pytest.raises(StoreError, match="credentials may not do this there") as caught:
        sample.write_block(writer, 2)
    assert rule.met == 1
    assert re.search("Cannot write s3://ready/.*/data.zarr/conv/c.2", str(caught.value))
    seaweed.inject("403", "GET", "commits")
    with pytest.raises(StoreError, match="Cannot list s3://ready/.*/commits"):
        writer.missing()


def test_wrong_credentials_and_missing_buckets_are_named(
    seaweed: Any, s3_url: str, s3_options: Options, small: Any
) -> None:
    for client in CLIENTS:
        options = s3_options(seaweed, client)
        with pytest.raises(StoreError, match="The credentials may not do this there"):
            open_run(s3_url, small, storage_options=options | {"secret": "wrong"})
        with pytest.raises(StoreError, match="[Bb]ucket"):
            open_run("s3://nowhere/x", small, storage_options=options)
        with pytest.raises(StoreError, match="nowhere/x is not a store|such bucket"):
            open_store("s3://nowhere/x", storage_options=options)


def test_a_put_that_was_lost_is_found_before_publication(
    on_seaweed: RemoteObjects, seaweed: Any, sample: ModuleType, small: Any
) -> None:
    seaweed.inject("dropped", "PUT", "/conv/c.3", times=1)
    writer = open_run(on_seaweed, small)
    with pytest.raises(StoreError, match="'data.zarr/conv/c.3.0.0' .* is gone"):
        sample.write_all(writer)
    with pytest.raises(StoreError, match="and it is not published"):
        open_store(on_seaweed)
    report = open_store(on_seaweed, allow_partial=True).verify()
    assert report.bad_keys == ("data.zarr/conv/c.3.0.0",)


@pytest.mark.parametrize(
    ("server", "fault"), [("moto_proxy", "no condition"), ("seaweed_proxy", "501")]
)
@pytest.mark.parametrize("client", CLIENTS)
def test_a_store_that_ignores_the_condition_is_warned_about_and_still_right(
    request: pytest.FixtureRequest,
    server: str,
    fault: str,
    client: str,
    s3_url: str,
    s3_options: Options,
    on_disk: dict[str, bytes],
    sample: ModuleType,
    small: Any,
) -> None:
    proxy = request.getfixturevalue(server)
    proxy.heal()
    proxy.inject(fault, "PUT")
    objects = RemoteObjects(s3_url, s3_options(proxy, client), patience=QUICK)
    with pytest.warns(TorchLensWarning, match="run one writer at a time there") as told:
        writer = open_run(objects, small)
    assert len(told) == 1
    sample.write_block(writer, 3)
    proxy.heal()
    proxy.inject(fault, "PUT")
    other = open_run(pickle.loads(pickle.dumps(objects)), small)  # knows it already
    assert not sample.write_block(other, 3), "a block was committed twice"
    assert proxy.count("PUT", r"/c\.3") == 0
    sample.write_all(writer)
    assert contents(objects) == on_disk
    assert open_store(objects).verify(deep=True).ok
    proxy.heal()


def test_each_object_costs_one_request_and_resuming_one_listing(
    on_seaweed: RemoteObjects, seaweed: Any, sample: ModuleType, small: Any
) -> None:
    writer = open_run(on_seaweed, small)
    seaweed.heal()
    for block in range(5):
        sample.write_block(writer, block)
        assert len(seaweed.requests) == 4, seaweed.requests
        assert seaweed.count("PUT") == 4
        seaweed.heal()
    assert writer.missing() == ()
    assert len(seaweed.requests) == 1 and seaweed.count("GET", "list-type=2") == 1
    seaweed.heal()
    resumed = open_run(on_seaweed, small)
    at_start = len(seaweed.requests)
    assert at_start <= 10 and seaweed.count("GET", "commits") == 0, seaweed.requests
    resumed.consolidate()
    seaweed.heal()
    store = open_store(on_seaweed)
    assert len(seaweed.requests) <= 8 and seaweed.count("GET", "/conv/") == 0
    seaweed.heal()
    store["conv"][0:8]
    assert seaweed.count("GET", "/conv/") == len(seaweed.requests) <= 3


def test_the_secret_is_nowhere_in_the_store(
    on_seaweed: RemoteObjects, s3: ModuleType, sample: ModuleType, small: Any
) -> None:
    sample.write_all(open_run(on_seaweed, small))
    store = open_store(on_seaweed)
    texts = [repr(store), repr(store.info()), store.url]
    stored = [on_seaweed.get(key) for key in on_seaweed.list("", recursive=True)]
    assert len(stored) > 20
    for secret in (s3.KEY, s3.SECRET):
        assert not any(secret.encode() in data for data in stored)
        assert not any(secret in text for text in texts)


def test_credentials_come_from_the_environment(
    seaweed: Any,
    s3: ModuleType,
    s3_url: str,
    sample: ModuleType,
    small: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.SECRET)
    monkeypatch.setenv("AWS_ENDPOINT_URL", seaweed.url)
    for client in CLIENTS:
        place = f"{s3_url}/{client}"
        with open_run(place, small, storage_options={"client": client}) as writer:
            sample.write_block(writer, 0)
        assert open_run(place, small).missing() == (1, 2, 3, 4)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", "/nonexistent")
    with pytest.raises(StoreError, match="Give credentials by the client's usual"):
        open_run(s3_url, small, storage_options={"client": "s3fs"})


def test_a_wrong_client_is_named(
    s3_url: str, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in BOTH:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(StoreError, match="client='boto' is none of"):
        open_run(s3_url, small, storage_options={"client": "boto"})
    options = {"client": "obstore", "key": "half of it"}
    with pytest.raises(StoreError, match="obstore cannot open s3://ready.*: .*Secret"):
        open_run(s3_url, small, storage_options=options)
    options = {"client": "obstore", "profile": "lab"}
    with pytest.raises(StoreError, match=r"\['profile'\] mean nothing to obstore"):
        open_run(s3_url, small, storage_options=options)


class Rows(torch.utils.data.Dataset[Any]):
    """The rows of a layer, read in whichever process asks."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def __len__(self) -> int:
        return len(self.store["conv"])

    def __getitem__(self, row: int) -> torch.Tensor:
        return torch.from_numpy(self.store["conv"][row].copy())


@pytest.mark.multiprocess
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("client", "method"), [("s3fs", "fork"), ("obstore", "fork"), ("s3fs", "spawn")]
)
def test_loader_workers_read_a_store_on_s3(
    seaweed: Any,
    client: str,
    method: str,
    s3_url: str,
    s3_options: Options,
    sample: ModuleType,
    small: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = str(Path(torchlens.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", root)
    objects = RemoteObjects(s3_url, s3_options(seaweed, client), patience=QUICK)
    sample.write_all(open_run(objects, small))
    store = open_store(objects)
    expected = sample.make_rows("conv", 0, 36)
    np.testing.assert_array_equal(store["conv"][:], expected)  # connections are open
    loader = torch.utils.data.DataLoader(
        Rows(store), 6, num_workers=2, multiprocessing_context=method, timeout=60
    )
    for _ in range(2 if method == "fork" else 1):
        rows = torch.cat(list(loader)).numpy()
        np.testing.assert_array_equal(rows, expected)
        np.testing.assert_array_equal(store["conv"][:], expected)  # parent unharmed


@pytest.mark.parametrize(
    ("client", "nbytes"), [("s3fs", 101 << 20), ("obstore", 6 << 20)]
)
def test_an_object_of_any_size_is_one_put(
    seaweed: Any, client: str, nbytes: int, s3_url: str, s3_options: Options
) -> None:
    """Both clients would upload it in parts by themselves, and leave them if killed."""
    objects = RemoteObjects(s3_url, s3_options(seaweed, client), patience=QUICK)
    data = np.zeros(nbytes, np.uint8)
    assert objects.put_new("big", [data])
    objects.replace("big", [data])
    assert [method for method, _ in seaweed.requests] == ["PUT", "PUT"]
    assert objects.size("big") == nbytes
    objects.delete("big")


def test_a_writer_that_may_not_delete_can_write(
    on_seaweed: RemoteObjects, seaweed: Any, sample: ModuleType, small: Any
) -> None:
    seaweed.inject("403", "DELETE|POST")
    sample.write_all(open_run(on_seaweed, small))
    assert open_store(on_seaweed).verify(deep=True).ok


@pytest.mark.parametrize(
    ("options", "environment", "client"),
    [
        ({"key": "a", "secret": "b"}, {}, "ObstoreClient"),
        ({"anon": True}, {}, "ObstoreClient"),
        ({}, BOTH, "ObstoreClient"),
        ({}, {"AWS_ACCESS_KEY_ID": "a"}, "FsspecClient"),
        ({}, {}, "FsspecClient"),
        ({"key": "a", "secret": "b", "client": "s3fs"}, {}, "FsspecClient"),
        ({"key": "a", "secret": "b", "profile": "lab"}, {}, "FsspecClient"),
        ({"key": "a", "secret": "b"}, {"AWS_PROFILE": "lab"}, "FsspecClient"),
        ({"client_kwargs": {"region_name": "x"}, "anon": True}, {}, "ObstoreClient"),
        ({"client_kwargs": {"verify": False}, "anon": True}, {}, "FsspecClient"),
    ],
)
def test_obstore_is_used_where_it_understands_everything(
    options: dict[str, Any],
    environment: dict[str, str],
    client: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    objects = RemoteObjects("s3://bucket/x", options)
    (made,) = objects._clients.values()
    assert type(made).__name__ == client

"""The one primitive, put_new, and what goes wrong around it."""

import errno
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import torchlens
from torchlens.errors import ManifestError, StoreError, TorchLensWarning
from torchlens.storage import MemoryObjects, ObjectStore, open_run, open_store
from torchlens.storage.local_objects import LocalObjects
from torchlens.storage.objects import open_objects


def run_python(code: str, *arguments: object, **environment: str) -> str:
    """Run code in a fresh process that sees this package; return what it prints."""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ
        | {"PYTHONPATH": str(Path(torchlens.__file__).parents[1])}
        | environment,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_put_new_creates_once(place: str | ObjectStore) -> None:
    objects = open_objects(place)
    assert objects.put_new("a/b/c", [b"one", np.frombuffer(b"two", np.uint8)])
    assert not objects.put_new("a/b/c", [b"other"])
    assert objects.get("a/b/c") == b"onetwo"
    assert objects.size("a/b/c") == 6 and objects.size("a/b") is None
    assert objects.get_range("a/b/c", 1, 4) == b"net"
    assert objects.get_range("a/b/c", -3, None) == b"two"
    assert objects.put_new("a/d", [b""])
    assert dict(objects.list("a")) == {"a/d": 0}
    assert dict(objects.list("a", recursive=True)) == {"a/d": 0, "a/b/c": 6}
    assert dict(objects.list("nowhere")) == {}
    objects.replace("a/b/c", [b"new"])
    assert objects.get("a/b/c") == b"new"
    objects.delete("a/b/c")
    objects.delete("a/b/c")
    with pytest.raises(FileNotFoundError):
        objects.get("a/b/c")
    with pytest.raises(FileNotFoundError):
        objects.get_range("a/b/c", 0, 1)


@pytest.mark.parametrize("links", [True, False])
def test_one_of_many_racing_writers_wins(
    tmp_path: Path, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not links:
        forbid_links(monkeypatch)
    objects = LocalObjects(tmp_path)

    def put(number: int) -> bool:
        return objects.put_new("x", [str(number).encode() * 1000])

    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(put, range(16)))
    assert won.count(True) == 1
    assert objects.get("x") == str(won.index(True)).encode() * 1000
    assert list((tmp_path / "_run" / "tmp").iterdir()) == []


def forbid_links(patch: pytest.MonkeyPatch, code: int = errno.EPERM) -> None:
    """Make this process believe that the file system has no hard links."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    patch.setattr(os, "link", refuse)


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_store_is_written_where_there_are_no_links(
    tmp_path: Path, sample: ModuleType, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_links(monkeypatch, code)
    sample.write_all(open_run(tmp_path, sample.make_spec()))
    assert open_store(tmp_path).verify(deep=True).ok


def test_empty_claims_of_dead_writers_are_taken_over(
    tmp_path: Path, sample: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without links a writer can die between claiming a name and filling it."""
    forbid_links(monkeypatch)
    writer = open_run(tmp_path / "a", sample.make_spec())
    sample.write_all(writer)
    names = [p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*.*")]
    names = [name for name in names if (tmp_path / "a" / name).is_file()]
    # One object of each kind, the last of its folder.
    names = list({name.parent: name for name in sorted(names)}.values())
    assert len(names) == 8
    for name in names:
        folder = tmp_path / "b"
        second = open_run(folder, sample.make_spec(), overwrite=True)
        assert second.run_id == writer.run_id
        if not (folder / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
        sample.write_all(open_run(folder, sample.make_spec()))
        assert open_store(folder).verify(deep=True).ok, name


def test_fsync_writes_the_same_store(
    tmp_path: Path, finished: Path, sample: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(fd), real(fd))[1])
    writer = open_run(tmp_path / "s", sample.make_spec(), fsync=True)
    sample.write_block(writer, 0)
    assert len(synced) >= 2 * 4  # each object and its directory
    shard = "data.zarr/conv/c.0.0.0"
    assert (tmp_path / "s" / shard).read_bytes() == (finished / shard).read_bytes()


def test_a_place_that_ignores_the_condition_is_warned_about(
    sample: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def careless(self: MemoryObjects, key: str, parts: Any) -> bool:
        self.replace(key, parts)
        return True

    monkeypatch.setattr(MemoryObjects, "put_new", careless)
    with pytest.warns(TorchLensWarning, match="overwrite what the first has put"):
        open_run(None, sample.make_spec())


def test_stale_temporary_files_are_swept(tmp_path: Path, sample: ModuleType) -> None:
    scratch = tmp_path / "_run" / "tmp"
    writer = open_run(tmp_path, sample.make_spec())
    (scratch / "1-old").write_bytes(b"x")
    (scratch / "1-new").write_bytes(b"x")
    os.utime(scratch / "1-old", (0, 0))
    sample.write_all(writer)
    assert [path.name for path in scratch.iterdir()] == ["1-new"]


def test_a_file_in_the_way_is_named(tmp_path: Path, sample: ModuleType) -> None:
    path = tmp_path / "file"
    path.touch()
    for call in (lambda: open_run(path, sample.make_spec()), lambda: open_store(path)):
        with pytest.raises(StoreError, match="file is a file; a store is a directory"):
            call()
    with pytest.raises(StoreError, match="A file lies where a folder is needed"):
        open_run(path / "below", sample.make_spec())


def test_a_directory_that_may_not_be_written_is_named() -> None:
    code = """
import os, sys
from torchlens.errors import StoreError
from torchlens.storage import ArraySpec, RunSpec, open_run
import torchlens.storage.zarr_store
if os.geteuid() == 0:
    os.seteuid(65534)  # root may write anywhere
try:
    open_run(sys.argv[1] + "/store", RunSpec(1, {"a": ArraySpec((), "bool")}))
except StoreError as error:
    print(error)
"""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "locked"
        folder.mkdir()
        folder.chmod(0o555)
        Path(parent).chmod(0o755)
        out = run_python(code, folder)
    assert "Cannot write" in out and "Permission denied" in out
    assert "Change its permissions, or choose another place." in out


def test_a_full_disk_is_named(
    tmp_path: Path, sample: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = open_run(tmp_path, sample.make_spec())

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", full)
        with pytest.raises(StoreError, match="No space left.*Make room, then run the"):
            sample.write_block(writer, 0)
    assert list((tmp_path / "_run" / "tmp").iterdir()) == []
    sample.write_all(writer)
    assert open_store(tmp_path).verify(deep=True).ok


def test_short_writes_and_reads_are_continued(
    tmp_path: Path, sample: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal or a network file system may move fewer bytes than asked."""
    writev, preadv = os.writev, os.preadv

    def few(buffers: Any) -> list[memoryview]:
        return [memoryview(buffer).cast("B")[:7] for buffer in buffers if len(buffer)][
            :1
        ]

    monkeypatch.setattr(os, "writev", lambda fd, parts: writev(fd, few(parts)))
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: preadv(fd, few(parts), at))
    sample.write_all(open_run(tmp_path, sample.make_spec()))
    rows = open_store(tmp_path)["conv"][:]
    np.testing.assert_array_equal(rows, sample.make_rows("conv", 0, 150))


def test_what_is_no_store_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        StoreError, match="nothing is not a store: it has no _run/order"
    ):
        open_store(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def test_an_unknown_kind_of_url_is_named(sample: ModuleType) -> None:
    with pytest.raises(StoreError, match="No file system opens 'nonsense://x'"):
        open_run("nonsense://x", sample.make_spec())


def test_an_unfinished_store_says_what_to_do(
    place: str | ObjectStore, sample: ModuleType
) -> None:
    writer = open_run(place, sample.make_spec())
    sample.write_block(writer, 0)
    with pytest.raises(
        StoreError, match="unfinished: 18 of 19 blocks are missing. Run "
    ):
        open_store(place)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "format version 2; this torchlens reads version 1"),
        ({"format": "other"}, "says format 'other'; a store says 'torchlens-store'"),
    ],
)
def test_other_versions_are_refused(
    finished: Path, change: dict[str, Any], message: str
) -> None:
    import json

    (path,) = finished.glob("_run/*/run.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ManifestError, match=message):
        open_store(finished)


@pytest.mark.parametrize("path", ["../../evil", "/etc", "..", ""])
def test_a_layer_path_out_of_the_store_is_refused(
    finished: Path, path: str, tmp_path: Path
) -> None:
    import json

    from torchlens.storage.checksums import sha256_hex

    (run,) = finished.glob("_run/*/run.json")
    body = json.loads(run.read_text())
    body["zarr"][f"{path}/zarr.json"] = body["zarr"]["conv/zarr.json"]
    body["arrays"][0]["path"] = path
    text = json.dumps(body)
    run_id = sha256_hex(text.encode())
    run.write_text(text)
    run.parent.rename(finished / "_run" / run_id)
    (finished / "_run" / "order" / "000000.json").write_text(
        f'{{"run_id": "{run_id}"}}'
    )
    with pytest.raises(ManifestError, match="which is not safe"):
        open_store(finished)

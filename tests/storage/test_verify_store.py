"""Every object of a store, damaged in every way, is named; no read returns fill."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from torchlens.errors import ManifestError, StoreError
from torchlens.storage import open_store

Damage = Callable[[Path], object]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, Damage] = {
    "flipped": flip,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-5]),
    "emptied": lambda path: path.write_bytes(b""),
    "removed": lambda path: path.unlink(),
}


def objects_of(folder: Path) -> list[Path]:
    files = [path for path in folder.glob("data.zarr/*/c.*") if path.is_file()]
    return sorted(files) + sorted(folder.glob("_run/*/samples/*"))


@pytest.mark.parametrize("damage", DAMAGES)
def test_each_damaged_object_is_named_by_deep_verify(
    finished: Path, damage: str
) -> None:
    store = open_store(finished)
    files = objects_of(finished)
    assert len(files) == 19 * 3
    for path in files:
        sound = path.read_bytes()
        DAMAGES[damage](path)
        report = store.verify(deep=True)
        assert report.bad_keys == (path.relative_to(finished).as_posix(),)
        assert not report.ok
        path.write_bytes(sound)
    report = store.verify(deep=True)
    assert report.ok and report.deep and report.num_objects == 19 * 3
    assert "57 objects" in report.summary() and "no problems" in report.summary()


@pytest.mark.parametrize("damage", ["truncated", "emptied", "removed"])
def test_changed_sizes_are_named_without_reading(finished: Path, damage: str) -> None:
    path = finished / "data.zarr" / "conv" / "c.7.0.0"
    DAMAGES[damage](path)
    report = open_store(finished).verify()
    assert report.bad_keys == ("data.zarr/conv/c.7.0.0",)
    assert report.problems[0].block == 7


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("layer", ["conv", "fc[0]"])
def test_a_read_of_a_damaged_shard_raises(
    finished: Path, damage: str, layer: str
) -> None:
    store = open_store(finished)
    key = store.info()["layers"][layer]["path"] + "/c.7.0"
    (path,) = finished.glob(f"{key}*")
    DAMAGES[damage](path)
    reader = open_store(finished)[layer]
    reader[:56]
    reader[64:]
    for read in (lambda: reader[:], lambda: reader[60], lambda: reader[[3, 57]]):
        with pytest.raises(StoreError, match=r"c\.7\.0.*(damaged|is gone)"):
            read()


def test_swapped_objects_are_named(finished: Path) -> None:
    first = finished / "data.zarr" / "conv" / "c.1.0.0"
    second = finished / "data.zarr" / "conv" / "c.2.0.0"
    data = first.read_bytes(), second.read_bytes()
    first.write_bytes(data[1])
    second.write_bytes(data[0])
    assert set(open_store(finished).verify(deep=True).bad_keys) == {
        "data.zarr/conv/c.1.0.0",
        "data.zarr/conv/c.2.0.0",
    }


def test_damage_to_what_is_published_is_named(finished: Path) -> None:
    store = open_store(finished)
    for name in ("data.zarr/zarr.json", "data.zarr/conv/zarr.json", "samples.parquet"):
        path = finished / name
        sound = path.read_bytes()
        for damage in DAMAGES.values():
            damage(path)
            assert name in store.verify(deep=True).bad_keys
            path.write_bytes(sound)
    assert store.verify(deep=True).ok


def test_damage_to_a_commit_record_is_named(finished: Path) -> None:
    store = open_store(finished)
    path = sorted(finished.glob("_run/*/commits/*"))[4]
    sound = path.read_bytes()
    body = json.loads(sound)
    for change in (
        {"ids_sha256": "0" * 64},
        {"stop": 41},
        {"block": "x"},
        {"objects": None},
    ):
        path.write_text(json.dumps(body | change))
        assert not store.verify().ok
    path.write_bytes(sound)
    assert store.verify().ok


@pytest.mark.parametrize("text", ["", "{", "[]", '{"blocks": 3}', "\x00"])
def test_a_damaged_manifest_is_refused(finished: Path, text: str) -> None:
    (path,) = finished.glob("_run/*/manifest.json")
    path.write_text(text)
    with pytest.raises((ManifestError, StoreError)):
        open_store(finished)


def test_verify_of_rows_never_returns_what_was_not_written(finished: Path) -> None:
    (finished / "data.zarr" / "conv" / "c.0.0.0").write_bytes(b"")
    reader = open_store(finished)["conv"]
    assert np.isfinite(reader[8:]).all()
    with pytest.raises(StoreError, match="too short to hold its index"):
        reader[0]

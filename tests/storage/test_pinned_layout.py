"""A joining writer uses the pinned layout; a store that does not is caught."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import torchlens.storage.zarr_store as zarr_store
from torchlens.errors import ManifestError
from torchlens.storage import StoreWriter, open_run, open_store

DIFFERENT: dict[str, Any] = {
    "separator": lambda doc: doc["chunk_key_encoding"].update(
        {"configuration": {"separator": "/"}}
    ),
    "shard rows": lambda doc: _cut_shards(doc),
    "fill value": lambda doc: doc.update({"fill_value": 0.0}),
    "no checksum": lambda doc: doc["codecs"][0]["configuration"]["codecs"].pop(),
    "compression": lambda doc: doc["codecs"][0]["configuration"]["codecs"].insert(
        1, {"name": "zstd", "configuration": {"level": 1, "checksum": False}}
    ),
}


def _cut_shards(document: dict[str, Any]) -> None:
    shape = document["chunk_grid"]["configuration"]["chunk_shape"]
    shape[0] //= 2
    document["codecs"][0]["configuration"]["chunk_shape"][0] = shape[0]


def change_defaults(patch: pytest.MonkeyPatch, difference: str) -> None:
    """Make this process write array metadata of another kind."""
    real = zarr_store.array_documents

    def changed(*args: Any) -> dict[str, dict[str, Any]]:
        documents = real(*args)
        for document in documents.values():
            DIFFERENT[difference](document)
        return documents

    patch.setattr(zarr_store, "array_documents", changed)


@pytest.mark.parametrize("difference", DIFFERENT)
def test_a_writer_with_other_defaults_adopts_the_pinned_layout(
    tmp_path: Path,
    sample: ModuleType,
    difference: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, mixed = tmp_path / "plain", tmp_path / "mixed"
    sample.write_all(open_run(plain, sample.make_spec()))
    first = open_run(mixed, sample.make_spec())
    for block in range(0, 19, 2):
        sample.write_block(first, block)
    change_defaults(monkeypatch, difference)
    sample.write_all(open_run(mixed, sample.make_spec()))
    assert open_store(mixed).verify(deep=True).ok
    files = [p.relative_to(plain) for p in plain.glob("data.zarr/**/*") if p.is_file()]
    assert len(files) == 2 * 19 + 3
    for name in files:
        assert (plain / name).read_bytes() == (mixed / name).read_bytes()


@pytest.mark.parametrize("difference", DIFFERENT)
def test_a_run_pinned_otherwise_is_followed_by_everyone(
    tmp_path: Path,
    sample: ModuleType,
    difference: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        change_defaults(patch, difference)
        first = open_run(tmp_path / "s", sample.make_spec())
        sample.write_block(first, 0)
    sample.write_all(open_run(tmp_path / "s", sample.make_spec()))
    store = open_store(tmp_path / "s")
    for name in store.layers:
        expected = sample.make_rows(name, 0, 150)
        np.testing.assert_array_equal(store[name][:], expected)
        np.testing.assert_array_equal(store[name][[140, 3]], expected[[140, 3]])
    assert store.verify(deep=True).ok


def write_with_other_keys(
    writer: StoreWriter, sample: ModuleType, folder: Path
) -> None:
    """Do what a writer with other defaults would: other keys, and a record of them."""
    for block in writer.missing():
        sample.write_block(writer, block)
    path = folder / writer.run.commit_key(3)
    record = json.loads(path.read_text())
    for entry in record["objects"]:
        if entry["key"].endswith("c.3.0.0"):
            moved = entry["key"].replace("c.3.0.0", "c/3/0/0")
            (folder / moved).parent.mkdir(parents=True)
            (folder / entry["key"]).rename(folder / moved)
            entry["key"] = moved
    path.write_text(json.dumps(record))


def test_keys_that_the_metadata_does_not_imply_fail_consolidate(
    tmp_path: Path, sample: ModuleType
) -> None:
    writer = open_run(tmp_path, sample.make_spec())
    write_with_other_keys(writer, sample, tmp_path)
    with pytest.raises(
        ManifestError, match="block 3.*c.3.0.0 missing.*c/3/0/0 not req"
    ):
        writer.consolidate()
    report = open_store(tmp_path, allow_partial=True).verify()
    assert {problem.block for problem in report.problems} == {3}
    assert set(report.bad_keys) == {"data.zarr/conv/c.3.0.0", "data.zarr/conv/c/3/0/0"}


def test_a_record_that_lacks_an_object_fails_consolidate(
    tmp_path: Path, sample: ModuleType
) -> None:
    writer = open_run(tmp_path, sample.make_spec())
    for block in writer.missing():
        sample.write_block(writer, block)
    path = tmp_path / writer.run.commit_key(5)
    record = json.loads(path.read_text())
    record["objects"] = [o for o in record["objects"] if "/fc~" not in o["key"]]
    path.write_text(json.dumps(record))
    with pytest.raises(ManifestError, match="block 5.*c.5.0 missing"):
        writer.consolidate()
    report = open_store(tmp_path, allow_partial=True).verify()
    assert report.bad_keys == ("data.zarr/fc~5b0~5d/c.5.0",)


@pytest.mark.parametrize("difference", DIFFERENT)
def test_published_metadata_of_another_kind_fails_consolidate_and_verify(
    tmp_path: Path, sample: ModuleType, difference: str
) -> None:
    writer = open_run(tmp_path, sample.make_spec())
    for block in writer.missing():
        sample.write_block(writer, block)
    document = json.loads(json.dumps(writer.run.documents["conv/zarr.json"]))
    DIFFERENT[difference](document)
    path = tmp_path / "data.zarr" / "conv" / "zarr.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ManifestError, match="conv/zarr.json.*not the metadata"):
        writer.consolidate()
    path.unlink()
    assert writer.consolidate()
    path.write_text(json.dumps(document))
    report = open_store(tmp_path).verify()
    assert report.bad_keys == ("data.zarr/conv/zarr.json",)
    assert "not the metadata that the run pinned" in report.summary()


def test_rows_of_another_shard_size_fail_deep_verify(
    tmp_path: Path, sample: ModuleType
) -> None:
    """Right keys, right sizes on record, but the bytes are cut otherwise."""
    writer = open_run(tmp_path, sample.make_spec())
    for block in writer.missing():
        sample.write_block(writer, block)
    record_path = tmp_path / writer.run.commit_key(0)
    record = json.loads(record_path.read_text())
    form = writer.run.formats["conv"]
    from torchlens.storage.checksums import crc32c
    from torchlens.storage.zarr_store import encode_with_zarr

    documents = json.loads(json.dumps(writer.run.documents))
    documents["conv/zarr.json"]["codecs"][0]["configuration"]["chunk_shape"][0] = 4
    data = encode_with_zarr(documents, "conv", 0, sample.make_rows("conv", 0, 8))
    (tmp_path / writer.run.shard_key("conv", 0)).write_bytes(data)
    for entry in record["objects"]:
        if entry["key"] == writer.run.shard_key("conv", 0):
            entry |= {"nbytes": len(data), "crc32c": f"{crc32c(data):08x}"}
    record_path.write_text(json.dumps(record))
    assert form.chunk_rows == 8
    report = open_store(tmp_path, allow_partial=True).verify(deep=True)
    assert report.bad_keys == ("data.zarr/conv/c.0.0.0",)

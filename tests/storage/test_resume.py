"""Runs are continued, extended, refused or overwritten; nothing else ever deletes."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from torchlens.errors import DataError, ManifestError, ResumeError, StoreError
from torchlens.storage import ArraySpec, ObjectStore, RunSpec, open_run, open_store
from torchlens.storage.objects import open_objects
from torchlens.storage.runs import read_runs

Place = str | ObjectStore


def contents(folder: Path, *, data_only: bool = True) -> dict[str, bytes]:
    """Return every file of a store, by default without `_run/`."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not (data_only and "_run" in path.parts)
    }


def test_resume_writes_only_what_is_missing(place: Place, sample: ModuleType) -> None:
    first = open_run(place, sample.make_spec())
    for block in (0, 3):
        assert sample.write_block(first, block)
    assert not first.consolidate()
    second = open_run(place, sample.make_spec())
    assert second.run_id == first.run_id
    assert second.committed() == {0, 3}
    assert second.missing() == (1, 2, *range(4, 19))
    sample.write_all(second)
    again = open_run(place, sample.make_spec())
    assert again.missing() == () and again.consolidate()


def test_committing_a_block_twice_is_harmless(place: Place, sample: ModuleType) -> None:
    first = open_run(place, sample.make_spec())
    second = open_run(place, sample.make_spec())
    assert sample.write_block(first, 2)
    assert not sample.write_block(second, 2)
    sample.write_all(second)
    assert open_store(place).verify(deep=True).ok


def test_what_does_not_determine_values_is_adopted(
    place: Place, sample: ModuleType
) -> None:
    first = open_run(place, sample.make_spec())
    second = open_run(
        place,
        sample.make_spec(
            block_rows=32, batch_size=20, world_size=4, provenance={"note": "later"}
        ),
    )
    assert second.layout == first.layout
    assert second.run.provenance == {"note": "a test"}


@pytest.mark.parametrize("finish", [False, True])
def test_a_different_run_is_refused_field_by_field(
    place: Place, sample: ModuleType, finish: bool
) -> None:
    with open_run(place, sample.make_spec()) as writer:
        sample.write_block(writer, 0)
        if finish:
            sample.write_all(writer)
    changed = sample.make_spec(
        num_rows=151,
        identity={"model": {"weights": "xyz", "layers": 3}, "seed": 1},
        arrays=sample.ARRAYS | {"conv": ArraySpec((4, 3), "float64", {"site": "x"})},
    )
    with pytest.raises(ResumeError) as caught:
        open_run(place, changed)
    message = str(caught.value)
    for line in (
        "num_rows: stored 150, now 151",
        'identity.model.weights: stored "abc", now "xyz"',
        'identity.dataset: stored "numbers", now absent',
        "identity.seed: not stored, now 1",
        'layer \'conv\' dtype: stored "float32", now "float64"',
        'layer \'conv\' identity.site: stored "conv.output", now "x"',
    ):
        assert line in message
    assert "layers: stored" not in message
    assert "overwrite=True" in message


def test_other_layers_wait_for_an_unfinished_run(
    place: Place, sample: ModuleType
) -> None:
    open_run(place, sample.make_spec())
    arrays = {"fc[0]": sample.ARRAYS["fc[0]"], "new": ArraySpec((), "bool")}
    with pytest.raises(ResumeError) as caught:
        open_run(place, sample.make_spec(arrays=arrays))
    assert "layer 'conv': in the unfinished run, now absent" in str(caught.value)
    assert "layer 'new': not in the unfinished run, now asked for" in str(caught.value)


def test_layers_are_added_as_a_second_run(place: Place, sample: ModuleType) -> None:
    objects = open_objects(place)
    with open_run(objects, sample.make_spec()) as writer:
        sample.write_all(writer)
    before = {k: objects.get(k) for k in objects.list("", recursive=True)}
    arrays = sample.ARRAYS | {"wide": ArraySpec((70,), "int32")}
    spec = sample.make_spec(arrays=arrays, block_rows=64)
    second = open_run(objects, spec)
    assert list(second.arrays) == ["wide"]
    assert second.layout.block_rows == 64
    rows = np.arange(150 * 70, dtype="int32").reshape(150, 70)

    def write(number: int) -> None:
        start, stop = second.span(number)
        block = second.block(number)
        block.write("wide", rows[start:stop])
        block.commit(sample.make_ids(start, stop))

    write(0)
    assert open_store(objects).layers == ("conv", "fc[0]")
    partial = open_store(objects, allow_partial=True)
    assert partial["wide"].shape == (64, 70) and partial["conv"].shape[0] == 150
    assert open_run(objects, spec).missing() == (1, 2)
    write(1)
    write(2)
    assert second.consolidate()
    store = open_store(objects)
    assert store.layers == ("conv", "fc[0]", "wide")
    np.testing.assert_array_equal(store["wide"][:], rows)
    np.testing.assert_array_equal(store["conv"][:], sample.make_rows("conv", 0, 150))
    assert store.verify(deep=True).ok
    changed = [key for key, data in before.items() if objects.get(key) != data]
    assert changed == ["data.zarr/zarr.json"]
    assert open_run(objects, spec).missing() == ()
    assert open_run(objects, sample.make_spec()).missing() == ()


def test_added_layers_must_be_of_the_same_samples(
    place: Place, sample: ModuleType
) -> None:
    with open_run(place, sample.make_spec()) as writer:
        sample.write_all(writer)
    arrays = {"more": ArraySpec((), "float32")}
    block = open_run(place, sample.make_spec(arrays=arrays)).block(0)
    block.write("more", np.zeros(8, "float32"))
    with pytest.raises(DataError, match="Rows 0 to 7 have other sample ids"):
        block.commit([f"other-{i}" for i in range(8)])
    with pytest.raises(DataError, match=r"columns \['colour'\] are not in the samples"):
        block.commit(sample.make_ids(0, 8), {"colour": ["red"] * 8})


def test_layers_that_differ_in_case_only_are_both_kept(place: Place) -> None:
    rows = {"Conv": np.arange(4.0), "conv": -np.arange(4.0)}
    arrays = {name: ArraySpec((), "float64") for name in rows}
    writer = open_run(place, RunSpec(4, arrays, block_rows=4))
    block = writer.block(0)
    for name, values in rows.items():
        block.write(name, values)
    block.commit(list("abcd"))
    writer.consolidate()
    store = open_store(place)
    for name, values in rows.items():
        np.testing.assert_array_equal(store[name][:], values)


def test_duplicate_ids_in_two_blocks_are_refused_at_the_end(place: Place) -> None:
    writer = open_run(place, RunSpec(4, {"a": ArraySpec((), "int8")}, block_rows=2))
    for number, ids in enumerate((["x", "y"], ["z", "x"])):
        block = writer.block(number)
        block.write("a", np.zeros(2, "int8"))
        block.commit(ids)
    with pytest.raises(DataError, match="id 'x' belongs to row 0 and to row 3"):
        writer.consolidate()
    with pytest.raises(StoreError, match="unfinished: 0 of 2 blocks.*not published"):
        open_store(place)


def test_a_rival_with_other_ids_is_refused(place: Place, sample: ModuleType) -> None:
    writer = open_run(place, sample.make_spec())
    sample.write_block(writer, 0)
    block = writer.block(0)
    for name in writer.arrays:
        block.write(name, sample.make_rows(name, 0, 8))
    with pytest.raises(DataError, match="stored other sample ids for rows 0 to 7"):
        block.commit([f"other-{i}" for i in range(8)])


def test_overwrite_deletes_a_store_and_starts_anew(
    place: Place, sample: ModuleType
) -> None:
    with open_run(place, sample.make_spec()) as writer:
        sample.write_all(writer)
    spec = RunSpec(3, {"a": ArraySpec((), "int8")}, block_rows=4)
    with open_run(place, spec, overwrite=True) as writer:
        assert writer.missing() == (0,)
        left = writer.objects.list("", recursive=True)
        assert all(key.startswith("_run/") for key in left)
        assert len(read_runs(writer.objects)) == 1


def test_overwrite_works_where_nothing_is(place: Place, sample: ModuleType) -> None:
    with open_run(place, sample.make_spec(), overwrite=True) as writer:
        assert len(writer.missing()) == 19


def test_overwrite_deletes_in_an_order_that_a_kill_cannot_spoil(
    tmp_path: Path, sample: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchlens.storage.local_objects import LocalObjects

    folder = tmp_path / "store"
    with open_run(folder, sample.make_spec()) as writer:
        sample.write_all(writer)
    total = len(contents(folder, data_only=False))
    real = LocalObjects.delete

    def dying_after(calls: int) -> Any:
        left = iter(range(calls))

        def delete(self: Any, key: str) -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt
            real(self, key)

        return delete

    for kill_after in (1, 5, 30, total - 3):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(LocalObjects, "delete", dying_after(kill_after))
            open_run(folder, sample.make_spec(), overwrite=True)
        # What is left is still ours, and the same command makes it whole again.
        with pytest.raises(StoreError, match="unfinished"):
            open_store(folder)
        with open_run(folder, sample.make_spec()) as writer:
            sample.write_all(writer)
        assert open_store(folder).verify(deep=True).ok


def test_overwrite_never_touches_what_is_not_a_store(
    tmp_path: Path, sample: ModuleType
) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(StoreError, match="not empty and not a store of ours"):
        open_run(tmp_path, sample.make_spec(), overwrite=True)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_overwrite_leaves_other_files_beside_a_store(
    tmp_path: Path, sample: ModuleType
) -> None:
    (tmp_path / "slurm.log").write_text("hello")
    with open_run(tmp_path, sample.make_spec()) as writer:
        sample.write_all(writer)
    open_run(tmp_path, sample.make_spec(), overwrite=True)
    assert (tmp_path / "slurm.log").read_text() == "hello"


def test_foreign_data_in_the_way_is_refused(tmp_path: Path, sample: ModuleType) -> None:
    (tmp_path / "data.zarr").mkdir()
    (tmp_path / "data.zarr" / "zarr.json").write_text("{}")
    with pytest.raises(StoreError, match="data.zarr or samples.parquet that no run"):
        open_run(tmp_path, sample.make_spec())


def test_two_different_jobs_started_at_once_do_not_mix(
    place: Place, sample: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second job starts while the first is between looking and claiming."""
    import torchlens.storage.runs as runs

    objects = open_objects(place)
    real = runs.plan_layout
    raced: list[str] = []

    def race(*args: Any, **kwargs: Any) -> Any:
        if not raced:
            raced.append("")
            raced[0] = open_run(objects, sample.make_spec()).run_id
        return real(*args, **kwargs)

    monkeypatch.setattr(runs, "plan_layout", race)
    with pytest.raises(ResumeError, match="identity.dataset"):
        open_run(objects, sample.make_spec(identity={"dataset": "letters"}))
    (run,) = read_runs(objects)
    assert run.record.run_id == raced[0]
    runs_left = {k.split("/")[1] for k in objects.list("_run", recursive=True)}
    assert runs_left <= {"order", "tmp", raced[0]}


def test_two_equal_jobs_started_at_once_join(
    place: Place, sample: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torchlens.storage.runs as runs

    objects = open_objects(place)
    real = runs.plan_layout
    raced: list[str] = []

    def race(*args: Any, **kwargs: Any) -> Any:
        if not raced:
            raced.append("")
            spec = sample.make_spec(provenance={"job": 2}, block_rows=16)
            raced[0] = open_run(objects, spec).run_id
        return real(*args, **kwargs)

    monkeypatch.setattr(runs, "plan_layout", race)
    late = open_run(objects, sample.make_spec())
    assert late.run_id == raced[0]
    assert late.layout.block_rows == 16


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, object()])
def test_identity_must_be_json(value: Any) -> None:
    with pytest.raises(DataError, match="identity must be JSON"):
        RunSpec(1, {"a": ArraySpec((), "bool")}, identity={"x": value})


def test_a_run_needs_rows_and_layers() -> None:
    with pytest.raises(DataError, match="at least one row"):
        RunSpec(0, {"a": ArraySpec((), "bool")})
    with pytest.raises(DataError, match="at least one layer"):
        RunSpec(1, {})


def test_a_changed_run_record_is_refused(finished: Path) -> None:
    (path,) = finished.glob("_run/*/run.json")
    body = json.loads(path.read_text())
    body["identity"]["model"]["weights"] = "forged"
    path.write_text(json.dumps(body))
    with pytest.raises(ManifestError, match="was changed after the run began"):
        open_store(finished)

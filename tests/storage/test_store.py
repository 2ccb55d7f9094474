"""Rows go in and come out the same, in every kind of place."""

import pickle
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from torchlens.errors import DataError, StoreError
from torchlens.storage import (
    ArraySpec,
    LayerReader,
    ObjectStore,
    RunSpec,
    StoreWriter,
    open_run,
    open_store,
)
from torchlens.storage.dtypes import SUPPORTED, carrier

Place = str | ObjectStore


def write(
    place: Any, name: str, rows: NDArray[Any], dtype: str, block_rows: int = 16
) -> StoreWriter:
    spec = RunSpec(
        len(rows), {name: ArraySpec(rows.shape[1:], dtype)}, block_rows=block_rows
    )
    writer = open_run(place, spec)
    for number in writer.missing():
        start, stop = writer.span(number)
        block = writer.block(number)
        block.write(name, rows[start:stop])
        block.commit([str(i) for i in range(start, stop)])
    assert writer.consolidate()
    return writer


@pytest.fixture(scope="module")
def counted() -> tuple[LayerReader, NDArray[Any]]:
    """Return a layer of 75 rows and the array it must equal."""
    rows = np.arange(75 * 6, dtype="float32").reshape(75, 2, 3)
    return write(None, "layer", rows, "float32").open_store()["layer"], rows


def test_rows_written_in_pieces_come_back(place: Place, sample: ModuleType) -> None:
    with open_run(place, sample.make_spec()) as writer:
        assert writer.missing() == tuple(range(19))
        sample.write_all(writer)
        assert writer.missing() == ()
    store = open_store(place)
    assert store.complete and store.layers == ("conv", "fc[0]")
    for name in store.layers:
        expected = sample.make_rows(name, 0, sample.NUM_ROWS)
        assert store[name].dtype == expected.dtype
        np.testing.assert_array_equal(store[name][:], expected)
        np.testing.assert_array_equal(np.asarray(store[name]), expected)
    assert store.ids == tuple(sample.make_ids(0, sample.NUM_ROWS))
    frame = store.to_pandas()
    assert list(frame.columns) == ["sample", "id", "label"]
    assert frame["label"].tolist() == [row % 7 for row in range(sample.NUM_ROWS)]
    assert store.verify(deep=True).ok


@pytest.mark.parametrize("dtype", SUPPORTED)
def test_every_dtype_comes_back_bit_for_bit(place: Place, dtype: str) -> None:
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (37, 3 * carrier(dtype).itemsize), dtype="uint8")
    if dtype == "bool":
        raw &= 1
    rows = raw.view(carrier(dtype))
    reader = write(place, "layer", rows, dtype).open_store()["layer"]
    assert reader.dtype.name == dtype == reader.dtype_name
    assert reader.numpy().tobytes() == raw.tobytes()
    assert reader[[30, 2]].tobytes() == raw[[30, 2]].tobytes()


def test_bfloat16_values_are_numbers_to_a_reader() -> None:
    from ml_dtypes import bfloat16

    values = np.array([[1.5, -2.0], [np.nan, 3e38]], "float32").astype(bfloat16)
    reader = write(None, "layer", values, "bfloat16").open_store()["layer"]
    np.testing.assert_array_equal(reader[0].astype("float32"), [1.5, -2.0])
    assert np.array_equal(reader[:].view("uint16"), values.view("uint16"))


def test_all_nan_and_all_zero_rows_are_stored_not_skipped(place: Place) -> None:
    rows = np.zeros((40, 4), "float32")
    rows[20:] = np.nan
    writer = write(place, "layer", rows, "float32")
    np.testing.assert_array_equal(writer.open_store()["layer"][:], rows)
    assert writer.open_store().verify(deep=True).ok


@given(
    start=st.none() | st.integers(-90, 90),
    stop=st.none() | st.integers(-90, 90),
    step=st.none() | st.integers(-20, 20).filter(bool),
)
@settings(deadline=None)
def test_slices_are_those_of_numpy(
    counted: tuple[LayerReader, NDArray[Any]],
    start: int | None,
    stop: int | None,
    step: int | None,
) -> None:
    reader, rows = counted
    key = slice(start, stop, step)
    np.testing.assert_array_equal(reader[key], rows[key])


@given(index=st.lists(st.integers(-75, 74), max_size=40))
@settings(deadline=None)
def test_integer_arrays_are_those_of_numpy(
    counted: tuple[LayerReader, NDArray[Any]], index: list[int]
) -> None:
    reader, rows = counted
    np.testing.assert_array_equal(reader[index], rows[np.array(index, int)])


@given(mask=st.lists(st.booleans(), min_size=75, max_size=75))
@settings(deadline=None)
def test_masks_are_those_of_numpy(
    counted: tuple[LayerReader, NDArray[Any]], mask: list[bool]
) -> None:
    reader, rows = counted
    np.testing.assert_array_equal(reader[np.array(mask)], rows[np.array(mask)])


@pytest.mark.parametrize(
    "key", [0, -1, np.int64(74), (3, 1), (slice(2, 30), 0), (..., 2), ..., (5,),
            (slice(None), slice(None), 1), ([3, 1], slice(None), 0), ([3, 1], [0, 1]),
            ([3, 1], [1, 0], [0, 2]), (4, slice(None), [0, 2, 1]), (np.array(5), None),
            (np.arange(75) % 5 == 0, 1), np.array(7), np.array([7, 2], "uint8")]
)  # fmt: skip
def test_other_keys_are_those_of_numpy(
    counted: tuple[LayerReader, NDArray[Any]], key: Any
) -> None:
    reader, rows = counted
    np.testing.assert_array_equal(reader[key], rows[key])


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (75, "Row 75 is out of range: layer 'layer' has 75"),
        (-76, "Row -76 is out of range"),
        ([0, 99], "Row 99 is out of range"),
        ([True, False], "mask has 2 entries for the 75 rows"),
        (np.array([2**64 - 1], "uint64"), "Row 18446744073709551615 is out of range"),
        (np.array(True), "one-dimensional array"),
        ([0.5], "integers or booleans, not by float64"),
        ("s1", "one-dimensional array"),
        ([[1]], r"shape \[1, 1\] came"),
    ],
)
def test_wrong_keys_are_explained(
    counted: tuple[LayerReader, NDArray[Any]], key: Any, message: str
) -> None:
    with pytest.raises(IndexError, match=message):
        counted[0][key]


def test_chunks_come_in_any_order(counted: tuple[LayerReader, NDArray[Any]]) -> None:
    reader, rows = counted
    assert reader.num_chunks == 5
    for order in (None, [4, 0, 2, 1, 3]):
        seen = {start: values.copy() for start, values in reader.iter_chunks(order)}
        assert len(seen) == 5
        for start, values in seen.items():
            np.testing.assert_array_equal(values, rows[start : start + len(values)])
        assert sum(map(len, seen.values())) == 75
    with pytest.raises(DataError, match="5 chunks, numbered from 0; chunk 5"):
        list(reader.iter_chunks([5]))


def test_rows_are_read_into_an_array_of_the_callers(
    counted: tuple[LayerReader, NDArray[Any]],
) -> None:
    reader, rows = counted
    out = np.zeros((20, 2, 3), "float32")
    reader.read_into(30, out)
    np.testing.assert_array_equal(out, rows[30:50])
    with pytest.raises(DataError, match="contiguous array"):
        reader.read_into(0, np.zeros((20, 3, 2), "float32"))
    with pytest.raises(IndexError, match="out of range"):
        reader.read_into(60, out)


def test_rows_are_found_by_id(place: Place, sample: ModuleType) -> None:
    with open_run(place, sample.make_spec()) as writer:
        sample.write_all(writer)
    store = open_store(place)
    ids = ["sample-0140", "sample-0003", "sample-0003"]
    expected = sample.make_rows("conv", 0, sample.NUM_ROWS)[[140, 3, 3]]
    np.testing.assert_array_equal(store["conv"].rows(ids=ids), expected)
    assert store.rows_of(ids).tolist() == [140, 3, 3]
    with pytest.raises(DataError, match="no sample 'nobody'.*ids look like 'sample-0"):
        store["conv"].rows(ids=["nobody"])
    with pytest.raises(DataError, match="must be a list"):
        store.rows_of("sample-0003")
    with pytest.raises(KeyError, match=r"no layer 'x'.*conv, fc\[0\]"):
        store["x"]


def test_a_running_job_shows_committed_rows_only(
    place: Place, sample: ModuleType
) -> None:
    writer = open_run(place, sample.make_spec())
    for block in (1, 2, 5, 18):
        sample.write_block(writer, block)
    half = writer.block(7)
    half.write("conv", sample.make_rows("conv", 56, 64))
    store = open_store(place, allow_partial=True)
    expected = [*range(8, 24), *range(40, 48), *range(144, 150)]
    assert not store.complete
    reader = store["conv"]
    assert reader.shape == (len(expected), 4, 3)
    assert reader.row_numbers.tolist() == expected
    rows = sample.make_rows("conv", 0, sample.NUM_ROWS)[expected]
    np.testing.assert_array_equal(reader[:], rows)
    np.testing.assert_array_equal(reader[::-3], rows[::-3])
    np.testing.assert_array_equal(reader[[20, 1, 29]], rows[[20, 1, 29]])
    np.testing.assert_array_equal(
        np.concatenate([values.copy() for _, values in reader.iter_chunks()]), rows
    )
    assert store.ids == reader.ids == tuple(f"sample-{row:04d}" for row in expected)
    assert store.to_pandas()["sample"].tolist() == expected
    np.testing.assert_array_equal(reader.rows(ids=["sample-0044"])[0], rows[20])
    with pytest.raises(DataError, match="no sample 'sample-0000'"):
        reader.rows(ids=["sample-0000"])
    assert store.verify(deep=True).ok
    assert store.verify().missing_blocks == 15


def test_a_run_without_a_committed_block_shows_no_rows(
    place: Place, sample: ModuleType
) -> None:
    open_run(place, sample.make_spec())
    store = open_store(place, allow_partial=True)
    assert store["conv"].shape == (0, 4, 3)
    assert store["conv"][:].shape == (0, 4, 3)
    assert store.ids == () and len(store.to_pandas()) == 0
    assert list(store["conv"].iter_chunks()) == []


def test_info_tells_where_everything_came_from(
    place: Place, sample: ModuleType
) -> None:
    with open_run(place, sample.make_spec(), writer={"rank": 3}) as writer:
        sample.write_all(writer)
    store = open_store(place)
    info = store.info()
    assert info["num_rows"] == info["committed_rows"] == sample.NUM_ROWS
    assert info["zarr_path"] == store.zarr_path
    assert info["layers"]["fc[0]"]["path"] == "data.zarr/fc~5b0~5d"
    assert info["layers"]["conv"]["shape"] == [150, 4, 3]
    assert info["layers"]["conv"]["bytes"] == 150 * 48
    (run,) = info["runs"]
    assert run["identity"]["model"]["weights"] == "abc"
    assert run["provenance"] == {"note": "a test"}
    assert run["finished"] and run["num_blocks"] == run["committed_blocks"] == 19
    assert {commit.writer["rank"] for commit in store.commits} == {3}


def test_failed_rows_and_counters_are_kept(place: Place, sample: ModuleType) -> None:
    writer = open_run(place, RunSpec(4, {"a": ArraySpec((2,), "float32")}))
    block = writer.block(0)
    block.write("a", np.full((writer.layout.block_rows, 2), np.nan, "float32"))
    block.commit(["x"], failed=[0], counters={"a": {"nan": np.int64(2)}}, batches=[1])
    store = open_store(place, allow_partial=True)
    assert store.failed == (0,)
    assert store.commits[0].counters == {"a": {"nan": 2}}
    assert store.commits[0].batches == [1]


@pytest.mark.parametrize("url", ["local", "memory://pickled/store"])
def test_a_store_survives_pickling(
    url: str, tmp_path: Path, sample: ModuleType
) -> None:
    place = str(tmp_path / "store") if url == "local" else url
    with open_run(place, sample.make_spec()) as writer:
        sample.write_all(writer)
    reader = open_store(place)["conv"]
    reader[0]
    again = pickle.loads(pickle.dumps(reader))
    np.testing.assert_array_equal(again[:], reader[:])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda b: b.write("x", np.zeros((1, 4, 3), "f4")), r"stores no layer 'x'"),
        (lambda b: b.write("conv", np.zeros((1, 3, 4), "f4")), r"shape \[n, 4, 3\]"),
        (lambda b: b.write("conv", np.zeros((1, 4, 3), "f8")), "declared float32"),
        (lambda b: b.write("conv", np.zeros((1, 4, 3), "f4"), 9), "row 8 is next"),
        (lambda b: b.write("conv", np.zeros((9, 4, 3), "f4")), "holds rows 8 to 15"),
        (lambda b: b.commit(["a"]), "has 8 rows; 1 ids"),
        (lambda b: b.commit([1] * 8), "must be text; 1 came"),
        (lambda b: b.commit(["a"] * 8), "'a' comes twice"),
        (lambda b: b.commit(list("abcdefgh"), {"m": [1]}), "'m' has 1 values"),
        (lambda b: b.commit(list("abcdefgh"), failed=[3]), r"rows \[3\] are not in"),
    ],
)
def test_wrong_calls_of_a_block_are_explained(
    sample: ModuleType, call: Any, message: str
) -> None:
    block = open_run(None, sample.make_spec()).block(1)
    with pytest.raises((DataError, StoreError), match=message):
        call(block)


def test_a_block_with_missing_rows_cannot_be_committed(sample: ModuleType) -> None:
    writer = open_run(None, sample.make_spec())
    block = writer.block(0)
    block.write("conv", sample.make_rows("conv", 0, 8))
    block.write("fc[0]", sample.make_rows("fc[0]", 0, 5))
    with pytest.raises(StoreError, match=r"layer 'fc\[0\]' 5 rows of 8 are written"):
        block.commit(sample.make_ids(0, 8))
    assert writer.committed() == frozenset()


def test_a_buffer_may_be_reused_after_write(sample: ModuleType) -> None:
    writer = open_run(None, sample.make_spec(num_rows=8))
    block = writer.block(0)
    buffer = np.empty((3, 4, 3), "float32")
    for row in range(0, 8, 3):
        piece = sample.make_rows("conv", row, min(row + 3, 8))
        buffer[: len(piece)] = piece
        block.write("conv", buffer[: len(piece)])
        buffer[:] = -1
    block.write("fc[0]", sample.make_rows("fc[0]", 0, 8))
    block.commit(sample.make_ids(0, 8))
    writer.consolidate()
    expected = sample.make_rows("conv", 0, 8)
    np.testing.assert_array_equal(writer.open_store()["conv"][:], expected)


def test_tensors_choose_rows_as_arrays_do(
    counted: tuple[LayerReader, NDArray[Any]],
) -> None:
    torch = pytest.importorskip("torch")
    reader, rows = counted
    np.testing.assert_array_equal(reader[torch.tensor([3, -1])], rows[[3, -1]])
    np.testing.assert_array_equal(reader[torch.tensor(3)], rows[3])
    np.testing.assert_array_equal(reader[torch.arange(75) < 9], rows[:9])
    for key in (torch.tensor(True), torch.tensor(3.0)):
        with pytest.raises(IndexError, match="one-dimensional array"):
            reader[key]


@pytest.mark.parametrize("value", [2**70, b"\xe9".decode("utf-8", "surrogateescape")])
def test_metadata_beyond_the_format_is_refused_by_column(value: object) -> None:
    spec = RunSpec(1, {"layer": ArraySpec((2,), "float32")}, block_rows=16)
    block = open_run(None, spec).block(0)
    block.write("layer", np.zeros((1, 2), "float32"))
    with pytest.raises(DataError, match="column 'size' cannot be stored"):
        block.commit(["a"], metadata={"size": [value]})

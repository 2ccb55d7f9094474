"""Writer threads: order, budget, the first error, and nothing half committed."""

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from torchlens.errors import NonFiniteError, StoreError
from torchlens.extract.blocks import Block
from torchlens.extract.pieces import OpenBlock, Piece, to_numpy
from torchlens.extract.staging import DirectStaging
from torchlens.extract.writing import BlockPipe

STAGING = DirectStaging()
FILL = {"a": torch.tensor(float("nan")), "b": torch.tensor(0)}


class FakeWriter:
    """Stands for the store's block writer; slow or broken as wanted."""

    def __init__(self, error: Exception | None = None, seconds: float = 0.0) -> None:
        self.error = error
        self.seconds = seconds
        self.written: list[tuple[str, int, Any]] = []
        self.commits: list[dict[str, Any]] = []

    def write(self, name: str, rows: Any, start_row: int) -> None:
        time.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        self.written.append((name, start_row, rows.copy()))

    def commit(self, **facts: Any) -> bool:
        self.commits.append(facts)
        return True


def open_block(writer: FakeWriter, index: int = 0, rows: int = 8) -> OpenBlock:
    block = OpenBlock(Block(index, index * rows, (index + 1) * rows), writer)  # type: ignore[arg-type]  # a double
    block.facts.ids = [f"s{row}" for row in range(rows)]
    return block


def piece(
    pipe: BlockPipe, layer: str, start: int, value: float = 1.0, **facts: Any
) -> Piece:
    dtype = torch.int64 if layer == "b" else torch.float32
    buffer = pipe.buffer(STAGING, (4, 2), dtype).fill_(value)
    ids = [f"s{row}" for row in range(start, start + 4)]
    defaults: dict[str, Any] = {"holes": [], "overflowed": None}
    return Piece(layer, start, buffer, buffer, ids=ids, **(defaults | facts))


def pipe_of(budget: int = 10_000, **options: Any) -> BlockPipe:
    return BlockPipe(budget_bytes=budget, fill=FILL, **options)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_rows_are_written_in_order_and_committed_once(num_threads: int) -> None:
    writers = [FakeWriter(seconds=0.001) for _ in range(5)]
    with pipe_of(num_threads=num_threads) as pipe:
        for index, writer in enumerate(writers):
            block = open_block(writer, index)
            for start in (0, 4):
                for layer in ("a", "b"):
                    pipe.put(block, piece(pipe, layer, start, start + index))
            pipe.seal(block)
        pipe.drain()
    for index, writer in enumerate(writers):
        places = [(name, row - 8 * index) for name, row, _ in writer.written]
        assert places == [("a", 0), ("b", 0), ("a", 4), ("b", 4)]
        assert [float(rows[0, 0]) for *_, rows in writer.written] == [
            index, index, index + 4, index + 4,
        ]  # fmt: skip
        assert len(writer.commits) == 1 and writer.commits[0]["ids"][0] == "s0"
    assert pipe.committed_blocks == 5 and pipe.committed_bytes == 5 * 2 * (32 + 64)


def test_block_that_is_not_sealed_is_not_committed() -> None:
    writer = FakeWriter()
    with pipe_of() as pipe:
        pipe.put(open_block(writer), piece(pipe, "a", 0))
        pipe.drain()
    assert writer.written and not writer.commits


def test_first_error_of_a_writer_stops_everything_with_its_place() -> None:
    broken, fine = FakeWriter(OSError("disk on fire")), FakeWriter()
    with pytest.raises(StoreError, match="layer 'a', block 0.*disk on fire") as caught:
        with pipe_of() as pipe:
            first, second = open_block(broken), open_block(fine, 1)
            pipe.put(first, piece(pipe, "a", 0))
            for _ in range(200):
                pipe.check()
                time.sleep(0.01)
            pipe.put(second, piece(pipe, "a", 0))
    assert isinstance(caught.value.__cause__, OSError)
    assert not fine.written and not broken.commits


def test_typed_errors_keep_their_type() -> None:
    writer = FakeWriter(StoreError("no space left"))
    with pytest.raises(StoreError, match="^no space left") as caught:
        with pipe_of() as pipe:
            pipe.put(open_block(writer), piece(pipe, "a", 0))
            pipe.drain()
    assert caught.value.__notes__ == ["while writing layer 'a', block 0 (rows 0 to 7)"]


def test_error_of_the_caller_drops_what_is_queued() -> None:
    writer = FakeWriter(seconds=0.05)
    with pytest.raises(KeyError):
        with pipe_of() as pipe:
            block = open_block(writer)
            for start in (0, 4):
                pipe.put(block, piece(pipe, "a", start))
            pipe.seal(block)
            raise KeyError("the model failed")
    assert len(writer.written) <= 1 and not writer.commits


def test_threads_end_with_the_pipe() -> None:
    before = threading.active_count()
    with pipe_of(num_threads=3):
        assert threading.active_count() == before + 3
    assert threading.active_count() == before


def test_buffers_stay_within_the_budget() -> None:
    held: list[int] = []

    class Counting(DirectStaging):
        def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            held.append(1)
            return super().empty(shape, dtype)

    writer = FakeWriter(seconds=0.005)
    with pipe_of(budget=3 * 32) as pipe:
        block = open_block(writer, rows=80)
        for start in range(0, 80, 4):
            buffer = pipe.buffer(Counting(), (4, 2), torch.float32)
            pipe.put(block, Piece("a", start, buffer, buffer, [], None, ["s"] * 4))
        pipe.drain()
    assert len(held) == 3 and len(writer.written) == 20


def test_buffers_of_another_shape_take_the_place_of_free_ones() -> None:
    with pipe_of(budget=64) as pipe:
        block = open_block(FakeWriter())
        pipe.put(block, piece(pipe, "a", 0))
        pipe.drain()
        assert pipe.buffer(STAGING, (5, 2), torch.float32).shape == (5, 2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nonfinite_values_are_counted_with_their_ids(bad: float) -> None:
    writer = FakeWriter()
    with pipe_of() as pipe:
        block = open_block(writer, rows=4)
        part = piece(pipe, "a", 0)
        part.rows[2, 1] = bad
        pipe.put(block, part)
        pipe.seal(block)
        pipe.drain()
    counts = writer.commits[0]["counters"]["a"]
    assert counts["nonfinite_values"] == 1 and counts["nonfinite_ids"] == ["s2"]
    assert pipe.counts["a"].nonfinite_rows == 1


def test_nonfinite_values_are_refused_by_policy_and_nothing_is_committed() -> None:
    writer = FakeWriter()
    with pytest.raises(NonFiniteError, match="'a' has 1 values that are NaN.*'s3'"):
        with pipe_of(nonfinite="raise") as pipe:
            block = open_block(writer, rows=4)
            part = piece(pipe, "a", 0)
            part.rows[3, 0] = float("nan")
            pipe.put(block, part)
            pipe.seal(block)
            pipe.drain()
    assert not writer.written and not writer.commits


def test_overflow_is_refused_by_policy() -> None:
    with pytest.raises(NonFiniteError, match="2 values too large for the dtype"):
        with pipe_of(nonfinite="raise") as pipe:
            lost = torch.tensor([0, 2, 0, 0])
            block = open_block(FakeWriter(), rows=4)
            pipe.put(block, piece(pipe, "a", 0, overflowed=lost))
            pipe.drain()


def test_holes_are_filled_and_not_counted() -> None:
    writer = FakeWriter()
    with pipe_of(nonfinite="raise") as pipe:
        block = open_block(writer, rows=4)
        for layer in ("a", "b"):
            pipe.put(block, piece(pipe, layer, 0, holes=[1]))
        pipe.seal(block)
        pipe.drain()
    (_, _, floats), (_, _, integers) = writer.written
    assert np.isnan(floats[1]).all() and (floats[[0, 2, 3]] == 1).all()
    assert (integers[1] == 0).all() and not writer.commits[0]["counters"]


def test_bfloat16_is_handed_over_as_bits() -> None:
    bits = to_numpy(torch.tensor([1.0, -2.0], dtype=torch.bfloat16))
    assert bits.dtype == np.uint16 and bits.tolist() == [0x3F80, 0xC000]

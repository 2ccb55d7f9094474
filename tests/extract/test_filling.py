"""Rows reach their piece whatever the batch size; late copies are waited for."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchlens.extract.blocks import Block
from torchlens.extract.filling import BlockFiller, LayerTarget
from torchlens.extract.pieces import OpenBlock, Piece
from torchlens.extract.staging import DirectStaging, Staging


class LateStaging(DirectStaging):
    """Copies nothing until it is asked to settle, as a device may."""

    def __init__(self) -> None:
        self.pending: list[tuple[Tensor, Tensor]] = []

    def copy(self, values: Tensor, target: Tensor) -> None:
        self.pending.append((values.clone(), target))

    def settle(self) -> None:
        for values, target in self.pending:
            target.copy_(values)
        self.pending.clear()


class FakePipe:
    """Keeps what pieces held at the moment they were handed over."""

    def __init__(self) -> None:
        self.rows: dict[str, list[Tensor]] = {}
        self.pieces: list[Piece] = []
        self.sealed = 0

    def buffer(self, staging: Staging, shape: Any, dtype: torch.dtype) -> Tensor:
        return staging.empty(shape, dtype).fill_(-1)

    def put(self, block: OpenBlock, piece: Piece) -> None:
        self.rows.setdefault(piece.layer, []).append(piece.rows.clone())
        self.pieces.append(piece)

    def seal(self, block: OpenBlock) -> None:
        self.sealed += 1

    def joined(self, layer: str) -> Tensor:
        return torch.cat(self.rows[layer])


def make(
    staging: Staging, dtype: torch.dtype = torch.float32, **pieces: int
) -> tuple[FakePipe, BlockFiller]:
    pipe = FakePipe()
    layers = {name: LayerTarget((2,), dtype, rows) for name, rows in pieces.items()}
    filler = BlockFiller(pipe, staging, layers, saturate=False)  # type: ignore[arg-type]  # a double
    return pipe, filler


def begin(filler: BlockFiller, rows: int) -> OpenBlock:
    block = OpenBlock(Block(0, 0, rows), None)  # type: ignore[arg-type]  # not written
    block.facts.ids = [f"s{row}" for row in range(rows)]
    filler.begin(block)
    return block


@settings(deadline=None)
@given(
    rows=st.integers(1, 70),
    batch=st.integers(1, 20),
    shards=st.integers(1, 9),
    late=st.booleans(),
)
def test_every_row_arrives_once_in_order(
    rows: int, batch: int, shards: int, late: bool
) -> None:
    staging = LateStaging() if late else DirectStaging()
    pipe, filler = make(staging, a=min(shards * batch, rows), b=rows)
    begin(filler, rows)
    values = torch.arange(rows * 2.0).reshape(rows, 2)
    for start in range(0, rows, batch):
        part = values[start : start + batch]
        places = filler.places(len(part))
        filler.copy({"a": part, "b": -part}, places)
        filler.advance(len(part))
    assert torch.equal(pipe.joined("a"), values)
    assert torch.equal(pipe.joined("b"), -values)
    assert pipe.sealed == 1
    for piece in pipe.pieces:
        count = len(piece.rows)
        assert piece.ids == [f"s{n}" for n in range(piece.start, piece.start + count)]


def test_rows_captured_in_place_need_no_copy() -> None:
    pipe, filler = make(DirectStaging(), a=4)
    begin(filler, 4)
    filler.places(4)["a"].copy_(torch.ones(4, 2))
    filler.advance(4)
    assert bool((pipe.joined("a") == 1).all())


@pytest.mark.parametrize("staging", [DirectStaging(), LateStaging()])
def test_overflow_is_counted_for_the_right_rows(staging: Staging) -> None:
    pipe, filler = make(staging, torch.float16, a=6)
    begin(filler, 6)
    for value in (1.0, 7e4, 2.0):
        part = torch.tensor([[1.0, 1.0], [value, 1.0]])
        filler.copy({"a": part}, filler.places(2))
        filler.advance(2)
    overflowed = pipe.pieces[0].overflowed
    assert overflowed is not None and overflowed.tolist() == [0, 0, 0, 1, 0, 0]


@pytest.mark.parametrize("staging", [DirectStaging(), LateStaging()])
def test_scattered_rows_leave_holes(staging: Staging) -> None:
    pipe, filler = make(staging, torch.float16, a=6)
    begin(filler, 6)
    places = filler.places(4)
    filler.scatter({"a": torch.tensor([[5.0, 5], [7e4, 6]])}, places, [1, 3])
    filler.advance(4)
    places = filler.places(2)
    filler.scatter({}, places, [])
    filler.advance(2)
    rows, piece = pipe.joined("a"), pipe.pieces[0]
    assert rows[1].tolist() == [5, 5] and rows[3, 1] == 6 and bool((rows[0] == 0).all())
    assert piece.holes == [0, 2, 4, 5]
    assert piece.overflowed is not None and piece.overflowed.tolist() == [
        0,
        0,
        0,
        1,
        0,
        0,
    ]


def test_layer_that_a_batch_does_not_have_is_empty() -> None:
    pipe, filler = make(DirectStaging(), a=4, b=4)
    begin(filler, 4)
    for _ in range(2):
        places = filler.places(2)
        filler.copy({"a": torch.ones(2, 2)}, {"a": places["a"]})
        filler.leave_empty("b", places["b"])
        filler.advance(2)
    by_layer = {piece.layer: piece for piece in pipe.pieces}
    assert by_layer["a"].holes == [] and by_layer["b"].holes == [0, 1, 2, 3]

"""Blocks tile the rows, batches tile the block, whatever the sizes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchlens.extract.blocks import Block, cut_blocks, pending_blocks

ROWS = st.integers(0, 3000)
SIZE = st.integers(1, 700)


@given(ROWS, SIZE)
def test_blocks_tile_the_rows_in_order(num_rows: int, block_rows: int) -> None:
    blocks = cut_blocks(num_rows, block_rows)
    assert [row for b in blocks for row in range(b.start, b.stop)] == list(
        range(num_rows)
    )
    assert [b.index for b in blocks] == list(range(len(blocks)))
    assert all(len(b) == block_rows for b in blocks[:-1])


@given(ROWS, SIZE, SIZE)
def test_batches_tile_their_block_and_only_the_last_is_short(
    num_rows: int, block_rows: int, batch_size: int
) -> None:
    for block in cut_blocks(num_rows, block_rows):
        batches = list(block.batches(batch_size))
        assert [r for rows in batches for r in rows] == list(
            range(block.start, block.stop)
        )
        assert all(len(rows) == batch_size for rows in batches[:-1])


@given(st.integers(1, 3000), SIZE, SIZE)
def test_batches_of_a_block_do_not_depend_on_the_length_of_the_dataset(
    num_rows: int, block_rows: int, batch_size: int
) -> None:
    short, long = cut_blocks(num_rows, block_rows), cut_blocks(9999, block_rows)
    for one, other in zip(short[:-1], long, strict=False):
        assert list(one.batches(batch_size)) == list(other.batches(batch_size))


@given(ROWS, SIZE, st.sets(st.integers(0, 50)))
def test_pending_blocks_are_those_without_a_commit(
    num_rows: int, block_rows: int, committed: set[int]
) -> None:
    blocks = cut_blocks(num_rows, block_rows)
    pending = pending_blocks(blocks, committed)
    assert {b.index for b in pending} == {b.index for b in blocks} - committed
    assert list(pending) == sorted(pending, key=lambda block: block.index)


def test_block_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one row each; got num_rows=4"):
        cut_blocks(4, 0)


def test_block_length_counts_its_rows() -> None:
    assert len(Block(3, 30, 37)) == 7

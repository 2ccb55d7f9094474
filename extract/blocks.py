"""Row ranges as units of work: how a dataset is cut and which ranges are left.

Every way of sharing the work is a way of choosing blocks, so this module is where
another process or machine would take its part.  It knows no data and no store.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Block", "cut_blocks", "pending_blocks"]


@dataclass(frozen=True, slots=True)
class Block:
    """Rows `start <= row < stop`, worked, written and resumed as one."""

    index: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def batches(self, batch_size: int) -> Iterator[range]:
        """Yield the row ranges of the batches, cut from the start of the block.

        The cut depends on the block alone, so a block that is worked again is worked
        in the same batches; only the last one may be short.
        """
        for start in range(self.start, self.stop, batch_size):
            yield range(start, min(start + batch_size, self.stop))


def cut_blocks(num_rows: int, block_rows: int) -> tuple[Block, ...]:
    """Return the blocks that tile `num_rows` rows, in order; the last may be short."""
    if num_rows < 0 or block_rows < 1:
        raise ValueError(
            f"Blocks need a non-negative row count and at least one row each; got "
            f"num_rows={num_rows}, block_rows={block_rows}."
        )
    starts = range(0, num_rows, block_rows)
    return tuple(
        Block(index, start, min(start + block_rows, num_rows))
        for index, start in enumerate(starts)
    )


def pending_blocks(
    blocks: Sequence[Block], committed: Collection[int]
) -> tuple[Block, ...]:
    """Return the blocks without a commit record, in order."""
    return tuple(block for block in blocks if block.index not in committed)

"""Sizes of chunks, shards and blocks as a function of the row.

A chunk is about 1 MiB: smaller ones cost CPU to write, bigger ones cost a random
reader.  A shard is 64 MiB: one put, few files.  All are powers of two in rows, so every
shard divides the block and no shard ever has two writers.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torchlens.errors import DataError

from .run_spec import ArraySpec

_CHUNK_BYTES = 1 << 20
_SHARD_BYTES = 64 << 20
_LARGEST_SHARD_BYTES = 512 << 20
_MANY_SHARDS = 16_000
_MANY_BLOCKS = 20_000
_BLOCKS_PER_WORKER = 8


@dataclass(frozen=True, slots=True)
class Layout:
    """How rows are cut.

    Attributes:
        num_rows: Rows of every array.
        block_rows: Rows of a block, the unit of work and resume.
        arrays: Layer name to (chunk_rows, shard_rows).
    """

    num_rows: int
    block_rows: int
    arrays: Mapping[str, tuple[int, int]]

    @property
    def num_blocks(self) -> int:
        """Number of blocks; the last may be short."""
        return -(-self.num_rows // self.block_rows)

    def span(self, block: int) -> tuple[int, int]:
        """Return the rows [start, stop) of a block."""
        if not 0 <= block < self.num_blocks:
            raise DataError(
                f"There is no block {block}: the run has {self.num_blocks} blocks, "
                f"numbered from 0."
            )
        start = block * self.block_rows
        return start, min(start + self.block_rows, self.num_rows)

    @property
    def num_objects(self) -> int:
        """Number of shards over all layers."""
        return sum(-(-self.num_rows // shard) for _, shard in self.arrays.values())


def plan_layout(
    num_rows: int,
    arrays: Mapping[str, ArraySpec],
    batch_size: int = 1,
    *,
    block_rows: int | None = None,
    world_size: int = 1,
    ram_bytes: int = 4 << 30,
    max_block_bytes: int | None = None,
) -> Layout:
    """Choose rows per chunk, shard and block.

    Args:
        num_rows: Rows of every array.
        arrays: Layer name to array.
        batch_size: Samples run together; no batch crosses a block.
        block_rows: Rows of a block, a power of two not below the batch size; None
            chooses.
        world_size: Processes that share the blocks.
        ram_bytes: Memory for one shard per layer, twice (filling and writing).
        max_block_bytes: Upper bound of a block over all layers, as far as the batch
            size permits; None sets none.

    Raises:
        DataError: If `block_rows` is no power of two or below the batch size.
    """
    if num_rows < 1 or batch_size < 1 or world_size < 1:
        raise DataError(
            "num_rows, batch_size and world_size must be at least 1; they are "
            f"{num_rows}, {batch_size} and {world_size}."
        )
    smallest = _power_of_two_above(batch_size)
    wanted = {
        name: _chunk_and_shard(spec.row_bytes, num_rows, ram_bytes // (2 * len(arrays)))
        for name, spec in arrays.items()
    }
    if block_rows is None:
        largest_shard = max(shard for _, shard in wanted.values())
        row_bytes = sum(spec.row_bytes for spec in arrays.values())
        limit = num_rows if max_block_bytes is None else max_block_bytes // row_bytes
        block_rows = _choose_block_rows(
            num_rows, largest_shard, smallest, world_size, limit
        )
    elif block_rows < 1 or block_rows & (block_rows - 1):
        raise DataError(f"block_rows must be a power of two; it is {block_rows}.")
    elif block_rows < smallest:
        raise DataError(
            f"block_rows={block_rows} is too small for batches of {batch_size}: "
            f"it must be a power of two, at least {smallest}."
        )
    cut = {
        name: (min(chunk, block_rows), min(shard, block_rows))
        for name, (chunk, shard) in wanted.items()
    }
    return Layout(num_rows, block_rows, cut)


def _chunk_and_shard(row_bytes: int, num_rows: int, ram_bytes: int) -> tuple[int, int]:
    chunk_rows = _power_of_two_below(_CHUNK_BYTES / row_bytes)
    shard_bytes = min(_SHARD_BYTES, max(ram_bytes, 1))
    while (
        num_rows * row_bytes / shard_bytes > _MANY_SHARDS
        and shard_bytes < _LARGEST_SHARD_BYTES
    ):
        shard_bytes = min(4 * shard_bytes, _LARGEST_SHARD_BYTES)
    chunk_bytes = chunk_rows * row_bytes
    return chunk_rows, chunk_rows * _power_of_two_below(shard_bytes / chunk_bytes)


def _choose_block_rows(
    num_rows: int, largest_shard: int, smallest: int, world_size: int, limit: int
) -> int:
    rows = max(largest_shard, smallest)
    while rows > smallest and (
        num_rows / rows < _BLOCKS_PER_WORKER * world_size or rows > limit
    ):
        rows //= 2
    while num_rows / rows > _MANY_BLOCKS:
        rows *= 2
    return rows


def _power_of_two_below(value: float) -> int:
    return 1 << max(0, int(value).bit_length() - 1)


def _power_of_two_above(value: int) -> int:
    return 1 << (value - 1).bit_length()

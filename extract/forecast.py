"""What a run will need, known before its first batch, and refused if it cannot fit.

Sizes follow from the planned shapes alone.  Host memory is compared with every limit
that can be read (see `memory_limits`), stored bytes with the free disk and `max_bytes`.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torchlens.errors import BudgetError
from torchlens.storage import ArraySpec, Layout, plan_layout

from .memory_limits import MemoryRoom

__all__ = ["PiecePlan", "RunForecast", "choose_layout", "forecast_run"]

# Share of the free memory that buffers may take; the model's own activations and the
# page cache that writing needs come on top.
_BUFFER_SHARE = 0.5
_BLOCKS_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class PiecePlan:
    """Rows that are buffered per layer before they are written, and the byte budget.

    A piece is a whole number of batches and, as far as the batch size permits, of
    shards; it never crosses a block.
    """

    rows: Mapping[str, int]
    least_bytes: int
    budget_bytes: int


@dataclass(frozen=True, slots=True)
class RunForecast:
    """Rows, bytes and files of a run, and what is there for them.

    Attributes:
        rows: Rows of every layer.
        num_bytes: Bytes of the whole store.
        bytes_left: Bytes of the blocks that are not committed yet.
        files: Objects of the whole store, metadata and records included.
        host_bytes: Memory for buffers, encoding, and the store itself if in memory.
        device_bytes: Memory for the captured tensors of one batch.
        room: What the tightest memory limit leaves, if any is known.
        free_disk_bytes: Free bytes where a local store lies.
        layers: Bytes of each layer.
    """

    rows: int
    num_bytes: int
    bytes_left: int
    files: int
    host_bytes: int
    device_bytes: int
    room: MemoryRoom | None
    free_disk_bytes: int | None
    layers: Mapping[str, int]

    def __str__(self) -> str:
        text = (
            f"{self.rows} rows x {len(self.layers)} layers, "
            f"{format_bytes(self.num_bytes)} in {self.files} files"
        )
        if self.bytes_left != self.num_bytes:
            text += f", {format_bytes(self.bytes_left)} left to write"
        text += f"; host memory {format_bytes(self.host_bytes)}"
        if self.room is not None:
            text += f" of {format_bytes(self.room.available_bytes)}"
        if self.free_disk_bytes is not None:
            text += f", free disk {format_bytes(self.free_disk_bytes)}"
        return text

    def check(self, max_bytes: int | None) -> None:
        """Refuse a run that cannot fit.

        Raises:
            BudgetError: With the bytes needed and those available.
        """
        largest = max(self.layers, key=lambda name: self.layers[name])
        share = f"The layer {largest!r} takes {format_bytes(self.layers[largest])}"
        if max_bytes is not None and self.num_bytes > max_bytes:
            raise BudgetError(
                f"The run needs {self.num_bytes} bytes "
                f"({format_bytes(self.num_bytes)}), but max_bytes permits "
                f"{int(max_bytes)}. {share}. Extract fewer layers or rows, a narrower "
                f"dtype, or raise max_bytes."
            )
        if self.free_disk_bytes is not None and self.bytes_left > self.free_disk_bytes:
            raise BudgetError(
                f"The run still has to write {self.bytes_left} bytes "
                f"({format_bytes(self.bytes_left)}), but the disk has "
                f"{self.free_disk_bytes} free. {share}. Use another place, fewer "
                f"layers, or a narrower dtype."
            )
        if self.room is not None and self.host_bytes > self.room.available_bytes:
            raise BudgetError(
                f"The run needs {self.host_bytes} bytes of memory "
                f"({format_bytes(self.host_bytes)}), but {self.room.limited_by} leaves "
                f"{self.room.available_bytes}. {share}. Use a smaller batch_size or "
                f"block_rows, fewer layers, or an output_dir instead of memory."
            )


def choose_layout(
    num_rows: int,
    arrays: Mapping[str, ArraySpec],
    *,
    batch_size: int,
    block_rows: int | None,
    room: MemoryRoom | None,
) -> Layout:
    """Cut rows into blocks and shards, smaller ones where memory is short."""
    layout = plan_layout(num_rows, arrays, batch_size=batch_size, block_rows=block_rows)
    if block_rows is not None or room is None:
        return layout
    while True:
        pieces = plan_pieces(arrays, layout, batch_size, room)
        smaller = layout.block_rows // 2
        fits = pieces.least_bytes <= room.available_bytes * _BUFFER_SHARE
        if fits or smaller < batch_size:
            return layout
        layout = plan_layout(
            num_rows, arrays, batch_size=batch_size, block_rows=smaller
        )


def plan_pieces(
    arrays: Mapping[str, ArraySpec],
    layout: Layout,
    batch_size: int,
    room: MemoryRoom | None,
) -> PiecePlan:
    """Decide how many rows of each layer are buffered, within the memory there is."""
    rows = {}
    for name in arrays:
        _, shard_rows = layout.arrays[name]
        whole_batches = -(-shard_rows // batch_size) * batch_size
        rows[name] = min(whole_batches, layout.block_rows, layout.num_rows)
    least = sum(rows[name] * spec.row_bytes for name, spec in arrays.items())
    wanted = _BLOCKS_IN_FLIGHT * least
    if room is not None:
        wanted = min(wanted, int(room.available_bytes * _BUFFER_SHARE))
    return PiecePlan(rows, least, max(least, wanted))


def forecast_run(
    arrays: Mapping[str, ArraySpec],
    layout: Layout,
    pieces: PiecePlan,
    *,
    batch_size: int,
    rows_left: int,
    output_dir: str | None,
    room: MemoryRoom | None,
) -> RunForecast:
    """Compute what a run needs from shapes alone."""
    row_bytes = {name: spec.row_bytes for name, spec in arrays.items()}
    total = sum(row_bytes.values())
    largest_piece = max(pieces.rows[name] * row_bytes[name] for name in arrays)
    # One shard is encoded at a time: its chunks and the object made of them.
    host = pieces.budget_bytes + 2 * largest_piece
    if output_dir is None:
        host += rows_left * total
    return RunForecast(
        rows=layout.num_rows,
        num_bytes=layout.num_rows * total,
        bytes_left=rows_left * total,
        files=layout.num_objects + 2 * layout.num_blocks + len(arrays) + 4,
        host_bytes=host,
        device_bytes=batch_size * total,
        room=room,
        free_disk_bytes=free_disk(output_dir),
        layers={name: layout.num_rows * size for name, size in row_bytes.items()},
    )


def free_disk(output_dir: str | None) -> int | None:
    """Return the free bytes of the disk a local store lies on, or `None`."""
    if output_dir is None:
        return None
    scheme, mark, rest = output_dir.partition("://")
    if mark and scheme != "file":
        return None
    place = Path(rest if mark else output_dir).absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    return shutil.disk_usage(place).free


def format_bytes(num_bytes: int) -> str:
    """Return bytes as people read them, in powers of 1000."""
    value = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} PB"

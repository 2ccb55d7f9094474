"""From batches to pieces: where the next rows of each layer go in host memory.

On the CPU the hook copies captured rows straight into the buffer that the writer
takes; everything that needs a cast, a device copy, or leaves rows out goes through
`Staging` instead.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .pieces import OpenBlock, Piece
from .staging import Staging, cast_rows
from .writing import BlockPipe

__all__ = ["BlockFiller", "LayerTarget"]


@dataclass(frozen=True, slots=True)
class LayerTarget:
    """How rows of one layer are stored: shape, dtype, and rows per piece."""

    row_shape: tuple[int, ...]
    dtype: torch.dtype
    piece_rows: int

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one row."""
        size = self.dtype.itemsize
        for length in self.row_shape:
            size *= length
        return size


class _Filling:
    """The piece of one layer that is being filled."""

    def __init__(self, start: int, buffer: Tensor) -> None:
        self.start = start
        self.buffer = buffer
        self.filled = 0
        self.holes: list[int] = []
        # Counts may still be on their way: they are joined when the piece is full.
        self.overflowed: list[tuple[list[int], Tensor]] = []

    def overflow_counts(self) -> Tensor | None:
        """Return overflowed values per filled row, or `None` if none was counted."""
        if not self.overflowed:
            return None
        joined = torch.zeros(self.filled, dtype=torch.int64)
        for at, counts in self.overflowed:
            joined[at] = counts
        return joined


class BlockFiller:
    """Gives out the places for captured rows, and hands full pieces to the pipe."""

    def __init__(
        self,
        pipe: BlockPipe,
        staging: Staging,
        layers: Mapping[str, LayerTarget],
        *,
        saturate: bool,
    ) -> None:
        self._pipe = pipe
        self._staging = staging
        self._layers = layers
        self._saturate = saturate
        self._block: OpenBlock | None = None
        self._rows = 0
        self._pieces: dict[str, _Filling] = {}

    def begin(self, block: OpenBlock) -> None:
        """Start with the first row of a block."""
        self._block = block
        self._rows = 0
        self._pieces.clear()

    def places(self, num_rows: int) -> dict[str, Tensor]:
        """Return, for each layer, the buffer rows where the next rows go.

        Waits for the writers when all buffers are in use.
        """
        assert self._block is not None
        left = len(self._block.block) - self._rows
        found = {}
        for name, layer in self._layers.items():
            piece = self._pieces.get(name)
            if piece is None:
                rows = min(layer.piece_rows, len(self._block.block))
                shape = (rows, *layer.row_shape)
                buffer = self._pipe.buffer(self._staging, shape, layer.dtype)
                piece = self._pieces[name] = _Filling(self._rows, buffer)
            assert piece.filled + num_rows <= len(piece.buffer) and num_rows <= left
            found[name] = piece.buffer[piece.filled : piece.filled + num_rows]
        return found

    def copy(self, values: Mapping[str, Tensor], places: Mapping[str, Tensor]) -> None:
        """Cast rows and start their copy to the places given for them."""
        for name, place in places.items():
            rows = self._cast(name, values[name], place.dtype, range(len(place)))
            self._staging.copy(rows, place)

    def scatter(
        self,
        values: Mapping[str, Tensor],
        places: Mapping[str, Tensor],
        positions: list[int],
    ) -> None:
        """Copy rows to some positions of their places; the other ones are holes."""
        absent = sorted(set(range(len(next(iter(places.values()))))) - set(positions))
        for name, place in places.items():
            place.zero_()
            if positions:
                rows = self._cast(name, values[name], place.dtype, positions)
                place[positions] = rows.to("cpu")
            piece = self._pieces[name]
            piece.holes += [piece.filled + at for at in absent]

    def _cast(
        self,
        name: str,
        rows: Tensor,
        dtype: torch.dtype,
        positions: Sequence[int],
    ) -> Tensor:
        if rows.dtype is dtype:
            return rows
        cast = cast_rows(rows, dtype, saturate=self._saturate)
        if cast.overflowed is not None:
            counts = self._staging.empty((len(positions),), torch.int64)
            self._staging.copy(cast.overflowed, counts)
            piece = self._pieces[name]
            at = [piece.filled + position for position in positions]
            piece.overflowed.append((at, counts))
        return cast.rows

    def leave_empty(self, name: str, place: Tensor) -> None:
        """Say that a layer has no values for the rows of this batch."""
        piece = self._pieces[name]
        place.zero_()
        piece.holes += range(piece.filled, piece.filled + len(place))

    def advance(self, num_rows: int) -> None:
        """Count the rows of a batch as placed, and hand over pieces that are full."""
        assert self._block is not None
        self._rows += num_rows
        at_end = self._rows == len(self._block.block)
        for piece in self._pieces.values():
            piece.filled += num_rows
        full = [
            name
            for name, piece in self._pieces.items()
            if at_end or piece.filled == len(piece.buffer)
        ]
        if full:
            self._staging.settle()
        for name in full:
            self._hand_over(name, self._pieces.pop(name), self._block)
        if at_end:
            self._pipe.seal(self._block)
            self._block = None

    def _hand_over(self, name: str, piece: _Filling, block: OpenBlock) -> None:
        stop = piece.start + piece.filled
        self._pipe.put(
            block,
            Piece(
                layer=name,
                start=piece.start,
                buffer=piece.buffer,
                rows=piece.buffer[: piece.filled],
                holes=piece.holes,
                overflowed=piece.overflow_counts(),
                ids=block.facts.ids[piece.start : stop],
            ),
        )

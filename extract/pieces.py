"""Rows on their way to the store: a piece of one layer, and the block it belongs to."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchlens.storage import BlockWriter

from .blocks import Block
from .statistics import LayerCounts

__all__ = ["BlockFacts", "OpenBlock", "Piece", "to_numpy"]


@dataclass(slots=True)
class BlockFacts:
    """What is recorded of a block beside its rows; complete when it is sealed."""

    ids: list[str] = field(default_factory=list)
    metadata: dict[str, list[Any]] = field(default_factory=dict)
    failed: list[int] = field(default_factory=list)
    missing: dict[str, list[int]] = field(default_factory=dict)
    batch_rows: list[int] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(slots=True)
class Piece:
    """Consecutive rows of one layer of one block.

    `rows` are those filled of `buffer`; `holes` are positions among them that have no
    value; `overflowed` counts values per row that did not fit the dtype.
    """

    layer: str
    start: int
    buffer: Tensor
    rows: Tensor
    holes: list[int]
    overflowed: Tensor | None
    ids: list[str]


class OpenBlock:
    """A block in work: what came, what is still in a queue, and whether it is all."""

    def __init__(self, block: Block, writer: BlockWriter) -> None:
        self.block = block
        self.writer = writer
        self.facts = BlockFacts()
        self.counts: dict[str, LayerCounts] = defaultdict(LayerCounts)
        self.queued = 0
        self.sealed = False


def to_numpy(rows: Tensor) -> np.ndarray[Any, Any]:
    """Return host rows as the store takes them: bfloat16 as its bit patterns."""
    if rows.dtype is torch.bfloat16:
        bits: np.ndarray[Any, Any] = rows.view(torch.int16).numpy().view(np.uint16)
        return bits
    values: np.ndarray[Any, Any] = rows.numpy()
    return values

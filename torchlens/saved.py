"""The tensors a trace kept, and why one is not there."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from torch import Tensor

from .errors import CaptureError
from .graph import Graph
from .records import OpRecord
from .tensor_tracking import version_of

__all__ = ["Saved"]


@final
@dataclass(frozen=True, slots=True)
class Saved:
    """The tensors a trace kept, and how often each had been written when it was."""

    tensors: Mapping[int, Tensor] = field(default_factory=dict)
    versions: Mapping[int, int | None] = field(default_factory=dict)

    def index_of(self, node: OpRecord) -> int | None:
        """Return under which index the output of `node` is kept, if it is.

        What the model returned is the tensor of the op that made it.
        """
        makers = node.parents if node.kind == "output" else ()
        return next((i for i in (node.index, *makers) if i in self.tensors), None)

    def read(self, graph: Graph, node: OpRecord) -> Tensor:
        """Return the saved output of `node`.

        Raises:
            CaptureError: If it was not saved, or was written to since.
        """
        index = self.index_of(node)
        if index is None:
            raise CaptureError(
                f"The output of {node.label!r} was not saved: this trace holds "
                f"{len(self.tensors)} of {len(graph.nodes)} tensors. Trace again with "
                f"save=tl.label({node.label!r}), a selector that picks it, or "
                "tl.everything()."
            )
        tensor, version = self.tensors[index], self.versions.get(index)
        if version is not None and version_of(tensor) != version:
            raise CaptureError(
                f"The saved output of {node.label!r} was changed in place after the "
                "trace, by code that works on the same memory. Clone tensors taken "
                "from a trace, and the model's output, before changing them."
            )
        return tensor

"""What the user sees of one layer: its passes."""

from dataclasses import dataclass, field
from typing import Any, final

from .errors import SelectorError
from .graph import Graph
from .near_misses import listed
from .op_views import FACTS, Op
from .saved import Saved

__all__ = ["Layer"]


@final
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Layer:
    """All executions of one layer; with a single one, everything its op has.

    Attributes:
        graph: The graph it belongs to.
        nodes: Indices of its ops, in the order of the passes.
        saved: The tensors of the trace.
    """

    graph: Graph
    nodes: tuple[int, ...]
    saved: Saved = field(default_factory=Saved)

    @property
    def ops(self) -> tuple[Op, ...]:
        """Return one op for each pass."""
        return tuple(Op(self.graph, node, self.saved) for node in self.nodes)

    @property
    def op(self) -> Op:
        """Return the only op.

        Raises:
            SelectorError: If the layer has several passes.
        """
        if len(self.nodes) > 1:
            raise SelectorError(
                f"{self.layer_label!r} ran {len(self.nodes)} times. Choose a pass: "
                f"{listed(op.label for op in self.ops)}, or take them all from .ops."
            )
        return self.ops[0]

    @property
    def layer_label(self) -> str:
        """Return the label without a pass."""
        return self.graph.nodes[self.nodes[0]].layer_label

    @property
    def label(self) -> str:
        """Return the label without a pass."""
        return self.layer_label

    @property
    def num_passes(self) -> int:
        """Return how many executions the layer had."""
        return len(self.nodes)

    @property
    def type(self) -> str:
        """Return the function's name as labels have it."""
        return self.graph.nodes[self.nodes[0]].type

    @property
    def func_name(self) -> str:
        """Return the function's name as called."""
        return self.graph.nodes[self.nodes[0]].func_name

    @property
    def params(self) -> tuple[str, ...]:
        """Return the addresses of the parameters that any pass read."""
        names = (name for op in self.ops for name in op.params)
        return tuple(dict.fromkeys(names))

    # Any: the attribute of the op decides, and Op declares each of them.
    def __getattr__(self, name: str) -> Any:
        """Return what the only op has under this name."""
        if name not in FACTS:
            raise AttributeError(f"A layer has no attribute {name!r}.")
        return getattr(self.op, name)

    def __len__(self) -> int:
        """Return the number of passes."""
        return len(self.nodes)

    def __dir__(self) -> list[str]:
        """Return the attributes, those of the op included."""
        return sorted({*object.__dir__(self), *FACTS})

    def __eq__(self, other: object) -> bool:
        """Return whether `other` shows the same layer of the same graph."""
        if not isinstance(other, Layer):
            return NotImplemented
        return self.graph is other.graph and self.nodes == other.nodes

    def __hash__(self) -> int:
        """Return a hash that goes with `==`."""
        return hash((id(self.graph), self.nodes))

    def __repr__(self) -> str:
        """Return one line."""
        if len(self.nodes) == 1:
            return repr(self.ops[0]).replace("<Op", "<Layer", 1)
        return f"<Layer {self.layer_label}, {len(self.nodes)} passes>"

    def __str__(self) -> str:
        """Return a page for the only pass, or a line for each of several."""
        if len(self.nodes) == 1:
            return str(self.ops[0])
        lines = [f"  {op!r}" for op in self.ops]
        return "\n".join(
            [f"Layer {self.layer_label}: {len(self.nodes)} passes", *lines]
        )

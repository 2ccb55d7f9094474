"""What the user sees of one op.

Views are made when asked for and hold the graph and the saved tensors, never the other
way round, so that dropping a trace frees its memory at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MemberDescriptorType
from typing import Any, final

import torch
from torch import Tensor

from .graph import Graph
from .records import ArgRef, OpRecord, Path, SiteKey
from .saved import Saved
from .sources import Source
from .units import counted, shaped, sized, timed

__all__ = ["FACTS", "Op"]


@final
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Op:
    """One executed op, or an input or output of the model."""

    graph: Graph
    index: int
    saved: Saved = field(default_factory=Saved)

    @property
    def record(self) -> OpRecord:
        """Return the facts as recorded."""
        return self.graph.nodes[self.index]

    @property
    def key(self) -> SiteKey:
        """Return the structural identity."""
        return self.record.key

    @property
    def label(self) -> str:
        """Return the label, with the pass where there are several."""
        return self.record.label

    @property
    def layer_label(self) -> str:
        """Return the label without the pass."""
        return self.record.layer_label

    @property
    def pass_index(self) -> int:
        """Return which execution of its layer this is, from 1."""
        return self.record.pass_index

    @property
    def num_passes(self) -> int:
        """Return how many executions its layer had."""
        return self.record.num_passes

    @property
    def type(self) -> str:
        """Return the function's name as labels have it, such as "maxpool2d"."""
        return self.record.type

    @property
    def func_name(self) -> str:
        """Return the function's name as called, such as "relu_"."""
        return self.record.func_name

    @property
    def out(self) -> Tensor:
        """Return the saved output.

        Raises:
            CaptureError: If the trace did not save it.
        """
        return self.saved.read(self.graph, self.record)

    @property
    def is_saved(self) -> bool:
        """Return whether the trace kept the output."""
        return self.saved.index_of(self.record) is not None

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the output."""
        return self.record.spec.shape

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the output."""
        dtype: torch.dtype = getattr(torch, self.record.spec.dtype)
        return dtype

    @property
    def device(self) -> torch.device:
        """Return the device of the output."""
        return torch.device(self.record.spec.device)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the output."""
        return self.record.spec.nbytes

    @property
    def output_index(self) -> int | None:
        """Return the position among several outputs of one call."""
        return self.record.output_index

    @property
    def output_path(self) -> Path:
        """Return where in the call's result this output is."""
        return self.record.output_path

    @property
    def parents(self) -> tuple[str, ...]:
        """Return the labels of the nodes it read."""
        return tuple(self.graph.nodes[node].label for node in self.record.parents)

    @property
    def children(self) -> tuple[str, ...]:
        """Return the labels of the nodes that read it."""
        nodes = self.graph.children(self.index)
        return tuple(self.graph.nodes[node].label for node in nodes)

    @property
    def module(self) -> str:
        """Return the address of the innermost module it ran in."""
        return self.graph.module_calls[self.record.module_call].address

    @property
    def module_call(self) -> str:
        """Return the innermost module call it ran in, such as "layer1.0.relu:2"."""
        return self.graph.module_calls[self.record.module_call].label

    @property
    def module_calls(self) -> tuple[str, ...]:
        """Return every module call it ran in, outermost first."""
        labels: list[str] = []
        number: int | None = self.record.module_call
        while number is not None:
            call = self.graph.module_calls[number]
            labels.append(call.label)
            number = call.parent
        return tuple(reversed(labels))

    @property
    def params(self) -> tuple[str, ...]:
        """Return the addresses of the parameters it read."""
        return self.record.params

    @property
    def buffers(self) -> tuple[str, ...]:
        """Return the addresses of the buffers it read or wrote."""
        return self.record.buffers

    @property
    def args(self) -> tuple[Any, ...]:
        """Return the positional arguments; tensors are `ArgRef`s."""
        return self.record.args

    @property
    def kwargs(self) -> Mapping[str, Any]:
        """Return the keyword arguments; tensors are `ArgRef`s."""
        return self.record.kwargs

    @property
    def is_inplace(self) -> bool:
        """Return whether the call wrote into one of its arguments."""
        return self.record.inplace

    @property
    def is_view(self) -> bool:
        """Return whether the output shares memory with an argument."""
        return self.record.view

    @property
    def requires_grad(self) -> bool:
        """Return whether the output was connected to autograd."""
        return self.record.requires_grad

    @property
    def flops_forward(self) -> int | None:
        """Return the floating-point operations; `None` where no formula is known."""
        return self.record.flops

    @property
    def macs_forward(self) -> int | None:
        """Return the multiply-accumulates, half the FLOPs."""
        return self.record.macs

    @property
    def duration_seconds(self) -> float:
        """Return the host time of the call."""
        return self.record.duration_seconds

    @property
    def source(self) -> Source:
        """Return the lines of source code that led here."""
        return Source(self.graph.frames(self.record))

    def __eq__(self, other: object) -> bool:
        """Return whether `other` shows the same op of the same graph."""
        if not isinstance(other, Op):
            return NotImplemented
        return self.graph is other.graph and self.index == other.index

    def __hash__(self) -> int:
        """Return a hash that goes with `==`."""
        return hash((id(self.graph), self.index))

    def __repr__(self) -> str:
        """Return one line: label, shape, dtype, module."""
        spec = self.record.spec
        place = f"in {self.module_call}" if self.record.kind == "op" else "of the model"
        return f"<Op {self.label} {shaped(spec.shape)} {spec.dtype} {place}>"

    def __str__(self) -> str:
        """Return a page that describes the op."""
        record, spec = self.record, self.record.spec
        call = f"{record.func_name}({_arguments(self)})"
        notes = [
            note
            for note, holds in (
                ("in place", record.inplace),
                ("a view of its input", record.view),
                (f"output {self.output_index}", self.output_index is not None),
            )
            if holds
        ]
        where = f"{self.source}" + (f": {self.source.text}" if self.source.text else "")
        cost = f"{counted(record.flops)} FLOPs, {timed(record.duration_seconds)}"
        pairs = [
            ("output", f"{shaped(spec.shape)} {spec.dtype} on {spec.device}"),
            ("bytes", sized(spec.nbytes)),
            ("saved", "yes" if self.is_saved else "no"),
            ("parents", ", ".join(self.parents) or "none"),
            ("children", ", ".join(self.children) or "none"),
        ]
        if record.kind == "op":
            pairs += [
                ("call", ", ".join([call, *notes])),
                ("pass", f"{self.pass_index} of {self.num_passes}"),
                ("module", " > ".join(self.module_calls)),
                ("params", ", ".join(self.params) or "none"),
                ("cost", cost),
                ("source", where),
            ]
        return _page(f"{record.kind.capitalize()} {self.label}", pairs)


FACTS = frozenset(
    name
    for name, value in vars(Op).items()
    if isinstance(value, property | MemberDescriptorType) and not name.startswith("_")
)
"""Names that a view of several ops passes on to its only op."""


def _page(title: str, pairs: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in pairs)
    lines = [f"  {name.ljust(width)}  {value}".rstrip() for name, value in pairs]
    return "\n".join([title, *lines])


def _arguments(op: Op) -> str:
    """Return the call's arguments as text, tensors by the name of their origin."""
    texts = [_argument(op.graph, value) for value in op.args]
    texts += [f"{name}={_argument(op.graph, x)}" for name, x in op.kwargs.items()]
    return ", ".join(texts)


def _argument(graph: Graph, value: Any) -> str:
    if isinstance(value, ArgRef):
        if value.node is not None:
            return graph.nodes[value.node].label
        return value.param or value.buffer or "<tensor>"
    if isinstance(value, tuple | list):
        return f"[{', '.join(_argument(graph, item) for item in value)}]"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."

"""Frozen facts about one forward pass: tensors, ops, module calls, parameters.

Records refer to each other by number or address only, never by reference, and hold no
payload; so they can be kept, compared and freed without cycles.  Look-ups over them
live in `graph`, the user's view of them in `views`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, Literal

NodeKind = Literal["input", "op", "output"]
SiteKind = Literal["op", "module_output", "module_input"]
Path = tuple[str | int, ...]

__all__ = [
    "ArgRef",
    "BufferRecord",
    "CallSite",
    "Frame",
    "Leaf",
    "ModuleCall",
    "ModuleRecord",
    "NodeKind",
    "OpRecord",
    "ParamRecord",
    "Path",
    "SiteKey",
    "SiteKind",
    "TensorSpec",
]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, dtype ("float32") and device ("cuda:0") of one tensor."""

    shape: tuple[int, ...]
    dtype: str
    device: str
    element_bytes: int

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        total = 1
        for size in self.shape:
            total *= size
        return total

    @property
    def nbytes(self) -> int:
        """Return the bytes of a dense tensor of this spec."""
        return self.numel * self.element_bytes


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of source code on the way from the model's forward to an op."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, slots=True)
class CallSite:
    """The instructions that led from a module's forward down to one torch call.

    `steps` runs outermost first; each is a code object and an instruction offset.
    """

    steps: tuple[tuple[CodeType, int], ...]
    digest: str


@dataclass(frozen=True, slots=True)
class SiteKey:
    """Structural identity of a place where one tensor is captured.

    Labels are display names; this is what a plan and a store hold on to.  It names the
    innermost module call (`address`, `call_index` from 1) and, for an op, the call
    site inside it, the function, its ordinal at that call site (from 1), and in every
    case the path into a structured value.
    """

    kind: SiteKind
    address: str
    call_index: int
    func_name: str = ""
    call_site: str = ""
    ordinal: int = 0
    path: Path = ()


@dataclass(frozen=True, slots=True)
class ArgRef:
    """Stands for a tensor inside an op's recorded arguments.

    Exactly one of `node`, `param`, `buffer` is set, or none when the tensor came from
    outside every record (`value` then holds it if payloads were kept).  `written_by` is
    the node that last wrote this tensor's memory through another name.
    """

    node: int | None = None
    param: str | None = None
    buffer: str | None = None
    written_by: int | None = None
    value: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class OpRecord:
    """One node of the graph: an executed op's one output tensor, or a boundary.

    Attributes:
        index: Position among all nodes (inputs, ops, outputs) in execution order.
        kind: "op", or "input" / "output" for the boundary of the model.
        type: Normalised function name, such as "conv2d" or "maxpool2d".
        func_name: Name as called, such as "relu_".
        layer_label: Label shared by every pass of this layer, such as "linear_1_1".
        type_index: k of the label: k-th layer of this type, from 1.
        step: n of the label: n-th layer overall, from 1; 0 for boundaries.
        pass_index: Which execution of the layer this is, from 1.
        num_passes: How many executions the layer had.
        spec: Shape, dtype and device of the output tensor.
        parents: Node indices this node read, in argument order, without repeats.
        params: Addresses of the parameters it read.
        buffers: Addresses of the buffers it read or wrote.
        module_call: Index of the innermost module call it ran in.
        call: Number of the torch call; outputs of one call share it.
        output_path: Where in the call's result this tensor is; () for a plain tensor.
        num_outputs: How many tensors the call returned.
        inplace: Whether the call wrote into one of its arguments.
        view: Whether the output shares memory with an argument.
        requires_grad: Whether the output is connected to autograd.
        func: The callable; `None` for boundaries and identities.
        args: Positional arguments with tensors replaced by `ArgRef`.
        kwargs: Keyword arguments, likewise.
        call_site: Instructions inside the module call; `None` for boundaries.
        duration_seconds: Host time of the call.
        flops: Floating-point operations, a fused multiply-add counted as 2; `None`
            where no formula is known.
        key: Structural identity.
    """

    index: int
    kind: NodeKind
    type: str
    func_name: str
    layer_label: str
    type_index: int
    step: int
    pass_index: int
    num_passes: int
    spec: TensorSpec
    parents: tuple[int, ...]
    params: tuple[str, ...]
    buffers: tuple[str, ...]
    module_call: int
    call: int
    output_path: Path
    num_outputs: int
    inplace: bool
    view: bool
    requires_grad: bool
    func: Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    call_site: CallSite | None
    duration_seconds: float
    flops: int | None
    key: SiteKey

    @property
    def label(self) -> str:
        """Return the shortest exact label: with the pass only where there are more."""
        if self.num_passes == 1:
            return self.layer_label
        return f"{self.layer_label}:{self.pass_index}"

    @property
    def output_index(self) -> int | None:
        """Return the position among several outputs, or `None` for a single one."""
        head = self.output_path[0] if self.output_path else None
        return head if isinstance(head, int) else None

    @property
    def macs(self) -> int | None:
        """Return multiply-accumulates, half the flops."""
        return None if self.flops is None else self.flops // 2


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor inside a module call's input or output: where it is, who made it."""

    path: Path
    node: int
    spec: TensorSpec


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One pass through one submodule.

    `inputs` paths start with the position (int) or keyword (str) of the argument;
    `outputs` paths are () for a plain tensor.  Nodes `first_node <= i < end_node` were
    created during the call, its children's included.  `direct` tells a call of
    `.forward` that bypassed `__call__`, and so every module hook.  `call_site` lies in
    the parent's forward.
    """

    index: int
    address: str
    call_index: int
    parent: int | None
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    first_node: int
    end_node: int
    direct: bool
    call_site: CallSite | None
    duration_seconds: float

    @property
    def label(self) -> str:
        """Return the address with the call, such as "layer1.0.relu:2"."""
        return f"{self.address}:{self.call_index}"


@dataclass(frozen=True, slots=True)
class ModuleRecord:
    """One submodule: every address it has and the calls it received."""

    address: str
    aliases: tuple[str, ...]
    type_name: str
    type_names: tuple[str, ...]
    calls: tuple[int, ...]
    params: tuple[str, ...]
    buffers: tuple[str, ...]
    training: bool


@dataclass(frozen=True, slots=True)
class ParamRecord:
    """One parameter: tied parameters are one record with several addresses."""

    address: str
    aliases: tuple[str, ...]
    spec: TensorSpec
    requires_grad: bool
    used_by: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BufferRecord:
    """One buffer, labelled `buffer_k`; buffers are never ops."""

    label: str
    address: str
    aliases: tuple[str, ...]
    spec: TensorSpec
    used_by: tuple[int, ...]

"""What a capture knows while it runs: nodes so far, calls so far, open calls.

Filled by the function mode and by module tracking, turned into records at the end.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .call_conditions import CallConditions, Generators
from .records import ArgRef, CallSite, NodeKind, Path, SiteKey, TensorSpec
from .structures import leaves
from .tensor_tracking import Known, Payloads, TensorTable

__all__ = ["CaptureState", "OpenCall", "RawCall", "RawNode", "StopCapture"]


class StopCapture(BaseException):
    """Ends the forward on purpose; no `except Exception` of a model can catch it."""


@dataclass(slots=True, eq=False)
class RawCall:
    """One torch call, or a boundary of the graph; its outputs share it."""

    number: int
    name: str
    type: str
    module_call: int
    func: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    parents: tuple[int, ...] = ()
    params: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    call_site: CallSite | None = None
    inplace: bool = False
    duration_seconds: float = 0.0
    num_outputs: int = 1


@dataclass(slots=True, eq=False)
class RawNode:
    """One node as it was seen; labels are given, `num_passes` is not known yet."""

    kind: NodeKind
    call: RawCall
    layer: int
    pass_index: int
    spec: TensorSpec
    path: Path
    view: bool
    requires_grad: bool
    key: SiteKey


@dataclass(slots=True, eq=False)
class OpenCall:
    """A module call, open until its outputs are known."""

    index: int
    address: str
    call_index: int
    parent: int | None
    chain: int
    inputs: tuple[tuple[Path, int, TensorSpec], ...]
    first_node: int
    direct: bool
    call_site: CallSite | None
    start_seconds: float
    outputs: tuple[tuple[Path, int, TensorSpec], ...] = ()
    end_node: int = -1
    duration_seconds: float = 0.0
    counts: dict[tuple[int, str], int] = field(default_factory=dict)


class CaptureState:
    """Nodes, layers and tensor origins of the capture that is running."""

    def __init__(
        self,
        params: Iterable[tuple[torch.Tensor, Sequence[str]]],
        buffers: Iterable[tuple[torch.Tensor, Sequence[str]]],
        wanted: frozenset[SiteKey] | None,
        stop_at: SiteKey | None,
        detach: bool,
    ) -> None:
        self.table = TensorTable()
        self._known = self.table.known  # read for every argument of every op
        self._writes = self.table.writes
        self._kept: dict[int, list[torch.Tensor]] = {}  # params, buffers by memory
        for tensor, names in params:
            known = self.table.assign(tensor, None, ArgRef(param=names[0]))
            self._kept.setdefault(known.memory, []).append(tensor)
        for tensor, names in buffers:
            known = self.table.assign(tensor, None, ArgRef(buffer=names[0]))
            self._kept.setdefault(known.memory, []).append(tensor)
        self.payloads = Payloads(detach=detach, protected=frozenset(self._kept))
        self.nodes: list[RawNode] = []
        self.calls: list[OpenCall] = []
        self.stack: list[OpenCall] = []
        self.gaps: list[str] = []
        self.layers: dict[tuple[object, ...], int] = {}
        self.passes: list[int] = []  # executions of each layer so far
        self.layer_types: list[str] = []
        self.stopped = False
        self.num_calls = 0  # torch calls; outputs of one call share the number
        self.conditions: dict[int, CallConditions] = {}  # of torch call k
        self.generators = Generators()
        self.full = wanted is None
        self.stop_at = stop_at
        self._wanted = wanted
        self._written: list[tuple[torch.Tensor, torch.Tensor]] = []  # and before
        self._specs: dict[object, TensorSpec] = {}

    def spec_of(self, tensor: torch.Tensor) -> TensorSpec:
        """Return the facts of `tensor`; equal ones are one object."""
        shape, dtype, device = _shape_of(tensor), tensor.dtype, tensor.device
        spec = self._specs.get((shape, dtype, device))
        if spec is None:
            spec = self._specs[shape, dtype, device] = TensorSpec(
                tuple(shape),
                str(dtype).removeprefix("torch."),
                str(device),
                dtype.itemsize,
            )
        return spec

    def layer_of(self, identity: tuple[object, ...], type_name: str) -> tuple[int, int]:
        """Return the layer with this identity and which pass of it this is."""
        layer = self.layers.get(identity)
        if layer is None:
            layer = self.layers[identity] = len(self.passes)
            self.passes.append(0)
            self.layer_types.append(type_name)
        self.passes[layer] += 1
        return layer, self.passes[layer]

    def add(self, node: RawNode, tensor: torch.Tensor) -> Known:
        """Append a node whose output is `tensor`; save it if wanted."""
        index = len(self.nodes)
        self.nodes.append(node)
        known = self.table.assign(tensor, index)
        wanted = self._wanted
        if wanted is None or (wanted and node.key in wanted):
            if not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
                self.payloads.save(index, tensor, known.memory)
        return known

    def maybe_stop(self, key: SiteKey) -> None:
        """End the forward if `key` was the last thing wanted."""
        if self.stop_at is not None and key == self.stop_at:
            self.stopped = True
            raise StopCapture

    def origin(self, tensor: torch.Tensor) -> tuple[Known, ArgRef]:
        """Return where `tensor` comes from and how an op that reads it refers to it.

        Adds an `unknown` node for a tensor that nobody saw.
        """
        known = self._known.get(id(tensor))
        if known is None or known.tensor() is not tensor:
            return self._unseen(tensor)
        if self._writes:
            writer = self.table.writer_after(known)
            if writer is not None:
                return known, self._snapshot(tensor, known.ref, writer)
        if known.version is None or tensor._version == known.version:
            return known, known.ref
        if known.node is None:
            # Layers update running statistics as a matter of course.
            return known, self._snapshot(tensor, known.ref, None)
        known = self._add_unknown(tensor, (known.node,), "was written by")
        return known, known.ref

    def _unseen(self, tensor: torch.Tensor) -> tuple[Known, ArgRef]:
        known = self.table.find_related(tensor)
        if known is None:
            known = self._add_unknown(tensor, (), "came from")
        return known, known.ref

    def _snapshot(
        self, tensor: torch.Tensor, ref: ArgRef, writer: int | None
    ) -> ArgRef:
        """Return a reference to a tensor whose value is no node's output."""
        value = tensor.clone() if self.full else None
        return ArgRef(ref.node, ref.param, ref.buffer, writer, value)

    def add_identity(self, tensor: torch.Tensor, ref: ArgRef, key: SiteKey) -> int:
        """Add an op whose output is the value that `tensor` has right now.

        For tensors that no node gave this value: written through another name, made
        elsewhere and handed on, a parameter.
        """
        identity = (self.stack[-1].chain, "identity", key.kind, key.address, key.path)
        parents = tuple(n for n in (ref.node, ref.written_by) if n is not None)
        raw = self.boundary("op", "identity", tensor, parents, key, identity)
        raw.call.args = (ref,)
        raw.call.params = () if ref.param is None else (ref.param,)
        raw.call.buffers = () if ref.buffer is None else (ref.buffer,)
        self.add(raw, tensor)
        return len(self.nodes) - 1

    def _add_unknown(
        self, tensor: torch.Tensor, parents: tuple[int, ...], what: str
    ) -> Known:
        call = self.stack[-1]
        place = f"{call.address}:{call.call_index}"
        self.gaps.append(
            f"A tensor of shape {list(_shape_of(tensor))} {what} code that the capture "
            f"cannot see, in module call {place!r}."
        )
        ordinal = call.counts[(0, "unknown")] = call.counts.get((0, "unknown"), 0) + 1
        key = SiteKey("op", call.address, call.call_index, "unknown", "", ordinal)
        identity = ("unknown", key)
        return self.add(
            self.boundary("op", "unknown", tensor, parents, key, identity), tensor
        )

    def boundary(
        self,
        kind: NodeKind,
        name: str,
        tensor: torch.Tensor,
        parents: tuple[int, ...],
        key: SiteKey,
        identity: tuple[object, ...] = (),
    ) -> RawNode:
        """Return a node that no torch call made: input, output, identity, unknown."""
        layer, pass_index = self.layer_of(identity, name) if kind == "op" else (-1, 1)
        self.num_calls += 1
        call = RawCall(
            self.num_calls,
            name,
            name,
            self.stack[-1].index if self.stack else 0,
            parents=parents,
        )
        return RawNode(
            kind,
            call,
            layer,
            pass_index,
            self.spec_of(tensor),
            (),
            False,
            tensor.requires_grad,
            key,
        )

    def before_write(self, target: Any) -> None:
        """Save what shares memory with `target`, which is about to change."""
        for _, tensor in leaves(target):
            memory = self.origin(tensor)[0].memory
            self.payloads.before_write(memory)
            for kept in self._kept.pop(memory, ()):
                self._written.append((kept, kept.detach().clone()))

    def wrote(self, tensor: torch.Tensor, first_node: int) -> None:
        """Record that a call wrote into `tensor`; its nodes start at `first_node`."""
        known = self.table.find(tensor)
        if known is None:
            return
        node = known.node
        if node is None or node < first_node:
            node = len(self.nodes) - 1
        self.table.wrote(known.memory, node)

    def restore_written(self) -> None:
        """Give params and buffers that the forward wrote the values of before."""
        with torch.no_grad():
            for tensor, value in self._written:
                tensor.copy_(value)


def _shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the sizes, -1 for those that differ inside a nested tensor."""
    try:
        return tensor.shape
    except RuntimeError:
        return tuple(_size_of(tensor, dim) for dim in range(tensor.dim()))


def _size_of(tensor: torch.Tensor, dim: int) -> int:
    try:
        return tensor.size(dim)
    except RuntimeError:
        return -1

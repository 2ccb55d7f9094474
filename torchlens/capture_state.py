"""What a capture knows while it runs: nodes so far, calls so far, open calls.

Filled by the function mode and by module tracking, turned into records at the end.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .records import ArgRef, CallSite, NodeKind, Path, SiteKey, TensorSpec
from .structures import leaves
from .tensor_tracking import Payloads, TensorTable, memory_key

__all__ = ["CaptureState", "OpenCall", "RawNode", "StopCapture"]


class StopCapture(BaseException):
    """Ends the forward on purpose; no `except Exception` of a model can catch it."""


@dataclass(slots=True, eq=False)
class RawNode:
    """One node as it was seen; labels are given, `num_passes` is not known yet."""

    kind: NodeKind
    type: str
    func_name: str
    layer: int
    pass_index: int
    spec: TensorSpec
    parents: tuple[int, ...]
    params: tuple[str, ...]
    buffers: tuple[str, ...]
    module_call: int
    call: int
    path: Path
    num_outputs: int
    inplace: bool
    view: bool
    requires_grad: bool
    func: Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    call_site: CallSite | None
    duration_seconds: float
    key: SiteKey


@dataclass(slots=True, eq=False)
class OpenCall:
    """A module call, open until its outputs are known."""

    index: int
    module_id: int
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
        params: Mapping[int, str],
        buffers: Mapping[int, tuple[torch.Tensor, list[str]]],
        payloads: Payloads,
        wanted: frozenset[SiteKey] | None,
        stop_at: SiteKey | None,
    ) -> None:
        self.params = params
        self.buffers = {key: names[0] for key, (_, names) in buffers.items()}
        self._kept: dict[int, list[torch.Tensor]] = {}  # buffers by memory
        for buffer, _ in buffers.values():
            self._kept.setdefault(memory_key(buffer), []).append(buffer)
        self.payloads = payloads
        self.table = TensorTable()
        self.nodes: list[RawNode] = []
        self.calls: list[OpenCall] = []
        self.stack: list[OpenCall] = []
        self.gaps: list[str] = []
        self.layers: dict[tuple[object, ...], int] = {}
        self.passes: list[int] = []  # executions of each layer so far
        self.layer_types: list[str] = []
        self.stopped = False
        self.num_calls = 0  # torch calls; outputs of one call share the number
        self.random_states: dict[int, torch.Tensor] = {}  # before torch call k
        self.written: list[tuple[torch.Tensor, torch.Tensor]] = []  # buffer, before
        self._wanted = wanted
        self.stop_at = stop_at
        self._specs: dict[object, str] = {}
        self._refs: dict[int, ArgRef] = {}

    def spec_of(self, tensor: torch.Tensor) -> TensorSpec:
        """Return the facts of `tensor`; names of dtypes and devices are cached."""
        names = self._specs
        dtype, device = tensor.dtype, tensor.device
        dtype_name = names.get(dtype)
        if dtype_name is None:
            dtype_name = names[dtype] = str(dtype).removeprefix("torch.")
        device_name = names.get(device)
        if device_name is None:
            device_name = names[device] = str(device)
        return TensorSpec(tuple(tensor.shape), dtype_name, device_name, dtype.itemsize)

    def layer_of(self, identity: tuple[object, ...], type_name: str) -> tuple[int, int]:
        """Return the layer with this identity and which pass of it this is."""
        layer = self.layers.get(identity)
        if layer is None:
            layer = self.layers[identity] = len(self.passes)
            self.passes.append(0)
            self.layer_types.append(type_name)
        self.passes[layer] += 1
        return layer, self.passes[layer]

    def add(self, node: RawNode, tensor: torch.Tensor) -> int:
        """Append a node whose output is `tensor`; save it if wanted; maybe stop."""
        index = len(self.nodes)
        self.nodes.append(node)
        self.table.assign(tensor, index)
        if (self._wanted is None or node.key in self._wanted) and not (
            torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        ):
            self.payloads.save(index, tensor)
        return index

    def maybe_stop(self, key: SiteKey) -> None:
        """End the forward if `key` was the last thing wanted."""
        if key == self.stop_at:
            self.stopped = True
            raise StopCapture

    def origin(self, tensor: torch.Tensor) -> ArgRef:
        """Return where `tensor` comes from, adding an `unknown` node if nobody saw."""
        node = self.table.node_of(tensor)
        if node is None:
            name = self.params.get(id(tensor))
            if name is not None:
                return ArgRef(param=name)
            name = self.buffers.get(id(tensor))
            if name is not None:
                return ArgRef(buffer=name)
            node = self._add_unknown(tensor)
        writer = self.table.writer_after(tensor, node)
        if writer is not None:
            value = tensor.clone() if self._wanted is None else None
            return ArgRef(node=node, written_by=writer, value=value)
        ref = self._refs.get(node)
        if ref is None:
            ref = self._refs[node] = ArgRef(node=node)
        return ref

    def _add_unknown(self, tensor: torch.Tensor) -> int:
        call = self.stack[-1]
        place = f"{call.address}:{call.call_index}"
        self.gaps.append(
            f"A tensor of shape {list(tensor.shape)} entered in module call {place!r} "
            "from code that the capture cannot see."
        )
        ordinal = call.counts[(0, "unknown")] = call.counts.get((0, "unknown"), 0) + 1
        key = SiteKey("op", call.address, call.call_index, "unknown", "", ordinal)
        return self.add(
            self.boundary("op", "unknown", tensor, (), key, ("unknown", key)), tensor
        )

    def boundary(
        self,
        kind: NodeKind,
        name: str,
        tensor: torch.Tensor,
        parents: tuple[int, ...],
        key: SiteKey,
        identity: tuple[object, ...],
        params: tuple[str, ...] = (),
    ) -> RawNode:
        """Return a node that no torch call made: input, output, identity, unknown."""
        layer, pass_index = self.layer_of(identity, name) if kind == "op" else (-1, 1)
        self.num_calls += 1
        return RawNode(
            kind=kind,
            type=name,
            func_name=name,
            layer=layer,
            pass_index=pass_index,
            spec=self.spec_of(tensor),
            parents=parents,
            params=params,
            buffers=(),
            module_call=self.stack[-1].index if self.stack else 0,
            call=self.num_calls,
            path=(),
            num_outputs=1,
            inplace=False,
            view=False,
            requires_grad=tensor.requires_grad,
            func=None,
            args=(),
            kwargs={},
            call_site=None,
            duration_seconds=0.0,
            key=key,
        )

    def before_write(self, target: Any) -> None:
        """Save payloads that share memory with `target`, which is about to change."""
        for _, tensor in leaves(target):
            memory = memory_key(tensor)
            self.payloads.before_write(memory)
            for buffer in self._kept.pop(memory, ()):
                self.written.append((buffer, buffer.detach().clone()))

    def restore_written(self) -> None:
        """Give buffers that the forward wrote the values they had before."""
        with torch.no_grad():
            for buffer, value in self.written:
                buffer.copy_(value)

    def keep_random_state(self) -> None:
        """Keep the generator's state for the torch call about to run."""
        if self._wanted is None:
            self.random_states[self.num_calls + 1] = torch.get_rng_state()

"""The graph of one forward pass: records in order, edges, module tree, look-ups.

Holds facts only; payloads belong to a trace, and turning what a user writes into sites
belongs to `selectors` and `lookup`.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path as FilePath

import torch

from .call_sites import source_frame
from .records import (
    BufferRecord,
    Frame,
    Leaf,
    ModuleCall,
    ModuleRecord,
    OpRecord,
    ParamRecord,
    SiteKey,
    TensorSpec,
)
from .structures import format_path

_TORCH_FOLDER = str(FilePath(torch.__file__).parent) + os.sep
_OWN_FOLDER = str(FilePath(__file__).parent) + os.sep
_DEPTH_LIMIT = 1 << 12

__all__ = ["Graph", "Site"]


@dataclass(frozen=True, slots=True)
class Site:
    """A place in a graph where one tensor is captured.

    Attributes:
        key: Structural identity, stable over batches and processes.
        node: Index of the node that made the tensor.
        order: Sorts sites by the moment at which the tensor can be caught.
        name: Default name in a store: the module address, with call and path where
            there are several, or the op's label.
        label: Label of the node that made the tensor.
        address: Address of the module for module sites, else `None`.
        spec: Shape, dtype and device as traced.
    """

    key: SiteKey
    node: int
    order: int
    name: str
    label: str
    address: str | None
    spec: TensorSpec


@dataclass(frozen=True)
class Graph:
    """Everything one forward pass did, without payloads.

    Attributes:
        nodes: Inputs, ops and outputs; `OpRecord.index` is the position here.
        module_calls: Calls in the order in which they began; the first is the root's.
        modules: Every submodule, called or not, by primary address; the root is "self".
        params: Parameters by primary address.
        buffers: Buffers, and plain tensor attributes that were read, by address.
        complete: Whether every tensor's origin was seen.
        gaps: One sentence for each tensor whose origin was not seen.
        halted: Whether the forward was stopped on purpose.
        model_name: Class name of the model.
        grad_mode: Whether autograd was on.
        training: Whether the root was in training mode.
    """

    nodes: tuple[OpRecord, ...]
    module_calls: tuple[ModuleCall, ...]
    modules: Mapping[str, ModuleRecord]
    params: Mapping[str, ParamRecord]
    buffers: Mapping[str, BufferRecord]
    complete: bool
    gaps: tuple[str, ...]
    halted: bool
    model_name: str
    grad_mode: bool
    training: bool

    @cached_property
    def ops(self) -> tuple[OpRecord, ...]:
        """Return the executed operations, without the model's boundaries."""
        return tuple(node for node in self.nodes if node.kind == "op")

    @cached_property
    def inputs(self) -> tuple[OpRecord, ...]:
        """Return the model's input nodes."""
        return tuple(node for node in self.nodes if node.kind == "input")

    @cached_property
    def outputs(self) -> tuple[OpRecord, ...]:
        """Return the model's output nodes."""
        return tuple(node for node in self.nodes if node.kind == "output")

    @cached_property
    def _children(self) -> tuple[tuple[int, ...], ...]:
        children: list[list[int]] = [[] for _ in self.nodes]
        for node in self.nodes:
            for parent in node.parents:
                children[parent].append(node.index)
        return tuple(map(tuple, children))

    @cached_property
    def _primary(self) -> dict[str, str]:
        return {
            alias: address
            for address, module in self.modules.items()
            for alias in (address, *module.aliases)
        }

    @cached_property
    def _calls(self) -> dict[str, list[ModuleCall]]:
        calls: dict[str, list[ModuleCall]] = {address: [] for address in self.modules}
        for call in self.module_calls:
            calls[call.address].append(call)
        return calls

    @cached_property
    def _depths(self) -> tuple[int, ...]:
        depths: list[int] = []
        for call in self.module_calls:
            depths.append(0 if call.parent is None else depths[call.parent] + 1)
        return tuple(depths)

    def children(self, index: int) -> tuple[int, ...]:
        """Return the indices of the nodes that read node `index`."""
        return self._children[index]

    def module_at(self, address: str) -> ModuleRecord | None:
        """Return the module at `address`, which may be an alias."""
        primary = self._primary.get(address)
        return None if primary is None else self.modules[primary]

    def calls_of(self, address: str) -> tuple[ModuleCall, ...]:
        """Return the calls of the module at `address`, in order."""
        module = self.module_at(address)
        return () if module is None else tuple(self._calls[module.address])

    def frames(self, op: OpRecord) -> tuple[Frame, ...]:
        """Return the lines of source that led to `op`, outermost first.

        Lines inside torch are left out, unless there are no others.
        """
        sites = [] if op.call_site is None else [op.call_site]
        call: ModuleCall | None = self.module_calls[op.module_call]
        while call is not None:
            if call.call_site is not None:
                sites.append(call.call_site)
            call = None if call.parent is None else self.module_calls[call.parent]
        steps = [step for site in reversed(sites) for step in site.steps]
        own = [
            step
            for step in steps
            if not step[0].co_filename.startswith((_TORCH_FOLDER, _OWN_FOLDER))
        ]
        return tuple(source_frame(code, offset) for code, offset in own or steps)

    def op_site(self, op: OpRecord) -> Site:
        """Return the site that captures `op`'s output right after it ran."""
        return Site(
            key=op.key,
            node=op.index,
            order=(op.index + 1) * 4 * _DEPTH_LIMIT,
            name=op.label,
            label=op.label,
            address=None,
            spec=op.spec,
        )

    def output_site(self, call: ModuleCall, leaf: Leaf) -> Site:
        """Return the site that captures one tensor of a module call's output."""
        depth = _DEPTH_LIMIT - 1 - self._depths[call.index]
        return Site(
            key=SiteKey("module_output", call.address, call.call_index, path=leaf.path),
            node=leaf.node,
            order=(call.end_node * 4 + 1) * _DEPTH_LIMIT + depth,
            name=self._site_name(call, leaf, len(call.outputs) > 1),
            label=self.nodes[leaf.node].label,
            address=call.address,
            spec=leaf.spec,
        )

    def input_site(self, call: ModuleCall, leaf: Leaf) -> Site:
        """Return the site that captures one tensor of a module call's input."""
        name = self._site_name(call, leaf, False)
        return Site(
            key=SiteKey("module_input", call.address, call.call_index, path=leaf.path),
            node=leaf.node,
            order=(call.first_node * 4 + 2) * _DEPTH_LIMIT + self._depths[call.index],
            name=f"{name}.input{format_path(leaf.path)}",
            label=self.nodes[leaf.node].label,
            address=call.address,
            spec=leaf.spec,
        )

    def _site_name(self, call: ModuleCall, leaf: Leaf, with_path: bool) -> str:
        several = len(self._calls[call.address]) > 1
        name = call.label if several else call.address
        return name + format_path(leaf.path) if with_path else name

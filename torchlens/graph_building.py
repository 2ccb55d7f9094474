"""Turns what a capture saw into the frozen records of a graph."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from .capture_state import CaptureState, OpenCall, RawCall, RawNode
from .flops import Shape, flops_of
from .graph import Graph
from .model_access import original_module
from .records import (
    ArgRef,
    BufferRecord,
    Leaf,
    ModuleCall,
    ModuleRecord,
    OpRecord,
    ParamRecord,
)

__all__ = ["ModelNames", "build_graph"]


class ModelNames:
    """Addresses of a model's modules, parameters and buffers, aliases included.

    Attributes:
        model: The root.
        modules: Addresses of each module, the primary one first; the root is "self".
        owned: Names of each module's own parameters and own buffers.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules: dict[nn.Module, list[str]] = {}
        self.owned: dict[nn.Module, tuple[tuple[str, ...], tuple[str, ...]]] = {}
        self._params: dict[int, tuple[torch.Tensor, list[str]]] = {}
        self._buffers: dict[int, tuple[torch.Tensor, list[str]]] = {}
        self._walk(model, "", set())
        for module, (address, *_) in self.modules.items():
            prefix = "" if address == "self" else f"{address}."
            for attribute, value in _plain_tensors(module):
                if id(value) not in self._params and id(value) not in self._buffers:
                    self._buffers[id(value)] = value, [prefix + attribute]

    def _walk(self, module: nn.Module, address: str, above: set[nn.Module]) -> None:
        """Visit `module` and all below it; torch's own walk is many times slower."""
        self.modules.setdefault(module, []).append(address or "self")
        prefix = f"{address}." if address else ""
        params = _add_names(self._params, module._parameters, prefix)
        buffers = _add_names(self._buffers, module._buffers, prefix)
        self.owned.setdefault(module, (params, buffers))
        above.add(module)
        for name, child in module._modules.items():
            if child is not None and child not in above:
                # As if it were not compiled: its code is what runs.
                self._walk(original_module(child), prefix + name, above)
        above.discard(module)

    @property
    def addresses(self) -> dict[nn.Module, str]:
        """Return each module's primary address."""
        return {module: names[0] for module, names in self.modules.items()}

    @property
    def params(self) -> Collection[tuple[torch.Tensor, list[str]]]:
        """Return each parameter with its addresses, the primary one first."""
        return self._params.values()

    @property
    def buffers(self) -> Collection[tuple[torch.Tensor, list[str]]]:
        """Return each buffer, and tensor kept as an attribute, with its addresses."""
        return self._buffers.values()


def _add_names(
    found: dict[int, tuple[torch.Tensor, list[str]]],
    tensors: Mapping[str, torch.Tensor | None],
    prefix: str,
) -> tuple[str, ...]:
    """Add named tensors to `found`, and return the primary names of all of them."""
    primary = []
    for name, tensor in tensors.items():
        if tensor is not None:
            names = found.setdefault(id(tensor), (tensor, []))[1]
            names.append(prefix + name)
            primary.append(names[0])
    return tuple(primary)


def _plain_tensors(module: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """Yield tensors kept as plain attributes, directly or in a list, tuple or dict."""
    for name, value in module.__dict__.items():
        if name in _MODULE_INTERNALS:
            continue
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                if isinstance(item, torch.Tensor):
                    yield f"{name}[{index}]", item
        elif isinstance(value, dict):
            for key, item in value.items():
                if isinstance(item, torch.Tensor):
                    yield f'{name}["{key}"]', item


_MODULE_INTERNALS = frozenset(nn.Module().__dict__)


def build_graph(state: CaptureState, names: ModelNames, grad_mode: bool) -> Graph:
    """Return the graph of a capture that has ended, however it ended."""
    builder = _Builder(state, names)
    nodes = tuple(builder.node(index, raw) for index, raw in enumerate(state.nodes))
    calls = tuple(map(builder.call, state.calls))
    return Graph(
        nodes=nodes,
        module_calls=calls,
        modules=_module_records(names, calls),
        params=_param_records(state, names, nodes),
        buffers=_buffer_records(state, names, nodes),
        complete=not state.gaps,
        gaps=tuple(state.gaps),
        halted=state.stopped,
        model_name=type(names.model).__name__,
        grad_mode=grad_mode,
        training=names.model.training,
    )


class _Builder:
    def __init__(self, state: CaptureState, names: ModelNames) -> None:
        self._state = state
        self._boundaries = {"input": 0, "output": 0}
        self._layers: list[tuple[str, int, int]] = []  # label, k and n of each
        of_type: dict[str, int] = {}
        for step, kind in enumerate(state.layer_types, 1):
            of_type[kind] = number = of_type.get(kind, 0) + 1
            self._layers.append((f"{kind}_{number}_{step}", number, step))
        self._shapes: dict[str, Shape] = {
            addresses[0]: tuple(tensor.shape)
            for tensor, addresses in (*names.params, *names.buffers)
        }

    def node(self, index: int, raw: RawNode) -> OpRecord:
        if raw.kind == "op":
            label, type_index, step = self._layers[raw.layer]
            num_passes = self._state.passes[raw.layer]
        else:
            self._boundaries[raw.kind] += 1
            type_index, step, num_passes = self._boundaries[raw.kind], 0, 1
            label = f"{raw.kind}_{type_index}"
        call = raw.call
        return OpRecord(
            index=index,
            kind=raw.kind,
            type=call.type,
            func_name=call.name,
            layer_label=label,
            type_index=type_index,
            step=step,
            pass_index=raw.pass_index,
            num_passes=num_passes,
            spec=raw.spec,
            parents=call.parents,
            params=call.params,
            buffers=call.buffers,
            module_call=call.module_call,
            call=call.number,
            output_path=raw.path,
            num_outputs=call.num_outputs,
            inplace=call.inplace,
            view=raw.view,
            requires_grad=raw.requires_grad,
            func=call.func,
            args=call.args,
            kwargs=call.kwargs,
            call_site=call.call_site,
            duration_seconds=call.duration_seconds,
            flops=self._flops(raw),
            key=raw.key,
        )

    def _flops(self, raw: RawNode) -> int | None:
        if raw.kind != "op" or raw.path not in ((), (0,)):
            return 0
        return flops_of(raw.call.type, lambda: self._inputs(raw.call), raw.spec.shape)

    def _inputs(self, call: RawCall) -> list[Shape]:
        shapes: list[Shape] = []
        self._collect(call.args, shapes)
        self._collect(tuple(call.kwargs.values()), shapes)
        return shapes

    def _collect(self, value: Any, shapes: list[Shape]) -> None:
        if isinstance(value, ArgRef):
            if value.node is not None:
                shapes.append(self._state.nodes[value.node].spec.shape)
            else:
                shapes.append(self._shapes.get(value.param or value.buffer or "", ()))
        elif isinstance(value, tuple | list):
            for item in value:
                self._collect(item, shapes)

    def call(self, raw: OpenCall) -> ModuleCall:
        return ModuleCall(
            index=raw.index,
            address=raw.address,
            call_index=raw.call_index,
            parent=raw.parent,
            inputs=tuple(Leaf(*item) for item in raw.inputs),
            outputs=tuple(Leaf(*item) for item in raw.outputs),
            first_node=raw.first_node,
            end_node=len(self._state.nodes) if raw.end_node < 0 else raw.end_node,
            direct=raw.direct and raw.parent is not None,
            call_site=raw.call_site,
            duration_seconds=raw.duration_seconds,
        )


def _module_records(
    names: ModelNames, calls: tuple[ModuleCall, ...]
) -> Mapping[str, ModuleRecord]:
    called: dict[str, list[int]] = {}
    for call in calls:
        called.setdefault(call.address, []).append(call.index)
    type_names: dict[type, tuple[str, ...]] = {}
    records = {}
    for module, (address, *aliases) in names.modules.items():
        kind = type(module)
        if kind not in type_names:
            type_names[kind] = tuple(
                f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__[:-1]
            )
        params, buffers = names.owned[module]
        records[address] = ModuleRecord(
            address=address,
            aliases=tuple(aliases),
            type_name=kind.__name__,
            type_names=type_names[kind],
            calls=tuple(called.get(address, ())),
            params=params,
            buffers=buffers,
            training=module.training,
        )
    return records


def _users(nodes: tuple[OpRecord, ...], field: str) -> dict[str, list[int]]:
    users: dict[str, list[int]] = {}
    for node in nodes:
        for name in getattr(node, field):
            users.setdefault(name, []).append(node.index)
    return users


def _param_records(
    state: CaptureState, names: ModelNames, nodes: tuple[OpRecord, ...]
) -> Mapping[str, ParamRecord]:
    users = _users(nodes, "params")
    return {
        address: ParamRecord(
            address=address,
            aliases=tuple(aliases),
            spec=state.spec_of(tensor),
            requires_grad=tensor.requires_grad,
            used_by=tuple(users.get(address, ())),
        )
        for tensor, (address, *aliases) in names.params
    }


def _buffer_records(
    state: CaptureState, names: ModelNames, nodes: tuple[OpRecord, ...]
) -> Mapping[str, BufferRecord]:
    users = _users(nodes, "buffers")
    return {
        address: BufferRecord(
            label=f"buffer_{number}",
            address=address,
            aliases=tuple(aliases),
            spec=state.spec_of(tensor),
            used_by=tuple(users.get(address, ())),
        )
        for number, (tensor, (address, *aliases)) in enumerate(names.buffers, 1)
    }

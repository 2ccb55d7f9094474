"""Turns what a capture saw into the frozen records of a graph."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from .capture_state import CaptureState, OpenCall, RawNode
from .flops import Shape, flops_of
from .graph import Graph
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
    """Addresses of a model's modules, parameters and buffers, aliases included."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules: dict[nn.Module, list[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            self.modules.setdefault(module, []).append(name or "self")
        self.params: dict[int, tuple[torch.Tensor, list[str]]] = {}
        self.buffers: dict[int, tuple[torch.Tensor, list[str]]] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            self.params.setdefault(id(param), (param, []))[1].append(name)
        for name, buffer in model.named_buffers(remove_duplicate=False):
            self.buffers.setdefault(id(buffer), (buffer, []))[1].append(name)
        for module, (address, *_) in self.modules.items():
            for attribute, value in _plain_tensors(module):
                if id(value) in self.params or id(value) in self.buffers:
                    continue
                name = attribute if address == "self" else f"{address}.{attribute}"
                self.buffers.setdefault(id(value), (value, []))[1].append(name)

    @property
    def addresses(self) -> dict[nn.Module, str]:
        """Return each module's primary address."""
        return {module: names[0] for module, names in self.modules.items()}

    @property
    def param_names(self) -> dict[int, str]:
        """Return each parameter's primary address by the object's id."""
        return {key: names[0] for key, (_, names) in self.params.items()}

    def tensors(self) -> Iterable[torch.Tensor]:
        """Yield every parameter and buffer once."""
        for tensor, _ in (*self.params.values(), *self.buffers.values()):
            yield tensor


def _plain_tensors(module: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """Yield tensors kept as plain attributes, directly or in a list, tuple or dict."""
    for name, value in module.__dict__.items():
        if name.startswith("_") and name in _MODULE_INTERNALS:
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
        self._names = names
        self._boundaries = {"input": 0, "output": 0}
        self._positions: list[tuple[int, int]] = []  # k and n of each layer
        of_type: dict[str, int] = {}
        for step, kind in enumerate(state.layer_types, 1):
            of_type[kind] = of_type.get(kind, 0) + 1
            self._positions.append((of_type[kind], step))
        self._shapes: dict[str, Shape] = {
            tensor_names[0]: tuple(tensor.shape)
            for tensor, tensor_names in (
                *names.params.values(),
                *names.buffers.values(),
            )
        }

    def node(self, index: int, raw: RawNode) -> OpRecord:
        if raw.kind == "op":
            type_index, step = self._positions[raw.layer]
            label = f"{raw.type}_{type_index}_{step}"
            num_passes = self._state.passes[raw.layer]
        else:
            self._boundaries[raw.kind] += 1
            type_index, step, num_passes = self._boundaries[raw.kind], 0, 1
            label = f"{raw.kind}_{type_index}"
        return OpRecord(
            index=index,
            kind=raw.kind,
            type=raw.type,
            func_name=raw.func_name,
            layer_label=label,
            type_index=type_index,
            step=step,
            pass_index=raw.pass_index,
            num_passes=num_passes,
            spec=raw.spec,
            parents=raw.parents,
            params=raw.params,
            buffers=raw.buffers,
            module_call=raw.module_call,
            call=raw.call,
            output_path=raw.path,
            num_outputs=raw.num_outputs,
            inplace=raw.inplace,
            view=raw.view,
            requires_grad=raw.requires_grad,
            func=raw.func,
            args=raw.args,
            kwargs=raw.kwargs,
            call_site=raw.call_site,
            duration_seconds=raw.duration_seconds,
            flops=self._flops(raw),
            key=raw.key,
        )

    def _flops(self, raw: RawNode) -> int | None:
        if raw.kind != "op" or raw.path not in ((), (0,)):
            return 0
        shapes: list[Shape] = []
        self._collect(raw.args, shapes)
        self._collect(tuple(raw.kwargs.values()), shapes)
        return flops_of(raw.type, shapes, raw.spec.shape)

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
    records = {}
    for module, (address, *aliases) in names.modules.items():
        records[address] = ModuleRecord(
            address=address,
            aliases=tuple(aliases),
            type_name=type(module).__name__,
            type_names=tuple(
                f"{kind.__module__}.{kind.__qualname__}"
                for kind in type(module).__mro__[:-1]
            ),
            calls=tuple(called.get(address, ())),
            params=tuple(
                names.params[id(parameter)][1][0]
                for parameter in module._parameters.values()
                if parameter is not None
            ),
            buffers=tuple(
                names.buffers[id(buffer)][1][0]
                for buffer in module._buffers.values()
                if buffer is not None
            ),
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
        for tensor, (address, *aliases) in names.params.values()
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
        for number, (tensor, (address, *aliases)) in enumerate(
            names.buffers.values(), 1
        )
    }

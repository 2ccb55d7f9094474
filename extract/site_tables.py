"""What the command line prints about models and stores."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from torchlens.costs import module_costs, params_under
from torchlens.graph import Graph
from torchlens.labels import format_path
from torchlens.model_inputs import ModelInputs
from torchlens.records import TensorSpec
from torchlens.text_tables import format_table
from torchlens.tracing import trace
from torchlens.units import counted, shaped, sized

__all__ = ["module_table", "op_table", "store_table"]

_FAILED_SHOWN = 10


def module_table(model: nn.Module, inputs: ModelInputs) -> str:
    """Return one line for each module output, by the address that names it."""
    graph = _graph(model, inputs)
    costs = module_costs(graph)
    rows = []
    for address, module in graph.modules.items():
        params = sum(param.spec.numel for param in params_under(graph, module))
        calls = graph.calls_of(address)
        if not calls:
            rows.append([address, module.type_name, "not called", "", _or_dash(params)])
            continue
        for call in calls:
            name = call.label if len(calls) > 1 else address
            for leaf in call.outputs:
                rows.append(
                    [
                        name + format_path(leaf.path),
                        module.type_name,
                        *_size(leaf.spec),
                        _or_dash(params),
                        counted(costs[address].flops),
                    ]
                )
    header = ["layer", "type", "row", "bytes/row", "params", "FLOPs"]
    return format_table(header, [row + [""] * (6 - len(row)) for row in rows])


def op_table(model: nn.Module, inputs: ModelInputs) -> str:
    """Return one line for each operation, by its label."""
    graph = _graph(model, inputs)
    rows = [
        [
            op.label,
            op.func_name,
            graph.module_calls[op.module_call].label,
            *_size(op.spec),
            counted(op.flops),
        ]
        for op in graph.ops
    ]
    header = ["label", "function", "in module", "row", "bytes/row", "FLOPs"]
    return format_table(header, rows)


def _graph(model: nn.Module, inputs: ModelInputs) -> Graph:
    one = inputs.take((0,))
    with torch.no_grad():
        found = trace(model, input_args=one.args, input_kwargs=one.kwargs, save="none")
    return found.graph


def _size(spec: TensorSpec) -> list[str]:
    """Return shape and bytes of one sample, taking the first axis for the batch."""
    row = TensorSpec(spec.shape[1:], spec.dtype, spec.device, spec.element_bytes)
    return [f"{shaped(row.shape)} {row.dtype}", sized(row.nbytes)]


def _or_dash(number: int) -> str:
    return counted(number) if number else "-"


def store_table(info: Mapping[str, Any]) -> str:
    """Return what a store holds, for people."""
    state = "complete" if info["complete"] else "unfinished"
    lines = [
        f"{info['url']}: {state}, {info['committed_rows']} of {info['num_rows']} rows"
    ]
    for run in info["runs"]:
        lines.append(
            f"run {run['run_id'][:12]}: {run['committed_blocks']} of "
            f"{run['num_blocks']} blocks of {run['block_rows']} rows, model "
            f"{run['identity'].get('model', {}).get('class_name', 'unknown')}"
        )
    if info["failed_rows"]:
        failed = info["failed_rows"]
        first = ", ".join(map(str, failed[:_FAILED_SHOWN]))
        more = ", .." if len(failed) > _FAILED_SHOWN else ""
        lines.append(
            f"rows that could not be read and are empty, {len(failed)}: {first}{more}"
        )
    rows = [
        [name, shaped(layer["shape"]), layer["dtype"], sized(layer["bytes"])]
        for name, layer in info["layers"].items()
    ]
    lines += ["", format_table(["layer", "shape", "dtype", "bytes"], rows)]
    if info["complete"]:
        lines += ["", f"arrays in {info['zarr_path']}"]
    else:
        lines += ["", f"arrays will be in {info['zarr_path']} when it is finished"]
    return "\n".join(lines)

"""Tables of a trace for pandas: one row an op, a module, a parameter, a buffer."""

from typing import TYPE_CHECKING

from .costs import module_costs, params_under
from .graph import Graph
from .labels import format_path
from .saved import Saved

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["buffers_table", "modules_table", "ops_table", "params_table"]


def ops_table(graph: Graph, saved: Saved) -> "pd.DataFrame":
    """Return one row for each node, boundaries included, in execution order."""
    rows = []
    for node in graph.nodes:
        call = graph.module_calls[node.module_call]
        frames = graph.frames(node)
        rows.append(
            {
                "label": node.label,
                "layer_label": node.layer_label,
                "pass_index": node.pass_index,
                "kind": node.kind,
                "type": node.type,
                "func_name": node.func_name,
                "module": call.address,
                "module_call": call.label,
                "shape": node.spec.shape,
                "dtype": node.spec.dtype,
                "device": node.spec.device,
                "nbytes": node.spec.nbytes,
                "parents": tuple(graph.nodes[index].label for index in node.parents),
                "children": tuple(
                    graph.nodes[index].label for index in graph.children(node.index)
                ),
                "params": node.params,
                "buffers": node.buffers,
                "output_path": format_path(node.output_path),
                "is_inplace": node.inplace,
                "is_view": node.view,
                "requires_grad": node.requires_grad,
                "flops_forward": node.flops,
                "macs_forward": node.macs,
                "duration_seconds": node.duration_seconds,
                "is_saved": saved.index_of(node) is not None,
                "file": frames[-1].file if frames else None,
                "line": frames[-1].line if frames else None,
                "function": frames[-1].function if frames else None,
            }
        )
    counts = ("flops_forward", "macs_forward", "line")
    return _frame(rows, dict.fromkeys(counts, "Int64"))  # holds whole numbers and gaps


def modules_table(graph: Graph) -> "pd.DataFrame":
    """Return one row for each module, called or not, in the model's order."""
    costs = module_costs(graph)
    rows = []
    for address, module in graph.modules.items():
        calls = graph.calls_of(address)
        params = params_under(graph, module)
        rows.append(
            {
                "address": address,
                "aliases": module.aliases,
                "type": module.type_name,
                "num_calls": len(calls),
                "output_shapes": tuple(
                    leaf.spec.shape for call in calls[:1] for leaf in call.outputs
                ),
                "num_ops": costs[address].num_ops,
                "num_params": sum(param.spec.numel for param in params),
                "params_nbytes": sum(param.spec.nbytes for param in params),
                "total_flops_forward": costs[address].flops,
                "num_ops_without_flops": costs[address].num_unknown,
                "duration_seconds": sum(call.duration_seconds for call in calls),
                "training": module.training,
            }
        )
    return _frame(rows)


def params_table(graph: Graph) -> "pd.DataFrame":
    """Return one row for each parameter; a tied one has a single row."""
    return _frame(
        [
            {
                "address": param.address,
                "aliases": param.aliases,
                "shape": param.spec.shape,
                "dtype": param.spec.dtype,
                "device": param.spec.device,
                "num_elements": param.spec.numel,
                "nbytes": param.spec.nbytes,
                "requires_grad": param.requires_grad,
                "used_by": tuple(graph.nodes[index].label for index in param.used_by),
            }
            for param in graph.params.values()
        ]
    )


def buffers_table(graph: Graph) -> "pd.DataFrame":
    """Return one row for each buffer."""
    return _frame(
        [
            {
                "label": buffer.label,
                "address": buffer.address,
                "aliases": buffer.aliases,
                "shape": buffer.spec.shape,
                "dtype": buffer.spec.dtype,
                "device": buffer.spec.device,
                "nbytes": buffer.spec.nbytes,
                "used_by": tuple(graph.nodes[index].label for index in buffer.used_by),
            }
            for buffer in graph.buffers.values()
        ]
    )


def _frame(
    rows: list[dict[str, object]], dtypes: dict[str, str] | None = None
) -> "pd.DataFrame":
    import pandas as pd  # slow to import, and wanted for tables alone

    frame = pd.DataFrame(rows)
    present = {name: kind for name, kind in (dtypes or {}).items() if name in frame}
    return frame.astype(present)

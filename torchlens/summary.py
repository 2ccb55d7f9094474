"""The text that `trace.summary()` prints: the tree of modules and the totals."""

from .costs import Cost, module_costs, params_under, total_cost
from .graph import Graph
from .labels import format_path
from .records import ModuleRecord
from .saved import Saved
from .text_tables import format_table
from .units import counted, shaped, sized

__all__ = ["summarise"]

_HEADER = ("module", "type", "calls", "output", "params", "FLOPs", "ops")
_NUMBERS = (2, 4, 5, 6)  # columns whose cells end in line


def summarise(graph: Graph, saved: Saved, depth: int | None = None) -> str:
    """Return the table of modules, down to `depth` levels, and the totals."""
    costs = module_costs(graph)
    rows = [
        _row(graph, module, costs[address])
        for address, module in graph.modules.items()
        if depth is None or _level(address) <= depth
    ]
    for column in _NUMBERS:
        width = max(len(_HEADER[column]), *(len(row[column]) for row in rows))
        for row in rows:
            row[column] = row[column].rjust(width)
    return "\n".join([format_table(_HEADER, rows), "", *_totals(graph, saved)])


def _level(address: str) -> int:
    return 0 if address == "self" else address.count(".") + 1


def _row(graph: Graph, module: ModuleRecord, cost: Cost) -> list[str]:
    address = module.address
    name = graph.model_name if address == "self" else address.rpartition(".")[2]
    also = f" (also {', '.join(module.aliases)})" if module.aliases else ""
    num_params = sum(param.spec.numel for param in params_under(graph, module))
    called = bool(module.calls)
    return [
        "  " * _level(address) + name + also,
        module.type_name,
        str(len(module.calls)),
        _output(graph, module),
        counted(num_params) if num_params else "-",
        _flops(cost) if called else "-",
        str(cost.num_ops) if called else "-",
    ]


def _output(graph: Graph, module: ModuleRecord) -> str:
    calls = graph.calls_of(module.address)
    if not calls:
        return "not called"
    shapes = [
        f"{format_path(leaf.path)} {shaped(leaf.spec.shape)}".strip()
        for leaf in calls[0].outputs
    ]
    if not shapes:
        return "no tensor"
    more = "" if len(shapes) <= 3 else f", {len(shapes) - 3} more"
    return ", ".join(shapes[:3]) + more


def _flops(cost: Cost) -> str:
    return f">= {counted(cost.flops)}" if cost.num_unknown else counted(cost.flops)


def _totals(graph: Graph, saved: Saved) -> list[str]:
    ops = graph.ops
    params = graph.params.values()
    cost = total_cost(graph)
    unknown = f", {cost.num_unknown} ops without a formula" if cost.num_unknown else ""
    activations = sum(op.spec.nbytes for op in ops if not op.view)
    inputs = ", ".join(
        f"{node.label} {shaped(node.spec.shape)}" for node in graph.inputs
    )
    kept = sum(node.nbytes for node in saved.tensors.values())
    modes = [
        "train mode" if graph.training else "eval mode",
        "grad enabled" if graph.grad_mode else "no grad",
        *(["stopped early"] if graph.halted else []),
    ]
    lines = [
        f"{graph.model_name}: {', '.join(modes)}; inputs: {inputs or 'none'}",
        f"{len(ops)} ops in {len({op.layer_label for op in ops})} layers, "
        f"{len(graph.module_calls)} module calls",
        f"{counted(sum(param.spec.numel for param in params))} parameters "
        f"({sized(sum(param.spec.nbytes for param in params))})",
        f"{_flops(cost)} FLOPs, a multiply-add counted as two{unknown}",
        f"{sized(activations)} of activations, views not counted; "
        f"{len(saved.tensors)} tensors ({sized(kept)}) saved",
    ]
    if not graph.complete:
        lines.append("Not complete:")
        lines += [f"  {gap}" for gap in graph.gaps]
    return lines

"""What the ops inside each module cost, added up over the tree of calls."""

from dataclasses import dataclass

from .graph import Graph
from .records import ModuleRecord, OpRecord, ParamRecord

__all__ = ["Cost", "call_costs", "module_costs", "params_under", "total_cost"]


@dataclass(frozen=True, slots=True)
class Cost:
    """Ops and their FLOPs; `num_unknown` ops have no formula and are left out."""

    num_ops: int = 0
    flops: int = 0
    num_unknown: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        """Return both together."""
        return Cost(
            self.num_ops + other.num_ops,
            self.flops + other.flops,
            self.num_unknown + other.num_unknown,
        )


def total_cost(graph: Graph) -> Cost:
    """Return the cost of the whole forward pass."""
    return sum((_own(op) for op in graph.ops), Cost())


def _own(op: OpRecord) -> Cost:
    return Cost(1, op.flops or 0, int(op.flops is None))


def call_costs(graph: Graph) -> tuple[Cost, ...]:
    """Return the cost of every module call, its children's included."""
    costs = [Cost() for _ in graph.module_calls]
    for op in graph.ops:
        costs[op.module_call] += _own(op)
    for call in reversed(graph.module_calls):  # children have the higher numbers
        if call.parent is not None:
            costs[call.parent] += costs[call.index]
    return tuple(costs)


def module_costs(graph: Graph) -> dict[str, Cost]:
    """Return the cost of every module over all its calls, by primary address.

    A call inside a call of the same module is counted once.
    """
    per_call = call_costs(graph)
    costs = {address: Cost() for address in graph.modules}
    inside: list[frozenset[str]] = []  # addresses of the calls around each call
    for call in graph.module_calls:
        around: frozenset[str] = frozenset()
        if call.parent is not None:
            parent = graph.module_calls[call.parent]
            around = inside[call.parent] | {parent.address}
        inside.append(around)
        if call.address not in around:
            costs[call.address] += per_call[call.index]
    return costs


def params_under(graph: Graph, module: ModuleRecord) -> tuple[ParamRecord, ...]:
    """Return the parameters of a module and of all modules it holds, each once."""
    if module.address == "self":
        return tuple(graph.params.values())
    starts = tuple(f"{name}." for name in (module.address, *module.aliases))
    return tuple(
        param
        for param in graph.params.values()
        if any(name.startswith(starts) for name in (param.address, *param.aliases))
    )

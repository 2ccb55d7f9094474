"""What the user sees of one module."""

from dataclasses import dataclass, field, replace
from typing import Any, final

from .addresses import Place, input_sites, output_sites
from .costs import Cost, call_costs, module_costs, params_under
from .errors import SelectorError
from .graph import Graph, Site
from .labels import format_path
from .near_misses import listed
from .op_views import FACTS, Op
from .records import ModuleRecord
from .saved import Saved
from .units import counted, shaped

__all__ = ["Module"]


@final
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Module:
    """A module's calls, or one of them, or part of its output.

    It has what its output op has (`.out`, `.shape`, `.parents`, ...) when there is
    exactly one.
    """

    graph: Graph
    place: Place
    saved: Saved = field(default_factory=Saved)

    @property
    def record(self) -> ModuleRecord:
        """Return the facts as recorded."""
        return self.place.module

    @property
    def address(self) -> str:
        """Return the primary address."""
        return self.record.address

    @property
    def aliases(self) -> tuple[str, ...]:
        """Return the other addresses of the same module."""
        return self.record.aliases

    @property
    def type_name(self) -> str:
        """Return the name of the module's class."""
        return self.record.type_name

    @property
    def training(self) -> bool:
        """Return whether the module was in training mode."""
        return self.record.training

    @property
    def call_index(self) -> int | None:
        """Return which call this is, from 1; `None` for all of them."""
        return self.place.call_index

    @property
    def num_calls(self) -> int:
        """Return how often the module was called."""
        return len(self.record.calls)

    @property
    def calls(self) -> tuple["Module", ...]:
        """Return a view of each call, in order; the first is `calls[0]`."""
        return tuple(
            replace(self, place=replace(self.place, call_index=call.call_index))
            for call in self.place.calls(self.graph)
        )

    @property
    def params(self) -> tuple[str, ...]:
        """Return the addresses of the module's own parameters."""
        return self.record.params

    @property
    def buffers(self) -> tuple[str, ...]:
        """Return the addresses of the module's own buffers."""
        return self.record.buffers

    @property
    def num_params(self) -> int:
        """Return the elements of all parameters, those of inner modules included."""
        return sum(param.spec.numel for param in params_under(self.graph, self.record))

    @property
    def ops(self) -> tuple[Op, ...]:
        """Return the ops that ran inside, at any depth."""
        spans = [
            range(call.first_node, call.end_node)
            for call in self.place.calls(self.graph)
        ]
        return tuple(
            Op(self.graph, op.index, self.saved)
            for op in self.graph.ops
            if any(op.index in span for span in spans)
        )

    @property
    def outputs(self) -> dict[str, Op]:
        """Return the ops that made the output tensors, by name."""
        return self._ops(output_sites(self.graph, self.place))

    @property
    def inputs(self) -> dict[str, Op]:
        """Return the ops that made the input tensors, by name."""
        return self._ops(input_sites(self.graph, replace(self.place, path=())))

    def _ops(self, sites: tuple[Site, ...]) -> dict[str, Op]:
        return {site.name: Op(self.graph, site.node, self.saved) for site in sites}

    @property
    def output(self) -> Op:
        """Return the op that made the output.

        Raises:
            SelectorError: If there are several output tensors, or none.
        """
        outputs = self.outputs
        if len(outputs) > 1:
            raise SelectorError(
                f"{self.name!r} has {len(outputs)} output tensors. Choose one: "
                f"{listed(outputs)}, or take them all from .outputs."
            )
        return next(iter(outputs.values()))

    @property
    def name(self) -> str:
        """Return the address as it was asked for, with call and path."""
        call = "" if self.call_index is None else f":{self.call_index}"
        return f"{self.place.address}{call}{format_path(self.place.path)}"

    @property
    def total_flops_forward(self) -> int:
        """Return the FLOPs of all ops inside; ops without a formula are left out."""
        return self._cost.flops

    @property
    def total_macs_forward(self) -> int:
        """Return the multiply-accumulates of all ops inside, half the FLOPs."""
        return self._cost.flops // 2

    @property
    def num_ops(self) -> int:
        """Return the number of ops inside, at any depth."""
        return self._cost.num_ops

    @property
    def _cost(self) -> Cost:
        if self.call_index is None:
            return module_costs(self.graph)[self.address]
        (call,) = self.place.calls(self.graph)
        return call_costs(self.graph)[call.index]

    @property
    def duration_seconds(self) -> float:
        """Return the host time of the calls."""
        return sum(call.duration_seconds for call in self.place.calls(self.graph))

    # Any: the attribute of the op decides, and Op declares each of them.
    def __getattr__(self, name: str) -> Any:
        """Return what the only output op has under this name."""
        if name not in FACTS:
            raise AttributeError(f"A module has no attribute {name!r}.")
        return getattr(self.output, name)

    def __dir__(self) -> list[str]:
        """Return the attributes, those of the op included."""
        return sorted({*object.__dir__(self), *FACTS})

    def __eq__(self, other: object) -> bool:
        """Return whether `other` shows the same of the same graph."""
        if not isinstance(other, Module):
            return NotImplemented
        return self.graph is other.graph and self.place == other.place

    def __hash__(self) -> int:
        """Return a hash that goes with `==`."""
        return hash((id(self.graph), self.place))

    def __repr__(self) -> str:
        """Return one line."""
        calls = "1 call" if self.num_calls == 1 else f"{self.num_calls} calls"
        return f"<Module {self.name} ({self.type_name}), {calls}>"

    def __str__(self) -> str:
        """Return a page that describes the module."""
        also = f", also {', '.join(self.aliases)}" if self.aliases else ""
        calls = self.place.calls(self.graph)
        lines = [
            f"Module {self.name}: {self.type_name}{also}",
            f"  calls     {len(calls)}",
            f"  params    {counted(self.num_params)} elements",
            f"  ops       {self.num_ops}",
            f"  cost      {counted(self.total_flops_forward)} FLOPs",
        ]
        for call in calls:
            for leaf in call.outputs:
                made = self.graph.nodes[leaf.node].label
                where = f"{call.label}{format_path(leaf.path)}"
                shape = shaped(leaf.spec.shape)
                lines.append(f"  output    {where} {shape} {leaf.spec.dtype} by {made}")
        return "\n".join(lines)

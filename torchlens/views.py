"""A trace as the user indexes it.

Holds a graph and the saved tensors.  Ops, layers and modules are views made on access,
so nothing in a trace points back at it and its memory goes when the last name does.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final, overload

from torch import Tensor

from .addresses import Place, place_at
from .costs import total_cost
from .errors import SelectorError
from .graph import Graph, Site
from .labels import match_label
from .layer_views import Layer
from .lookup import find_named
from .module_views import Module
from .near_misses import listed
from .op_views import Op
from .saved import Saved
from .selector_algebra import Selector
from .summary import summarise
from .tables import buffers_table, modules_table, ops_table, params_table
from .tensor_views import Buffer, Param
from .tracer import Capture
from .view_lists import ViewList
from .view_lookup import (
    held_view,
    labelled_view,
    layer_view,
    module_view,
    op_view,
)

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Trace"]


@final
class Trace:
    """One forward pass: what ran, and the tensors that were kept.

    `trace[key]` takes a number or slice over all nodes (inputs, ops, outputs); a label,
    which gives a `Layer`, or with a pass an `Op`; a module address, with or without
    call and output path, which gives a `Module`; or a selector of one site.

    Attributes:
        capture: The graph, the saved tensors, what the model returned.
    """

    __slots__ = ("__weakref__", "capture")

    def __init__(self, capture: Capture) -> None:
        self.capture = capture

    @property
    def graph(self) -> Graph:
        """Return the records of the forward pass."""
        return self.capture.graph

    @property
    def payloads(self) -> Mapping[int, Tensor]:
        """Return the saved tensors by node."""
        return self.capture.payloads

    @property
    def output(self) -> Any:
        """Return what the model returned; `None` when it was stopped early."""
        return self.capture.output

    @property
    def saved(self) -> Saved:
        """Return the saved tensors with their write counts."""
        return Saved(self.capture.payloads, self.capture.versions)

    @property
    def ops(self) -> ViewList[Op]:
        """Return the ops, without inputs, outputs and buffers."""
        graph, saved, ops = self.graph, self.saved, self.graph.ops
        return ViewList(
            [op.label for op in ops],
            lambda number: Op(graph, ops[number].index, saved),
            lambda name: op_view(graph, saved, name),
            lambda: ops_table(graph, saved),
        )

    @property
    def layers(self) -> ViewList[Layer]:
        """Return the layers, each with its passes, without inputs and outputs."""
        graph, saved = self.graph, self.saved
        nodes: dict[str, list[int]] = {}
        for op in graph.ops:
            nodes.setdefault(op.layer_label, []).append(op.index)
        passes = [tuple(numbers) for numbers in nodes.values()]
        return ViewList(
            list(nodes),
            lambda number: Layer(graph, passes[number], saved),
            lambda name: layer_view(graph, saved, name),
            lambda: ops_table(graph, saved),
        )

    @property
    def modules(self) -> ViewList[Module]:
        """Return every module, called or not, by address; aliases are found too."""
        graph, saved = self.graph, self.saved
        records = list(graph.modules.values())
        return ViewList(
            list(graph.modules),
            lambda number: Module(
                graph, Place(records[number].address, records[number]), saved
            ),
            lambda name: module_view(graph, saved, place_at(graph, name)),
            lambda: modules_table(graph),
        )

    @property
    def params(self) -> ViewList[Param]:
        """Return the parameters by address; aliases are found too."""
        graph = self.graph
        views = [Param(graph, record) for record in graph.params.values()]
        return ViewList(
            list(graph.params),
            views.__getitem__,
            lambda name: held_view(views, name, "parameter", "trace.params"),
            lambda: params_table(graph),
        )

    @property
    def buffers(self) -> ViewList[Buffer]:
        """Return the buffers by address; labels (`buffer_1`) and aliases work too."""
        graph = self.graph
        views = [Buffer(graph, record) for record in graph.buffers.values()]
        return ViewList(
            list(graph.buffers),
            views.__getitem__,
            lambda name: held_view(views, name, "buffer", "trace.buffers"),
            lambda: buffers_table(graph),
        )

    @property
    def total_flops_forward(self) -> int:
        """Return the FLOPs of all ops; ops without a formula are left out."""
        return total_cost(self.graph).flops

    @property
    def total_macs_forward(self) -> int:
        """Return the multiply-accumulates of all ops, half the FLOPs."""
        return self.total_flops_forward // 2

    @property
    def complete(self) -> bool:
        """Return whether every tensor's origin was seen; if not, see `graph.gaps`."""
        return self.graph.complete

    @property
    def halted(self) -> bool:
        """Return whether the forward was stopped on purpose."""
        return self.graph.halted

    def summary(self, depth: int | None = None) -> str:
        """Return a table of the modules with shapes, parameters, FLOPs and totals.

        Args:
            depth: How many levels of modules to show; all by default.
        """
        return summarise(self.graph, self.saved, depth)

    def to_pandas(self) -> "pd.DataFrame":
        """Return one row for each node, inputs and outputs included."""
        return ops_table(self.graph, self.saved)

    @overload
    def __getitem__(self, key: int) -> Op: ...

    @overload
    def __getitem__(self, key: slice) -> tuple[Op, ...]: ...

    @overload
    def __getitem__(self, key: Selector) -> Op | Module: ...

    @overload
    def __getitem__(self, key: str) -> Layer | Op | Module | Buffer: ...

    def __getitem__(
        self, key: int | slice | str | Selector
    ) -> Layer | Op | Module | Buffer | tuple[Op, ...]:
        """Return what `key` names.

        Raises:
            SelectorError: If it names nothing, or several things; the message lists
                what may be meant.
        """
        if isinstance(key, str):
            return self._by_text(key)
        if isinstance(key, Selector):
            return self._by_selector(key)
        nodes = range(len(self.graph.nodes))
        if isinstance(key, slice):
            return tuple(self._op(node) for node in nodes[key])
        if isinstance(key, int) and not isinstance(key, bool):
            if -len(nodes) <= key < len(nodes):
                return self._op(nodes[key])
            raise SelectorError(
                f"There is no node {key}: this trace has {len(nodes)}, from 0 "
                f"({self.graph.nodes[0].label!r}) to {len(nodes) - 1} "
                f"({self.graph.nodes[-1].label!r})."
            )
        raise SelectorError(
            "A trace is indexed with a number, a slice, a label, a module address or a "
            f"selector, not {type(key).__name__} {key!r}."
        )

    def __contains__(self, key: object) -> bool:
        """Return whether `trace[key]` names something."""
        if not isinstance(key, int | slice | str | Selector):
            return False
        try:
            self[key]
        except SelectorError:
            return False
        return True

    def __iter__(self) -> Iterator[Op]:
        """Yield every node, inputs and outputs included, in execution order."""
        return map(self._op, range(len(self.graph.nodes)))

    def __len__(self) -> int:
        """Return the number of nodes, inputs and outputs included."""
        return len(self.graph.nodes)

    def __repr__(self) -> str:
        """Return one line."""
        graph = self.graph
        state = ", stopped early" if graph.halted else ""
        return (
            f"<Trace of {graph.model_name}: {len(graph.ops)} ops, "
            f"{len(graph.modules)} modules, {len(self.payloads)} saved{state}>"
        )

    def __str__(self) -> str:
        """Return the summary."""
        return self.summary()

    def _op(self, node: int) -> Op:
        return Op(self.graph, node, self.saved)

    def _by_text(self, text: str) -> Layer | Op | Module | Buffer:
        ref = match_label(text)
        if ref and ref.type == "buffer" and self.graph.module_at(text) is None:
            return self.buffers[text]
        named = find_named(self.graph, text)
        if named.nodes:
            return labelled_view(self.graph, self.saved, text)
        assert named.place is not None  # one of the two is set
        return module_view(self.graph, self.saved, named.place)

    def _by_selector(self, selector: Selector) -> Op | Module:
        sites = selector.resolve(self.graph)
        if len(sites) > 1:
            raise SelectorError(
                f"{selector!r} picks {len(sites)} sites: "
                f"{listed(site.name for site in sites)}. trace[...] gives one; narrow "
                "it with & and -, or take all with selector.resolve(trace.graph)."
            )
        return self._at_site(sites[0])

    def _at_site(self, site: Site) -> Op | Module:
        if site.key.kind != "module_output" or site.address is None:
            return self._op(site.node)
        place = place_at(self.graph, site.address)
        return Module(
            self.graph,
            replace(place, call_index=site.key.call_index, path=site.key.path),
            self.saved,
        )

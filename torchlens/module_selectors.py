"""Selectors that go by module: its output, its input, its class, what ran inside."""

from dataclasses import dataclass
from typing import ClassVar, final

from .addresses import Place, all_addresses, input_sites, output_sites, place_at
from .errors import SelectorError
from .graph import Graph, Site
from .labels import format_path
from .near_misses import listed, nearest
from .picks import OP_SITE, Picks
from .records import ModuleRecord, Path
from .selector_algebra import Leaf
from .stand_ins import stand_in_ops

__all__ = ["InModule", "Module", "ModuleInput", "ModuleType"]


@final
@dataclass(frozen=True, slots=True, repr=False)
class Module(Leaf):
    """Output tensors of a module's calls, as module sites."""

    address: str
    kind: ClassVar[str] = "module"

    def pick(self, graph: Graph) -> Picks:
        """Return the output sites by node.

        Raises:
            SelectorError: If the model has no such module, call or output.
        """
        return _by_node(output_sites(graph, place_at(graph, self.address)))

    def hint(self, graph: Graph) -> str:
        """Return nothing: an address that picks nothing is an error by itself."""
        return ""


@final
@dataclass(frozen=True, slots=True, repr=False)
class ModuleInput(Leaf):
    """Input tensors of a module's calls, as module sites."""

    address: str
    path: Path = ()
    kind: ClassVar[str] = "module_input"

    def pick(self, graph: Graph) -> Picks:
        """Return the input sites by node.

        Raises:
            SelectorError: If the model has no such module, call or input.
        """
        place = place_at(graph, self.address + format_path(self.path))
        return _by_node(input_sites(graph, place))

    def hint(self, graph: Graph) -> str:
        """Return nothing: an address that picks nothing is an error by itself."""
        return ""


@final
@dataclass(frozen=True, slots=True, repr=False)
class InModule(Leaf):
    """Ops that ran during a module's calls, at any depth.

    A container that is never called itself (`ModuleList`, `ModuleDict`) stands for
    the modules it holds.
    """

    address: str
    kind: ClassVar[str] = "in_module"

    def pick(self, graph: Graph) -> Picks:
        """Return the ops inside.

        Raises:
            SelectorError: If the model has no such module, or it never ran.
        """
        place = place_at(graph, self.address)
        if place.path:
            raise SelectorError(
                f"{self!r} names part of an output, {format_path(place.path)}, but ops "
                f"are inside a module. Write in_module({place.address!r}) or "
                f"module({self.address!r})."
            )
        inside = _calls_inside(graph, place)
        if not inside:
            return {op.index: OP_SITE for op in stand_in_ops(graph, place.module)}
        return {op.index: OP_SITE for op in graph.ops if op.module_call in inside}

    def hint(self, graph: Graph) -> str:
        """Return that the module ran nothing."""
        return f"{self.address!r} was called but ran no op."


@final
@dataclass(frozen=True, slots=True, repr=False)
class ModuleType(Leaf):
    """Outputs of every call of modules of one class, subclasses included."""

    type_name: str
    kind: ClassVar[str] = "module_type"

    def pick(self, graph: Graph) -> Picks:
        """Return the output sites by node, as the modules' addresses would give them.

        Modules that never ran have none.
        """
        sites: list[Site] = []
        for module in filter(self._is_class, graph.modules.values()):
            try:
                sites.extend(output_sites(graph, Place(module.address, module)))
            except SelectorError:
                continue
        return _by_node(tuple(sites))

    def _is_class(self, module: ModuleRecord) -> bool:
        """Compare whole dotted names, or the last part when only that was given."""
        if "." in self.type_name:
            return self.type_name in module.type_names
        return self.type_name in {name.rpartition(".")[2] for name in module.type_names}

    def hint(self, graph: Graph) -> str:
        """Return the classes of the modules that were called."""
        idle = [m.address for m in graph.modules.values() if self._is_class(m)]
        if idle:
            return f"Modules of this class exist but were never called: {listed(idle)}."
        names = sorted(
            {m.type_name for m in graph.modules.values() if graph.calls_of(m.address)}
        )
        close = nearest(self.type_name.rpartition(".")[2], names)
        meant = f"Nearest: {listed(close)}. " if close else ""
        return f"{meant}Classes that were called: {listed(names, 8)}."


def _by_node(sites: tuple[Site, ...]) -> Picks:
    picks: dict[int, set[Site]] = {}
    for site in sites:
        picks.setdefault(site.node, set()).add(site)
    return {node: frozenset(named) for node, named in picks.items()}


def _calls_inside(graph: Graph, place: Place) -> set[int]:
    """Return the numbers of the calls that are meant and of all calls inside them."""
    inside = {call.index for call in place.calls(graph)}
    if not inside:
        held = {
            address
            for name in (place.module.address, *place.module.aliases)
            for address in all_addresses(graph)
            if address.startswith(f"{name}.")
        }
        inside = {call.index for name in held for call in graph.calls_of(name)}
    for call in graph.module_calls:  # a parent's call begins before its children's
        if call.parent in inside:
            inside.add(call.index)
    return inside

"""Module addresses in a graph: which module, which call, which tensor of its output."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .errors import SelectorError
from .graph import Graph, Site
from .labels import format_path, match_suffix, parse_path
from .model_access import plain_name
from .near_misses import listed, nearest, unknown_name
from .records import ModuleCall, ModuleRecord, OpRecord, Path
from .stand_ins import stand_in_ops

__all__ = [
    "Place",
    "all_addresses",
    "as_path",
    "find_place",
    "input_sites",
    "module_names",
    "node_site",
    "output_sites",
    "place_at",
]


@dataclass(frozen=True, slots=True)
class Place:
    """What an address says: a module, perhaps one call, perhaps part of its output.

    Attributes:
        address: As it was asked, so perhaps an alias of `module.address`.
        module: The module's record.
        call_index: The call, from 1; `None` for every call.
        path: Start of the path into the output (or input); () for all of it.
    """

    address: str
    module: ModuleRecord
    call_index: int | None = None
    path: Path = ()

    def calls(self, graph: Graph) -> tuple[ModuleCall, ...]:
        """Return the calls that are meant.

        Raises:
            SelectorError: If the module was called, but not this often.
        """
        calls = graph.calls_of(self.module.address)
        if self.call_index is None or not calls:
            return calls
        if self.call_index > len(calls):
            times = "once" if len(calls) == 1 else f"{len(calls)} times"
            raise SelectorError(
                f"{self.address!r} was called {times}, so there is no call "
                f"{self.call_index}. Calls count from 1: {self.address}:1"
                + ("." if len(calls) == 1 else f" to {self.address}:{len(calls)}.")
            )
        return (calls[self.call_index - 1],)


def all_addresses(graph: Graph) -> Iterator[str]:
    """Yield every address of every module, aliases after their primary address."""
    for address, module in graph.modules.items():
        yield address
        yield from module.aliases


def module_names(module: ModuleRecord) -> str:
    """Return the address with its aliases, as text."""
    if not module.aliases:
        return repr(module.address)
    return f"{module.address!r} (also {listed(module.aliases)})"


def as_path(path: object) -> Path:
    """Return a path given as text, as one step or as a tuple of steps.

    Raises:
        SelectorError: If it is none of these.
    """
    if path is None:
        return ()
    if isinstance(path, str):
        return parse_path(path) if path[:1] in ("[", ".") else (path,)
    steps = path if isinstance(path, tuple) else (path,)
    for step in steps:
        if isinstance(step, bool) or not isinstance(step, int | str):
            raise SelectorError(
                f"A path is an index, a key, a tuple of these, or text such as "
                f'[0]["hidden"]; not {type(step).__name__} {step!r}.'
            )
    return tuple(steps)


def find_place(graph: Graph, text: str) -> Place | None:
    """Return the module, call and path that `text` names, or `None`.

    The longest module address that starts `text` wins, so an output's field never hides
    a submodule and a child named "a:1" stays reachable.  "self.layer1" is "layer1",
    spelt so that it cannot be taken for a label.
    """
    text = plain_name(text)
    for end in range(len(text), 0, -1):
        module = graph.module_at(text[:end])
        if module is None:
            module = graph.module_at(text[:end].removeprefix("self."))
        if module is None:
            continue
        suffix = match_suffix(text[end:])
        if suffix is not None:
            return Place(text[:end], module, *suffix)
    return None


def place_at(graph: Graph, text: str) -> Place:
    """Return the module, call and path that `text` names.

    Raises:
        SelectorError: If the model has no such module; the message names near misses.
    """
    place = find_place(graph, text)
    if place is None:
        raise SelectorError(_unknown_module(graph, text))
    return place


def output_sites(graph: Graph, place: Place) -> tuple[Site, ...]:
    """Return the sites of the output tensors that `place` names.

    A module that was never called, but whose work was done by a function that read all
    its parameters, is that function's op.

    Raises:
        SelectorError: If it has none: never called, another number of calls, another
            structure, no tensor in the output.
    """
    calls = place.calls(graph)
    if not calls:
        return _stand_in_sites(graph, place)
    found = [
        graph.output_site(call, leaf)
        for call in calls
        for leaf in call.outputs
        if _starts(leaf.path, place.path)
    ]
    if not found:
        paths = [leaf.path for call in calls for leaf in call.outputs]
        if not paths and graph.halted:
            raise SelectorError(
                f"The forward was stopped before {module_names(place.module)} "
                "returned. Stop later, or ask for something before."
            )
        raise SelectorError(_no_tensor(graph, place, paths, "output"))
    return tuple(_renamed(site, place) for site in found)


def input_sites(graph: Graph, place: Place) -> tuple[Site, ...]:
    """Return the sites of the input tensors that `place` names.

    Raises:
        SelectorError: If it has none.
    """
    calls = place.calls(graph)
    if not calls:
        raise SelectorError(
            f"{module_names(place.module)} was never called as a module, so it "
            "received no input. Take the output of what runs before it instead."
        )
    found = [
        graph.input_site(call, leaf)
        for call in calls
        for leaf in call.inputs
        if _starts(leaf.path, place.path)
    ]
    if not found:
        paths = [leaf.path for call in calls for leaf in call.inputs]
        raise SelectorError(_no_tensor(graph, place, paths, "input"))
    return tuple(_renamed(site, place) for site in found)


def node_site(graph: Graph, node: OpRecord) -> Site:
    """Return the site of a node by itself: a boundary is a tensor of the root call."""
    if node.kind == "op":
        return graph.op_site(node)
    root = graph.module_calls[0]
    if node.kind == "input":
        leaf = next(leaf for leaf in root.inputs if leaf.node == node.index)
        return graph.input_site(root, leaf)
    return graph.output_site(root, root.outputs[node.type_index - 1])


def _stand_in_sites(graph: Graph, place: Place) -> tuple[Site, ...]:
    ops = stand_in_ops(graph, place.module)
    number = place.call_index
    if place.path or (number is not None and number > len(ops)):
        times = "once" if len(ops) == 1 else f"{len(ops)} times"
        raise SelectorError(
            f"{module_names(place.module)} was never called as a module; "
            f"{ops[0].layer_label} does its work {times} and returns one tensor. "
            f"Ask for {place.address!r}."
        )
    chosen = ops if number is None else (ops[number - 1],)
    return tuple(
        replace(
            graph.op_site(op),
            name=place.address if len(ops) == 1 else f"{place.address}:{index}",
            address=place.module.address,
        )
        for index, op in enumerate(chosen, start=number or 1)
    )


def _starts(path: Path, start: Path) -> bool:
    """Tell whether `path` lies under `start`; `.key` and `["key"]` are the same."""
    return len(path) >= len(start) and all(
        step == wanted or str(step).lstrip(".") == wanted.lstrip(".")
        if isinstance(wanted, str)
        else step == wanted
        for step, wanted in zip(path, start, strict=False)
    )


def _renamed(site: Site, place: Place) -> Site:
    if place.address == place.module.address:
        return site
    return replace(
        site, name=place.address + site.name.removeprefix(place.module.address)
    )


def _no_tensor(graph: Graph, place: Place, paths: list[Path], what: str) -> str:
    name = module_names(place.module)
    if not paths:
        return (
            f"The {what} of {name} holds no tensor. Ask for a module inside it, or for "
            "the op that makes the value."
        )
    known = listed(f"{place.address}{format_path(path)}" for path in paths)
    return (
        f"The {what} of {name} has no tensor at {format_path(place.path)}. "
        f"Its tensors: {known}.{_module_like(graph, place)}"
    )


def _module_like(graph: Graph, place: Place) -> str:
    """Return a sentence on the submodule that was meant, where one is called alike."""
    written = f"{place.address}{format_path(place.path)}"
    inside = [a for a in all_addresses(graph) if a.startswith(f"{place.address}.")]
    close = nearest(written, inside) if "." in format_path(place.path) else ()
    return f" Modules inside it: {listed(close)}." if close else ""


def _unknown_module(graph: Graph, text: str) -> str:
    pool = list(all_addresses(graph))
    if text == "":
        return 'An empty address names nothing; the root module is "self".'
    # A submodule that the model lacks is often meant as part of an output.
    parent = text
    while "." in parent:
        parent = parent.rpartition(".")[0]
        module = graph.module_at(parent)
        if module is not None and parent != text:
            inside = [name for name in pool if name.startswith(f"{parent}.")]
            if inside and not nearest(text, pool):
                pool = inside
            break
    known = unknown_name(text, pool, "graph.modules")
    return f"{graph.model_name} has no module {text!r}. {known}"

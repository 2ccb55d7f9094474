"""What the user may write for a layer, turned into sites: the one resolver.

A text is tried as a label, then as a module address, then as a glob over addresses;
never as part of a name.  In a glob `*` and `?` stay inside one component of the
address and `**` crosses dots: "layer*.1" is layer1.1 and not layer1.0.1.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from .addresses import Place, all_addresses, find_place, node_site, output_sites
from .errors import SelectorError
from .globs import glob_sites, is_glob
from .graph import Graph, Site
from .label_lookup import label_problem, labelled_nodes
from .near_misses import listed, nearest
from .records import OpRecord
from .selector_algebra import Selector
from .selectors import everything
from .units import shaped, sized

Layer = str | Selector
Layers = Layer | Sequence[Layer] | Mapping[str, Layer | Sequence[Layer]]

__all__ = ["Layer", "Layers", "Named", "find_named", "resolve_layers"]


@dataclass(frozen=True, slots=True)
class Named:
    """What a text names: nodes by label, or a place by address.

    Both are set when they are the same tensors.
    """

    nodes: tuple[OpRecord, ...] = ()
    place: Place | None = None


def find_named(graph: Graph, text: str) -> Named:
    """Return what `text` names exactly, as a label or as a module address.

    Raises:
        SelectorError: If it names nothing, or two different things.
    """
    nodes, place = labelled_nodes(graph, text), find_place(graph, text)
    if place is not None and nodes and nodes[0].kind != "op":
        nodes = ()  # a module is meant before a boundary that is called the same
    if not nodes and place is None:
        raise SelectorError(_unknown(graph, text))
    if nodes and place is not None:
        _refuse_two_meanings(graph, text, nodes, place)
    return Named(nodes, place)


def resolve_layers(graph: Graph, layers: Layers) -> dict[str, Site]:
    """Return the sites that `layers` names, by the names their rows will have.

    A text that names one tensor gives it its own spelling as name. Several tensors (a
    module called k times, a structured output, a label with several passes) get ":1",
    ":2" or the path after it. Selectors and globs give the sites' own names, leaving
    out sites that are there already. An entry of a mapping with several sites gives
    "name.site".

    Args:
        graph: A traced graph.
        layers: A label, module address, glob or selector; a list of these; or a
            mapping from names of yours to any of these.

    Returns:
        At least one site, in the order in which they were asked for.

    Raises:
        SelectorError: If something is unknown, ambiguous, empty, or not a layer.
    """
    chosen: dict[str, Site] = {}
    if isinstance(layers, Mapping):
        for name, given in layers.items():
            _check_name(name)
            found: dict[str, Site] = {}
            for layer in _each(graph, given):
                _add(found, _sites(graph, layer), isinstance(layer, str))
            several = len(found) > 1
            own = {f"{name}.{key}" if several else name: found[key] for key in found}
            _add(chosen, own, True)
    else:
        for layer in _each(graph, layers):
            exact = isinstance(layer, str) and not _means_glob(graph, layer)
            _add(chosen, _sites(graph, layer), exact)
    if not chosen:
        raise SelectorError(
            "layers is empty, so there is nothing to capture. Give a label, a module "
            "address, a glob, a selector, or a list of these."
        )
    return {name: replace(site, name=name) for name, site in chosen.items()}


def _each(graph: Graph, layers: object) -> Iterator[Layer]:
    """Yield the single layers of what was given for one or several."""
    if isinstance(layers, str | Selector):
        yield layers
    elif isinstance(layers, Sequence) and not isinstance(layers, bytes | bytearray):
        for layer in layers:
            if not isinstance(layer, str | Selector):
                raise SelectorError(_not_a_layer(graph, layer))
            yield layer
    else:
        raise SelectorError(_not_a_layer(graph, layers))


def _sites(graph: Graph, layer: Layer) -> dict[str, Site]:
    if isinstance(layer, Selector):
        return {site.name: site for site in layer.resolve(graph)}
    if _means_glob(graph, layer):
        return {site.name: site for site in glob_sites(graph, layer)}
    named = find_named(graph, layer)
    if named.place is not None:  # preferred: a module hook catches it
        sites = output_sites(graph, named.place)
        return {layer: sites[0]} if len(sites) == 1 else {s.name: s for s in sites}
    if len(named.nodes) == 1:
        return {layer: node_site(graph, named.nodes[0])}
    return {f"{layer}:{op.pass_index}": graph.op_site(op) for op in named.nodes}


def _means_glob(graph: Graph, text: str) -> bool:
    return is_glob(text) and find_place(graph, text) is None


def _add(chosen: dict[str, Site], more: dict[str, Site], exact: bool) -> None:
    """Add sites; those asked for by description only where they are new."""
    present = {site.key for site in chosen.values()}
    for name, site in more.items():
        if not exact and site.key in present:
            continue
        before = chosen.setdefault(name, site)
        if before.key != site.key:
            raise SelectorError(
                f"Two different sites would be stored as {name!r}, made by "
                f"{before.label} and {site.label}. Give them other names: "
                "layers={'first': ..., 'second': ...}."
            )


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name:
        raise SelectorError(
            "A mapping for layers goes from a name of yours to a layer; the name must "
            f"be a text that is not empty, not {name!r}."
        )


def _refuse_two_meanings(
    graph: Graph, text: str, nodes: tuple[OpRecord, ...], place: Place
) -> None:
    try:
        outputs = {site.node for site in output_sites(graph, place)}
    except SelectorError:
        outputs = set()
    if outputs == {node.index for node in nodes}:
        return
    labels = listed(graph.nodes[node].label for node in sorted(outputs))
    raise SelectorError(
        f"{text!r} is ambiguous: it is the label of {listed(n.label for n in nodes)} "
        f"and the address of a module, whose output is {labels}. Write "
        f"{nodes[0].layer_label!r} for the op or 'self.{text}' for the module."
    )


def _unknown(graph: Graph, text: str) -> str:
    if text == "all":
        return _refuse_all(graph)
    problem = label_problem(graph, text)
    if problem is not None:
        return problem
    addresses = list(all_addresses(graph))
    labels = [op.label for op in graph.nodes]
    close = nearest(text, [*addresses, *labels], 4)
    meant = f"Nearest: {listed(close)}. " if close else ""
    wanted = _by_kind(graph, text)
    return (
        f"{graph.model_name} has no layer {text!r}: neither a label nor a module "
        f"address is spelt so, and parts of names do not count. {meant}{wanted}"
        f"graph.modules lists all {len(graph.modules)} addresses, trace.ops all "
        f"{len(graph.ops)} labels."
    )


def _by_kind(graph: Graph, text: str) -> str:
    """Return how to ask for all ops or modules of the kind that `text` names."""
    name = text.replace("_", "").lower()
    count = sum(op.type == name for op in graph.ops)
    if count:
        return f"tl.func({text!r}) picks the {count} ops of this function. "
    modules = sum(module.type_name == text for module in graph.modules.values())
    if modules:
        return f"tl.module_type({text!r}) picks the modules of this class. "
    return ""


def _refuse_all(graph: Graph) -> str:
    sites = everything().resolve(graph)
    total = sum(site.spec.nbytes for site in sites)
    shapes = ", ".join(shaped(node.spec.shape) for node in graph.inputs)
    return (
        f"'all' is refused: it would keep {len(sites)} tensors, {sized(total)} for "
        f"each batch like the traced one (inputs {shapes or 'without tensors'}). Name "
        "the layers you need, or write '**' for the output of every module, or "
        "tl.everything() for every operation, if you mean it."
    )


def _not_a_layer(graph: Graph, given: object) -> str:
    forms = (
        "A layer is a label (relu_1_2), a module address (layer1.0), a glob over "
        "addresses (layer*.1) or a selector (tl.func('relu'))"
    )
    if isinstance(given, int) and not isinstance(given, bool):
        meant = ""
        if -len(graph.nodes) <= given < len(graph.nodes):
            meant = f" Node {given} of this graph is {graph.nodes[given].label!r}."
        return (
            f"{forms}, never a number such as {given}, which means another layer as "
            f"soon as the model changes.{meant}"
        )
    if isinstance(given, nn.Module):
        return (
            f"{forms}, not the module itself. Give the address of this "
            f"{type(given).__name__} as a text; graph.modules lists all "
            f"{len(graph.modules)}."
        )
    return f"{forms}, or a list or mapping of these; not {type(given).__name__}."

"""One view by its name: the op, layer, module, parameter or buffer that is meant."""

from typing import TypeVar

from .addresses import Place, output_sites
from .errors import SelectorError
from .graph import Graph
from .label_lookup import labelled_nodes, unknown_label
from .labels import match_label
from .layer_views import Layer
from .module_views import Module
from .near_misses import unknown_name
from .op_views import Op
from .saved import Saved
from .tensor_views import Buffer, Param

Held = TypeVar("Held", bound=Param | Buffer)

__all__ = ["held_view", "labelled_view", "layer_view", "module_view", "op_view"]


def module_view(graph: Graph, saved: Saved, place: Place) -> Module:
    """Return the view of a place whose call and path exist."""
    if place.path:
        output_sites(graph, place)
    place.calls(graph)
    return Module(graph, place, saved)


def labelled_view(graph: Graph, saved: Saved, text: str) -> Layer | Op:
    """Return an op for a pass form, else a layer."""
    nodes = labelled_nodes(graph, text)
    if not nodes:
        raise SelectorError(unknown_label(graph, text))
    ref = match_label(text)
    if ref is not None and ref.pass_index is not None:
        return Op(graph, nodes[0].index, saved)
    return Layer(graph, tuple(node.index for node in nodes), saved)


def op_view(graph: Graph, saved: Saved, text: str) -> Op:
    found = labelled_view(graph, saved, text)
    return found.op if isinstance(found, Layer) else found


def layer_view(graph: Graph, saved: Saved, text: str) -> Layer:
    found = labelled_view(graph, saved, text)
    if isinstance(found, Layer):
        return found
    raise SelectorError(
        f"{text!r} is one pass of {found.layer_label!r}; trace.ops holds passes."
    )


def held_view(views: list[Held], name: str, what: str, everything: str) -> Held:
    for view in views:
        label = view.label if isinstance(view, Buffer) else None
        if name in (view.address, *view.aliases, label):
            return view
    known = unknown_name(name, (view.address for view in views), everything)
    raise SelectorError(f"The model has no {what} {name!r}. {known}")

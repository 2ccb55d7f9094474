"""Finding planned sites in a full capture: the slow path for batches off the path.

A site is looked up by its structural key alone, so that a tensor is never taken for
another one that has the same shape.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from .batch_template import TakeRows
from .callers import call_from
from .catches import Catch
from .graph import Graph
from .plans import CapturePlan
from .records import SiteKey

__all__ = ["node_of_key", "rows_of_capture"]


def node_of_key(graph: Graph, key: SiteKey) -> int | None:
    """Return the index of the node whose tensor the site `key` captures, if any."""
    if key.kind == "op":
        return next((node.index for node in graph.nodes if node.key == key), None)
    calls = graph.calls_of(key.address)
    if len(calls) < key.call_index:
        return None
    call = calls[key.call_index - 1]
    found = call.outputs if key.kind == "module_output" else call.inputs
    return next((leaf.node for leaf in found if leaf.path == key.path), None)


def _node_of_catch(graph: Graph, catch: Catch) -> int | None:
    """Return the node of a planned site, its module call found by place, not number."""
    key = catch.key
    if key.address != "self" and catch.caller:
        call = call_from(graph, key.address, catch.caller, catch.caller_ordinal)
        if call is not None:
            return node_of_key(graph, replace(key, call_index=call.call_index))
    if len(graph.calls_of(key.address)) != catch.num_calls:
        return None
    return node_of_key(graph, key)


def rows_of_capture(
    plan: CapturePlan,
    graph: Graph,
    payloads: Mapping[int, Tensor],
    shapes: Sequence[tuple[int, ...]],
    take_rows: Sequence[TakeRows | None],
) -> dict[str, Tensor]:
    """Return [num_samples, *row_shape] for the sites that exist in `graph` and fit."""
    found = {}
    for site, shape, take in zip(plan.sites, shapes, take_rows, strict=True):
        node = _node_of_catch(graph, site.catch)
        payload = None if node is None else payloads.get(node)
        if payload is None or str(payload.dtype)[6:] != site.dtype:
            continue
        if tuple(payload.shape) == shape:
            value = payload.detach()
            found[site.name] = value if take is None else take(value)
    return found

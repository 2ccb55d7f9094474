"""How each chosen site of a graph is caught: by hook, by wrapper, or by a mode."""

from pathlib import Path

import torch
from torch import nn

from .callers import caller_of
from .catches import Catch, Via
from .errors import PlanError
from .function_facts import facts_of
from .graph import Graph, Site
from .records import CallSite, ModuleCall, OpRecord

_TORCH_FOLDER = str(Path(torch.__file__).parent)

__all__ = ["choose_catch"]


def choose_catch(graph: Graph, name: str, site: Site) -> Catch:
    """Return how the tensor of `site` is caught in a replay.

    Raises:
        PlanError: If the tensor came from code that cannot be watched.
    """
    calls = graph.calls_of(site.key.address)
    if site.key.kind != "op":
        place, ordinal = caller_of(graph, calls[site.key.call_index - 1])
        return Catch(
            site.key,
            _via(graph, calls),
            num_seen=len(calls),
            num_calls=len(calls),
            caller=place,
            caller_ordinal=ordinal,
        )
    node = graph.nodes[site.node]
    if node.func is None or node.call_site is None:
        raise PlanError(
            f"The site {name!r} ({node.label}) cannot be caught: no torch call that "
            "could be watched made it. Choose the output of the module around it, "
            f"{graph.module_calls[node.module_call].address!r}."
        )
    _refuse_hooks_op(graph, name, node, node.call_site)
    place, ordinal = caller_of(graph, calls[site.key.call_index - 1])
    return Catch(
        site.key,
        "mode",
        num_seen=_num_executions(graph, node),
        torch_name=facts_of(node.func).name,
        composite=any(
            code.co_filename.startswith(_TORCH_FOLDER)
            for code, _ in node.call_site.steps[1:]
        ),
        children=_children(graph, site.key.address),
        num_calls=len(calls),
        caller=place,
        caller_ordinal=ordinal,
    )


def _refuse_hooks_op(
    graph: Graph, name: str, node: OpRecord, call_site: CallSite
) -> None:
    """Refuse an op of a user's forward hook, which runs when the forward is over."""
    codes = [code for code, _ in call_site.steps]
    if nn.Module._call_impl.__code__ not in codes:
        return
    owner = graph.module_calls[node.module_call].address
    record = graph.modules[owner]
    outermost = codes[0].co_qualname.split(".")
    if not set(outermost) & set(record.type_names):
        raise PlanError(
            f"The site {name!r} ({node.label}) cannot be caught: a hook on {owner!r} "
            f"made it, outside of any forward. Choose the module's output, {owner!r}, "
            "which is what its hooks returned."
        )


def _via(graph: Graph, calls: tuple[ModuleCall, ...]) -> Via:
    """Return "wrap" where hooks do not fire, or fire in another order than calls."""
    indices = {call.index for call in calls}
    for call in calls:
        parent = call.parent
        while parent is not None:
            if parent in indices:
                return "wrap"
            parent = graph.module_calls[parent].parent
    return "wrap" if any(call.direct for call in calls) else "hook"


def _num_executions(graph: Graph, node: OpRecord) -> int:
    place = (node.key.address, node.key.call_index, node.key.call_site, node.func_name)
    return max(
        other.key.ordinal
        for other in graph.nodes
        if other.kind == "op"
        and place
        == (
            other.key.address,
            other.key.call_index,
            other.key.call_site,
            other.func_name,
        )
    )


def _children(graph: Graph, address: str) -> tuple[str, ...]:
    """Return the modules that the module at `address` calls itself."""
    own = {call.index for call in graph.calls_of(address)}
    found = {call.address for call in graph.module_calls if call.parent in own}
    return tuple(sorted(found - {address}))

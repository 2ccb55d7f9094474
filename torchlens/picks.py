"""What selectors pick: tensors by the node that made them, and set operations on these.

A pick maps a node to the module sites that name its tensor; none of them means the op's
own site.  The operators work on the nodes and keep the names of every part.
"""

from collections.abc import Mapping
from typing import Literal

from .addresses import node_site
from .graph import Graph, Site

Picks = Mapping[int, frozenset[Site]]
Operator = Literal["and", "or", "minus", "not"]
OP_SITE: frozenset[Site] = frozenset()

__all__ = ["OP_SITE", "Operator", "Picks", "combine", "describe", "order_sites"]

_SHOWN = 4


def combine(
    operator: Operator, picks: tuple[Picks, ...], universe: frozenset[int]
) -> Picks:
    """Return what an operator makes of what its operands picked.

    Args:
        operator: The operation on the sets of nodes.
        picks: What each operand picked.
        universe: The nodes among which "not" chooses.
    """
    first, *others = picks
    if operator == "not":
        return dict.fromkeys(universe - set(first), OP_SITE)
    if operator == "minus":
        dropped = set().union(*others)
        return {node: first[node] for node in first if node not in dropped}
    gather = set.intersection if operator == "and" else set.union
    return {
        node: OP_SITE.union(*(pick.get(node, OP_SITE) for pick in picks))
        for node in gather(set(first), *map(set, others))
    }


def order_sites(graph: Graph, picks: Picks) -> tuple[Site, ...]:
    """Return picked nodes as sites in execution order, each site once."""
    sites = [
        site
        for node, named in picks.items()
        for site in (named or (node_site(graph, graph.nodes[node]),))
    ]
    sites.sort(key=lambda site: (site.order, str(site.key.path), site.name))
    first: dict[object, Site] = {}
    for site in sites:  # a tied module may have been named by two addresses
        first.setdefault(site.key, site)
    return tuple(first.values())


def describe(graph: Graph, picks: Picks) -> str:
    """Return how many sites there are, and the first of them, as text."""
    names = [site.name for site in order_sites(graph, picks)]
    if not names:
        return "nothing"
    more = "" if len(names) <= _SHOWN else ", ..."
    noun = "site" if len(names) == 1 else "sites"
    return f"{len(names)} {noun}: {', '.join(names[:_SHOWN])}{more}"

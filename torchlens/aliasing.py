"""Whether a caught tensor can be kept as it is, or something may write to it later.

Works on the graph: views and in-place ops share memory with what they were made from.
What the graph cannot see, the replayer's version check catches.
"""

from .function_facts import facts_of
from .graph import Graph
from .records import ArgRef, OpRecord, SiteKey

__all__ = ["Aliases"]


class Aliases:
    """Groups the nodes of a graph by shared memory."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._group = list(range(len(graph.nodes)))
        # Memory that outlives the forward: the caller's inputs, buffers, parameters.
        self._outliving: set[int] = set()
        self._writes: dict[int, int] = {}
        for node in graph.nodes:
            self._add(node)
        self._last_write: dict[int, int] = {}
        for position in self._writes:
            group = self._find(position)
            last = self._last_write.get(group, -1)
            self._last_write[group] = max(last, position)
        self._outliving_groups = {self._find(index) for index in self._outliving}

    def needs_copy(self, node: int, key: SiteKey) -> bool:
        """Return whether the tensor caught at `key` may change after it was caught."""
        group = self._find(node)
        if group in self._outliving_groups:
            return True
        return self._last_write.get(group, -1) >= self._caught_at(node, key)

    def _caught_at(self, node: int, key: SiteKey) -> int:
        """Return the index from which on nodes come after the catch."""
        if key.kind == "op":
            return node + 1
        call = self._graph.calls_of(key.address)[key.call_index - 1]
        return call.end_node if key.kind == "module_output" else call.first_node

    def _add(self, node: OpRecord) -> None:
        if node.kind == "input" or node.func_name == "unknown":
            self._outliving.add(node.index)
        if node.inplace:
            self._writes[node.index] = node.index
        identity = node.kind == "output" or node.func_name == "identity"
        if not (node.view or node.inplace or identity):
            return
        for parent in node.parents if not node.inplace else _written(node):
            self._join(node.index, parent)
        if node.params or node.buffers:
            self._outliving.add(node.index)

    def _find(self, index: int) -> int:
        while self._group[index] != index:
            self._group[index] = self._group[self._group[index]]
            index = self._group[index]
        return index

    def _join(self, one: int, other: int) -> None:
        self._group[self._find(one)] = self._find(other)


def _written(node: OpRecord) -> tuple[int, ...]:
    """Return the nodes whose memory an in-place op wrote to."""
    refs: list[object] = [node.kwargs.get("out")]
    if node.func is not None:
        for position, name in facts_of(node.func).writes:
            given = node.args[position] if position < len(node.args) else None
            refs.append(node.kwargs.get(name) if given is None else given)
    found: list[int] = []
    for ref in refs:
        for item in ref if isinstance(ref, tuple | list) else (ref,):
            if isinstance(item, ArgRef):
                found += [n for n in (item.node, item.written_by) if n is not None]
    return tuple(found) or node.parents

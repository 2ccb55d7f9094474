"""Labels in a graph: which nodes a label names, and what was meant when none."""

from .graph import Graph
from .labels import LabelRef, match_label
from .near_misses import unknown_name
from .records import OpRecord

__all__ = ["label_problem", "labelled_nodes", "unknown_label"]


def labelled_nodes(graph: Graph, text: str) -> tuple[OpRecord, ...]:
    """Return the nodes that a full label, short label or pass form names.

    A label without a pass names every pass; nothing at all is not an error here.
    """
    ref = match_label(text)
    if ref is None:
        return ()
    if ref.is_boundary:
        nodes = graph.inputs + graph.outputs
        return tuple(node for node in nodes if node.layer_label == text)
    return tuple(op for op in graph.ops if _names(ref, op))


def unknown_label(graph: Graph, text: str) -> str:
    """Return sentences saying that `text` names no node, and what may be meant."""
    problem = label_problem(graph, text)
    if problem is not None:
        return problem
    known = unknown_name(text, (op.label for op in graph.nodes), "trace.ops")
    return f"{graph.model_name} has no op labelled {text!r}. {known}"


def label_problem(graph: Graph, text: str) -> str | None:
    """Return what is wrong with a label of which a part exists, or `None`."""
    ref = match_label(text)
    if ref is None:
        return None
    start = f"{graph.model_name} has no op labelled {text!r}."
    if ref.type == "buffer" and ref.type_index <= len(graph.buffers):
        return (
            f"{start} Buffers are not ops and are never captured; trace.buffers lists "
            f"all {len(graph.buffers)}."
        )
    if ref.pass_index is not None:
        layer = labelled_nodes(graph, text.rpartition(":")[0])
        if layer:
            passes = "one pass" if len(layer) == 1 else f"{len(layer)} passes"
            return f"{start} {layer[0].layer_label} has {passes}, counted from 1."
    if ref.step is not None:
        same = labelled_nodes(graph, f"{ref.type}_{ref.type_index}")
        if same:
            return f"{start} {ref.type} number {ref.type_index} is {same[0].label!r}."
    return None


def _names(ref: LabelRef, op: OpRecord) -> bool:
    return (
        ref.type == op.type
        and ref.type_index == op.type_index
        and ref.step in (None, op.step)
        and ref.pass_index in (None, op.pass_index)
    )

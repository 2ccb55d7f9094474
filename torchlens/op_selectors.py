"""Selectors that look at ops: function, label, output, neighbours, a predicate."""

import re
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, final

from .errors import SelectorError
from .graph import Graph
from .label_lookup import labelled_nodes, unknown_label
from .labels import normalise_type
from .near_misses import listed, nearest, unknown_name
from .op_views import Op
from .picks import OP_SITE, Picks
from .records import OpRecord
from .selector_algebra import Leaf, Selector, evaluate

__all__ = [
    "Everything",
    "FollowedBy",
    "Func",
    "Label",
    "LabelContains",
    "Output",
    "PrecededBy",
    "Regex",
    "Where",
]


class OpTest(Leaf):
    """Base of selectors that take or leave one op at a time."""

    __slots__ = ()

    @abstractmethod
    def takes(self, op: OpRecord) -> bool:
        """Return whether this picks `op`."""

    @final
    def pick(self, graph: Graph) -> Picks:
        """Return the ops that this takes, as op sites."""
        return {op.index: OP_SITE for op in graph.ops if self.takes(op)}


@final
@dataclass(frozen=True, slots=True, repr=False)
class Everything(OpTest):
    """Every op; no input, output or buffer."""

    kind: ClassVar[str] = "everything"

    def takes(self, op: OpRecord) -> bool:
        """Return true."""
        return True

    def hint(self, graph: Graph) -> str:
        """Return sentences that help when this picked nothing."""
        return "The forward pass ran no op at all."


@final
@dataclass(frozen=True, slots=True, repr=False)
class Func(OpTest):
    """Ops by function: "max_pool2d" or "maxpool2d"; "relu_" is only in place."""

    name: str
    output: int | None = None
    kind: ClassVar[str] = "func"

    def takes(self, op: OpRecord) -> bool:
        """Return whether `op` ran this function, and is the output asked for."""
        return self._is_function(op) and self.output in (None, op.output_index)

    def _is_function(self, op: OpRecord) -> bool:
        dunder = self.name.startswith("__") and self.name.endswith("__")
        if self.name.endswith("_") and not dunder:
            return op.func_name == self.name
        return op.type == normalise_type(self.name)

    def hint(self, graph: Graph) -> str:
        """Return the function names that are nearest."""
        same = [op for op in graph.ops if self._is_function(op)]
        if same:
            return _no_such_output(same)
        names = sorted({name for op in graph.ops for name in (op.func_name, op.type)})
        close = nearest(self.name, names)
        meant = f"Nearest: {listed(close)}. " if close else ""
        functions = sorted({op.func_name for op in graph.ops})
        return f"{meant}It ran {len(functions)} functions: {listed(functions, 8)}."


@final
@dataclass(frozen=True, slots=True, repr=False)
class Output(OpTest):
    """Ops that are the i-th of several outputs of one call, from 0."""

    index: int
    kind: ClassVar[str] = "output"

    def takes(self, op: OpRecord) -> bool:
        """Return whether `op` is that output."""
        return op.output_index == self.index

    def hint(self, graph: Graph) -> str:
        """Return which calls have several outputs."""
        several = [op for op in graph.ops if op.output_index is not None]
        if not several:
            return "No call of this model returned several tensors."
        return _no_such_output(several)


@final
@dataclass(frozen=True, slots=True, repr=False)
class Label(Leaf):
    """Nodes by full label, short label or pass form; boundaries too."""

    text: str
    kind: ClassVar[str] = "label"

    def pick(self, graph: Graph) -> Picks:
        """Return the labelled nodes.

        Raises:
            SelectorError: If there are none: a label is never a guess.
        """
        nodes = labelled_nodes(graph, self.text)
        if not nodes:
            raise SelectorError(unknown_label(graph, self.text))
        return {node.index: OP_SITE for node in nodes}

    def hint(self, graph: Graph) -> str:
        """Return the labels that are nearest."""
        return unknown_label(graph, self.text)


@final
@dataclass(frozen=True, slots=True, repr=False)
class LabelContains(OpTest):
    """Ops whose label contains a text, whatever the capitals."""

    text: str
    kind: ClassVar[str] = "label_contains"

    def takes(self, op: OpRecord) -> bool:
        """Return whether the label of `op` contains the text."""
        return self.text.casefold() in op.label.casefold()

    def hint(self, graph: Graph) -> str:
        """Return the labels that are nearest."""
        return unknown_name(self.text, (op.label for op in graph.ops), "trace.ops")


@final
@dataclass(frozen=True, slots=True, repr=False)
class Regex(OpTest):
    """Ops in whose label a regular expression finds something."""

    pattern: str
    kind: ClassVar[str] = "regex"

    def __post_init__(self) -> None:
        """Refuse a pattern that does not compile."""
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise SelectorError(
                f"{self.pattern!r} is not a regular expression: {error}. To find a "
                "plain text, use tl.label_contains."
            ) from error

    def takes(self, op: OpRecord) -> bool:
        """Return whether the pattern occurs in the label of `op`."""
        return re.search(self.pattern, op.label) is not None

    def hint(self, graph: Graph) -> str:
        """Return some labels to try the pattern on."""
        labels = [op.label for op in graph.ops]
        return (
            f"The pattern is searched in labels such as {listed(labels)}; capitals "
            "count. For module addresses use tl.in_module or a glob."
        )


@final
@dataclass(frozen=True, slots=True, repr=False)
class Where(Leaf):
    """Ops that a function of yours answers true for; cannot be stored."""

    test: Callable[[Op], Any]
    kind: ClassVar[str] = "where"

    def pick(self, graph: Graph) -> Picks:
        """Return the ops that the function takes.

        Raises:
            SelectorError: If the function fails on an op.
        """
        return {op.index: OP_SITE for op in graph.ops if self._takes(graph, op)}

    def _takes(self, graph: Graph, op: OpRecord) -> bool:
        try:
            return bool(self.test(Op(graph, op.index)))
        except Exception as error:
            raise SelectorError(
                f"{self!r} failed on {op.label!r}: {type(error).__name__}: {error}. "
                "The function gets one op (label, shape, dtype, module, ...) before "
                "payloads exist, and answers true or false."
            ) from error

    def to_dict(self) -> dict[str, object]:
        """Refuse: a function cannot be written down."""
        raise SelectorError(
            f"{self!r} cannot be stored: it holds a Python function. Say the same "
            "with func, module, in_module, label, regex, output or module_type, or "
            "give the labels that it picks."
        )

    def hint(self, graph: Graph) -> str:
        """Return how often the function was asked."""
        return f"The function answered false for all {len(graph.ops)} ops."

    def __repr__(self) -> str:
        """Return the expression with the function's name."""
        return f"where({getattr(self.test, '__name__', repr(self.test))})"


@final
@dataclass(frozen=True, slots=True, repr=False)
class FollowedBy(Leaf):
    """Ops that something picked by another selector reads directly."""

    selector: Selector
    kind: ClassVar[str] = "followed_by"

    def pick(self, graph: Graph) -> Picks:
        """Return the ops with such a child."""
        near = set(evaluate(self.selector, graph))
        return {
            op.index: OP_SITE
            for op in graph.ops
            if not near.isdisjoint(graph.children(op.index))
        }

    def inner(self) -> tuple[Selector, ...]:
        """Return the selector of the children."""
        return (self.selector,)

    def hint(self, graph: Graph) -> str:
        """Return what the inner selector picked."""
        return _no_neighbour(self.selector, graph, "No op is read by it.")


@final
@dataclass(frozen=True, slots=True, repr=False)
class PrecededBy(Leaf):
    """Ops that directly read something picked by another selector."""

    selector: Selector
    kind: ClassVar[str] = "preceded_by"

    def pick(self, graph: Graph) -> Picks:
        """Return the ops with such a parent."""
        near = set(evaluate(self.selector, graph))
        return {
            op.index: OP_SITE for op in graph.ops if not near.isdisjoint(op.parents)
        }

    def inner(self) -> tuple[Selector, ...]:
        """Return the selector of the parents."""
        return (self.selector,)

    def hint(self, graph: Graph) -> str:
        """Return what the inner selector picked."""
        return _no_neighbour(self.selector, graph, "No op reads it.")


def _no_such_output(ops: list[OpRecord]) -> str:
    counts = {f"{op.func_name} has {op.num_outputs}": None for op in ops}
    return (
        f"Outputs count from 0, and only among several: {', '.join(list(counts)[:4])}."
    )


def _no_neighbour(selector: Selector, graph: Graph, alone: str) -> str:
    if evaluate(selector, graph):
        return f"{selector!r} picks something, but {alone[0].lower()}{alone[1:]}"
    return f"{selector!r} itself picks nothing."

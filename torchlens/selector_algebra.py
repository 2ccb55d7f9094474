"""Selectors as values: how they combine, resolve, explain themselves.

A selector stands for a set of tensors of a graph, each known by the node that made it,
and `&`, `|`, `-`, `~` are the set operations on those nodes; `~` is taken over the
ops of the graph and the nodes that the expression itself names.  So every law of sets
holds for the tensors.

How a tensor is caught, and so what it is called, is carried along: a part that names
module sites (`module`, `module_input`, `module_type`) gives its tensors those sites,
and `&`, `|`, `-` keep them.  `module("fc") & func("linear")` is the site `fc`, while
`~~module("fc")` is the same tensor under its op's label.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import ClassVar, final

from .errors import SelectorError
from .graph import Graph, Site
from .picks import Operator, Picks, combine, describe, order_sites

SIGNS: Mapping[Operator, str] = {"and": " & ", "or": " | ", "minus": " - ", "not": "~"}

__all__ = [
    "SIGNS",
    "Combination",
    "Leaf",
    "Selector",
    "evaluate",
]


class Selector(ABC):
    """An immutable description of sites, combined with `&`, `|`, `-` and `~`."""

    __slots__ = ()

    @abstractmethod
    def parts(self) -> tuple["Selector", ...]:
        """Return the selectors this one is made of; none for a leaf."""

    @abstractmethod
    def to_dict(self) -> dict[str, object]:
        """Return the selector as JSON values.

        Raises:
            SelectorError: If a part holds a Python function.
        """

    @final
    def __and__(self, other: "Selector") -> "Selector":
        """Return what both pick."""
        return _combined("and", self, other)

    @final
    def __or__(self, other: "Selector") -> "Selector":
        """Return what either picks."""
        return _combined("or", self, other)

    @final
    def __sub__(self, other: "Selector") -> "Selector":
        """Return what this picks and `other` does not."""
        return _combined("minus", self, other)

    @final
    def __invert__(self) -> "Selector":
        """Return every op that this does not pick."""
        return Combination("not", (self,))

    @final
    def __bool__(self) -> bool:
        """Refuse `and`, `or` and `not`, which would drop a part without a word."""
        raise SelectorError(
            f"{self!r} has no truth value: a selector picks nothing before it meets a "
            "graph. Combine selectors with &, |, - and ~, not with and, or, not."
        )

    @final
    def resolve(self, graph: Graph) -> tuple[Site, ...]:
        """Return the sites of `graph` that this selector picks, in execution order.

        Args:
            graph: A traced graph; payloads are not needed.

        Returns:
            At least one site, each once.

        Raises:
            SelectorError: If nothing matches, or an address or label that the selector
                names does not exist; the message names near misses.
        """
        picks = evaluate(self, graph)
        if not picks:
            raise SelectorError(_nothing_matches(self, graph))
        return order_sites(graph, picks)

    @final
    def explain(self, graph: Graph) -> str:
        """Return a text that shows what each part of the selector matched."""
        return "\n".join(_explain(self, graph, 0))

    @final
    def to_json(self) -> str:
        """Return the selector as JSON text, which `from_json` reads.

        Raises:
            SelectorError: If a part is `where(...)`, whose function cannot be stored.
        """
        return json.dumps(self.to_dict(), ensure_ascii=False)


class Leaf(Selector):
    """A selector that is not made of others by an operator: a frozen dataclass.

    Its fields are the arguments of the function that `kind` names, in order.
    """

    __slots__ = ()
    kind: ClassVar[str]

    @abstractmethod
    def pick(self, graph: Graph) -> Picks:
        """Return what this picks in `graph`; nothing is not an error here."""

    @abstractmethod
    def hint(self, graph: Graph) -> str:
        """Return sentences that help when this picked nothing."""

    @final
    def parts(self) -> tuple[Selector, ...]:
        """Return no parts."""
        return ()

    def inner(self) -> tuple[Selector, ...]:
        """Return selectors among the arguments, for `explain`."""
        return ()

    def arguments(self) -> dict[str, object]:
        """Return the arguments that differ from their defaults."""
        given = {}
        for field in fields(self):  # type: ignore[arg-type]  # every leaf is one
            value = getattr(self, field.name)
            if field.default is MISSING or value != field.default:
                given[field.name] = value
        return given

    def to_dict(self) -> dict[str, object]:
        """Return the selector as JSON values."""
        given = {name: _to_json(value) for name, value in self.arguments().items()}
        return {"select": self.kind, **given}

    def __repr__(self) -> str:
        """Return the expression as it is written."""
        first, *others = self.arguments().items() or [("", None)]
        texts = [repr(first[1])] if first[0] else []
        texts += [f"{name}={value!r}" for name, value in others]
        return f"{self.kind}({', '.join(texts)})"


@final
@dataclass(frozen=True, slots=True, repr=False)
class Combination(Selector):
    """An operator and the selectors it is applied to."""

    operator: Operator
    operands: tuple[Selector, ...]

    def parts(self) -> tuple[Selector, ...]:
        """Return the operands."""
        return self.operands

    def to_dict(self) -> dict[str, object]:
        """Return the combination as JSON values."""
        parts = [operand.to_dict() for operand in self.operands]
        return {"select": self.operator, "parts": parts}

    def __repr__(self) -> str:
        """Return the expression as it is written."""
        texts = [_operand(operand) for operand in self.operands]
        sign = SIGNS[self.operator]
        return f"{sign}{texts[0]}" if self.operator == "not" else sign.join(texts)


def evaluate(selector: Selector, graph: Graph) -> Picks:
    """Return the nodes that `selector` picks, without refusing an empty answer."""
    picked = {leaf: leaf.pick(graph) for leaf in _leaves(selector)}
    universe = frozenset(op.index for op in graph.ops).union(*picked.values())
    return _combine(selector, picked, universe)


def _combine(
    selector: Selector, picked: Mapping[Leaf, Picks], universe: frozenset[int]
) -> Picks:
    if isinstance(selector, Leaf):
        return picked[selector]
    parts = tuple(_combine(part, picked, universe) for part in selector.parts())
    assert isinstance(selector, Combination)  # the only other kind
    return combine(selector.operator, parts, universe)


def _leaves(selector: Selector) -> Iterator[Leaf]:
    if isinstance(selector, Leaf):
        yield selector
    for part in selector.parts():
        yield from _leaves(part)


def _to_json(value: object) -> object:
    if isinstance(value, Selector):
        return value.to_dict()
    return list(value) if isinstance(value, tuple) else value


def _combined(operator: Operator, left: Selector, right: Selector) -> Selector:
    if not isinstance(right, Selector):
        raise SelectorError(
            f"{left!r}{SIGNS[operator]}... needs another selector, not "
            f"{type(right).__name__} {right!r}. A name becomes one with "
            'tl.module("addr"), tl.label("relu_1_2") or tl.func("relu").'
        )
    return Combination(
        operator,
        (*_flat(operator, left), *(_flat(operator, right, operator != "minus"))),
    )


def _flat(
    operator: Operator, side: Selector, associative: bool = True
) -> tuple[Selector, ...]:
    """Return the operands of a side that is the same operator, so that chains are flat.

    `a - (b - c)` is another set than `a - b - c`, so the right side of "minus" stays.
    """
    same = isinstance(side, Combination) and side.operator == operator
    return side.parts() if same and associative else (side,)


def _operand(selector: Selector) -> str:
    compound = isinstance(selector, Combination) and selector.operator != "not"
    return f"({selector!r})" if compound else repr(selector)


def _explain(selector: Selector, graph: Graph, depth: int) -> Iterator[str]:
    try:
        picks = evaluate(selector, graph)
        found = describe(graph, picks)
        if not picks and isinstance(selector, Leaf):
            found = f"nothing. {selector.hint(graph)}"
    except SelectorError as error:
        found = f"an error. {error}" if isinstance(selector, Leaf) else "an error"
    yield f"{'  ' * depth}{selector!r} -> {found}"
    inner = selector.inner() if isinstance(selector, Leaf) else selector.parts()
    for part in inner:
        yield from _explain(part, graph, depth + 1)


def _nothing_matches(selector: Selector, graph: Graph) -> str:
    start = f"No site of {graph.model_name} matches {selector!r}."
    if isinstance(selector, Leaf):
        return f"{start} {selector.hint(graph)}"
    lines = "\n".join(_explain(selector, graph, 1))
    return f"{start} Its parts picked:\n{lines}"

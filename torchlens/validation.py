"""Checks a trace against the tensors it saved: every op is executed again.

An op passes when its function, given the payloads of its recorded parents, returns its
own payload.  This catches a wrong edge, a payload that was overwritten, and, with the
structural checks beside it, an op that is missing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .call_conditions import CallConditions, uncast
from .graph import Graph
from .guards import CompositeGuards
from .model_access import plain_name
from .model_state import EAGER_AND_UNFUSED, preserved_randomness
from .records import ArgRef, OpRecord, Path
from .structures import format_path, get_at, leaves, map_tensors, parse_path
from .tracer import Capture

__all__ = ["ValidationReport", "output_differences", "validate_capture"]


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """What a validation found; true when nothing failed.

    Attributes:
        num_checked: Ops that were executed again and compared.
        skipped: One sentence for each op that could not be.
        failures: One sentence for each mismatch.
    """

    num_checked: int
    skipped: tuple[str, ...]
    failures: tuple[str, ...]

    def __bool__(self) -> bool:
        return not self.failures

    def __str__(self) -> str:
        verdict = "passed" if self else "FAILED"
        lines = [
            f"Validation {verdict}: {self.num_checked} ops executed again, "
            f"{len(self.skipped)} skipped, {len(self.failures)} failures."
        ]
        lines += [f"  failed: {text}" for text in self.failures]
        lines += [f"  skipped: {text}" for text in self.skipped]
        return "\n".join(lines)


def output_differences(
    capture: Capture, plain: Mapping[Path, torch.Tensor]
) -> tuple[str, ...]:
    """Return how the captured output differs from that of a plain forward."""
    watched = dict(leaves(capture.output))
    if watched.keys() != plain.keys():
        return ("The output has another structure with the capture than without.",)
    found = []
    for path, tensor in plain.items():
        difference = _difference(tensor, watched[path])
        if difference:
            found.append(f"output{format_path(path)} without capture: {difference}")
    return tuple(found)


def validate_capture(capture: Capture) -> ValidationReport:
    """Execute each op of `capture` again from its saved parents and compare.

    Args:
        capture: A capture that kept all payloads.

    Returns:
        The report; nothing is raised for a mismatch.
    """
    check = _Check(capture)
    check.structure()
    check.module_calls()
    check.model_output(capture.output)
    with preserved_randomness(capture.model), EAGER_AND_UNFUSED, uncast():
        for call in check.calls().values():
            check.execute(call)
    return ValidationReport(
        check.num_checked, tuple(check.skipped), tuple(check.failures)
    )


class _Check:
    def __init__(self, capture: Capture) -> None:
        self._graph: Graph = capture.graph
        self._payloads = capture.payloads
        self._conditions = capture.conditions
        self._tensors = _named_tensors(capture.model, capture.graph)
        self.num_checked = 0
        self.skipped: list[str] = []
        self.failures: list[str] = []

    def structure(self) -> None:
        """Check what must hold of any graph, without payloads."""
        numbers = [node.call for node in self._graph.nodes]
        steps = sorted({node.step for node in self._graph.ops})
        if sorted(set(numbers)) != list(range(1, len(set(numbers)) + 1)):
            self.failures.append(
                "The torch calls are not numbered without gaps: an op is missing."
            )
        if steps != list(range(1, len(steps) + 1)):
            self.failures.append("The layers are not numbered without gaps.")
        for position, node in enumerate(self._graph.nodes):
            if node.index != position:
                self.failures.append(
                    f"{node.label} says it is node {node.index} but is {position}."
                )
            if any(parent >= position for parent in node.parents):
                self.failures.append(f"{node.label} has a parent that ran after it.")
            if node.func is not None:
                read = _read_nodes((node.args, dict(node.kwargs)))
                if read != set(node.parents):
                    self.failures.append(
                        f"{node.label} lists parents {sorted(node.parents)} but its "
                        f"arguments came from {sorted(read)}."
                    )

    def module_calls(self) -> None:
        """Check that each module's output was made while the module ran."""
        for call in self._graph.module_calls:
            for leaf in call.outputs:
                place = f"The output{format_path(leaf.path)} of {call.label}"
                node = self._graph.nodes[leaf.node]
                if not call.first_node <= leaf.node < call.end_node:
                    self.failures.append(f"{place} is {node.label}, made outside it.")
                elif node.spec != leaf.spec:
                    self.failures.append(f"{place} is not shaped like {node.label}.")

    def model_output(self, output: Any) -> None:
        """Check that the output nodes are the tensors that the model returned."""
        if self._graph.halted:
            return
        returned = dict(leaves(output))
        nodes = {node.key.path: node for node in self._graph.outputs}
        for path in returned.keys() - nodes.keys():
            self.failures.append(f"The output at {format_path(path)!r} has no node.")
        for path, node in nodes.items():
            if path not in returned:
                self.failures.append(f"{node.label}: the model returned nothing there.")
            elif node.index in self._payloads:
                difference = _difference(returned[path], self._payloads[node.index])
                if difference:
                    self.failures.append(f"{node.label} is not what came: {difference}")

    def calls(self) -> Mapping[int, list[OpRecord]]:
        """Return the nodes of each torch call together."""
        calls: dict[int, list[OpRecord]] = {}
        for node in self._graph.nodes:
            calls.setdefault(node.call, []).append(node)
        return calls

    def execute(self, outputs: list[OpRecord]) -> None:
        """Execute one torch call again and compare all its outputs."""
        node = outputs[0]
        if node.kind == "input" or node.type == "unknown":
            if node.type == "unknown":
                self.skipped.append(f"{node.label}: its origin was not seen.")
            return
        missing = [o.label for o in outputs if o.index not in self._payloads]
        if missing:
            self.skipped.append(f"{', '.join(missing)}: no payload was kept.")
            return
        try:
            found = self._results(node)
        except LookupError as error:
            self.skipped.append(f"{node.label}: {error.args[0]}")
            return
        except Exception as error:  # any failure of the op is a finding
            self.failures.append(f"{node.label} could not be executed again: {error}")
            return
        for output in outputs:
            self.num_checked += 1
            expected = self._payloads[output.index]
            result = found.get(output.output_path)
            if output.type.startswith(("empty", "newempty")):
                result = expected if result is not None else None  # never initialised
            difference = _difference(result, expected)
            if difference:
                self.failures.append(f"{output.label}: {difference}")

    def _results(self, node: OpRecord) -> dict[tuple[str | int, ...], torch.Tensor]:
        if node.func is None:  # identity or output: the parent, unchanged
            if node.args:
                return {(): self._value(node.args[0])}
            return {(): self._value(ArgRef(node.parents[0]))}
        args = _filled(node.args, self._value)
        kwargs = {key: _filled(item, self._value) for key, item in node.kwargs.items()}
        if node.inplace:
            args, kwargs = map_tensors((args, kwargs), torch.clone)
        conditions = self._conditions.get(node.call, CallConditions())
        with (
            torch.set_grad_enabled(self._graph.grad_mode),
            conditions.restored(),
            CompositeGuards(),
        ):
            result = node.func(*args, **kwargs)
        if node.inplace and result is None:
            result = args[0]
        return dict(leaves(result))

    def _value(self, ref: ArgRef) -> torch.Tensor:
        if ref.value is not None:
            assert isinstance(ref.value, torch.Tensor)
            return ref.value
        if ref.node is not None:
            if ref.node not in self._payloads:
                raise LookupError(f"the payload of node {ref.node} was not kept.")
            return self._payloads[ref.node]
        return self._tensors[ref.param or ref.buffer or ""]


def _named_tensors(model: nn.Module, graph: Graph) -> dict[str, torch.Tensor]:
    named: dict[str, torch.Tensor] = {
        plain_name(name): tensor
        for name, tensor in model.named_parameters(remove_duplicate=False)
    }
    named |= {
        # A forward in training mode writes running statistics while it reads them.
        plain_name(name): buffer.detach().clone() if graph.training else buffer
        for name, buffer in model.named_buffers(remove_duplicate=False)
    }
    for name in graph.buffers:
        if name not in named:
            named[name] = _plain_attribute(model, name)
    return named


def _plain_attribute(model: nn.Module, name: str) -> torch.Tensor:
    owner, _, attribute = name.rpartition(".")
    head, bracket, rest = attribute.partition("[")
    value = getattr(model.get_submodule(owner), head)
    found = get_at(value, parse_path(bracket + rest))
    assert isinstance(found, torch.Tensor)
    return found


def _filled(value: Any, value_of: Any) -> Any:
    """Return recorded arguments with every reference replaced by its tensor."""
    if isinstance(value, ArgRef):
        return value_of(value)
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([_filled(item, value_of) for item in value])
    if kind is slice:
        bounds = (value.start, value.stop, value.step)
        return slice(*(_filled(bound, value_of) for bound in bounds))
    if kind is dict:
        return {key: _filled(item, value_of) for key, item in value.items()}
    return value


def _read_nodes(value: Any) -> set[int]:
    found: set[int] = set()
    if isinstance(value, ArgRef):
        found |= {n for n in (value.node, value.written_by) if n is not None}
    elif isinstance(value, tuple | list):
        for item in value:
            found |= _read_nodes(item)
    elif isinstance(value, dict):
        for item in value.values():
            found |= _read_nodes(item)
    elif isinstance(value, slice):
        found |= _read_nodes((value.start, value.stop, value.step))
    return found


def _difference(found: torch.Tensor | None, expected: torch.Tensor) -> str:
    """Return how two results differ, "" if they agree to rounding."""
    if found is None:
        return "executing it again returned no tensor there."
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return (
            f"executed again it gives {found.dtype} {list(found.shape)}, "
            f"saved was {expected.dtype} {list(expected.shape)}."
        )
    if found.layout != torch.strided:  # torch compares dense tensors only
        found, expected = found.to_dense(), expected.to_dense()
    if torch.equal(found, expected):
        return ""
    with torch.no_grad():
        if expected.is_floating_point() or expected.is_complex():
            close = torch.allclose(found, expected, 1e-4, 1e-6, equal_nan=True)
            if close:
                return ""
            gap = (found - expected).abs().nan_to_num(posinf=0.0).max()
            return f"executed again it differs by up to {gap.item():.3g}."
    return "executed again it gives other values."

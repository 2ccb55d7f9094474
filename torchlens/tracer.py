"""Runs a model once and builds the graph of what it did, payloads on request."""

import gc
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .call_conditions import CallConditions
from .capture_mode import CaptureMode
from .capture_state import CaptureState, StopCapture
from .errors import CaptureError, InputError, TorchLensError
from .graph import Graph
from .graph_building import ModelNames, build_graph
from .guards import CompositeGuards
from .model_state import (
    EAGER_AND_UNFUSED,
    TURNS,
    preserved_attributes,
    preserved_randomness,
    preserved_state,
)
from .module_tracking import ModuleTracker, call_sites
from .records import SiteKey
from .structures import format_path, leaves

_MODEL_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)

__all__ = ["Capture", "run_capture"]


@dataclass(frozen=True, slots=True)
class Capture:
    """A graph, the payloads that were kept, and what the model returned.

    Attributes:
        model: The captured model.
        graph: Records of the forward pass.
        payloads: Saved tensors by node index.
        versions: Write count of each payload when it was saved; `None` if not counted.
        conditions: Random state and autocast of the torch calls whose result depends on
            them, by call number; kept when all payloads are.
        output: The model's output; `None` when the forward was stopped.
    """

    model: nn.Module
    graph: Graph
    payloads: Mapping[int, torch.Tensor]
    versions: Mapping[int, int | None]
    conditions: Mapping[int, CallConditions]
    output: Any


def run_capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    wanted: frozenset[SiteKey] | None = frozenset(),
    stop_at: SiteKey | None = None,
    detach: bool = False,
) -> Capture:
    """Run `model` once in the current grad mode and train/eval mode.

    Args:
        model: A plain module (see `model_access.unwrap_model`).
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        wanted: Keys of the nodes whose payload is kept; `None` keeps all.
        stop_at: Key of an op or module output after which the forward ends.
        detach: Whether payloads lose their connection to autograd.

    Returns:
        The capture; the model, its hooks and the random generators are as before.

    Raises:
        CaptureError: If a capture is running already, or nothing was returned.
        InputError: If the model's forward failed on these inputs.
    """
    _refuse_nesting()
    names = ModelNames(model)
    state = CaptureState(names.params, names.buffers, wanted, stop_at, detach)
    grad_mode = torch.is_grad_enabled()
    with TURNS, _without_collections():
        output = _run(model, args, kwargs, names, state)
        if not state.stopped:
            _add_outputs(state, output, model)
        graph = build_graph(state, names, grad_mode)
        _check_overwritten(graph, state)
        if state.gaps != list(graph.gaps):
            graph = build_graph(state, names, grad_mode)
    payloads = state.payloads
    return Capture(
        model, graph, payloads.tensors, payloads.versions, state.conditions, output
    )


@contextmanager
def _without_collections() -> Iterator[None]:
    """Hold back garbage collections, which thousands of new records would trigger."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _refuse_nesting() -> None:
    for index in range(torch._C._len_torch_function_stack()):
        if isinstance(torch._C._get_function_stack_at(index), CaptureMode):
            raise CaptureError(
                "A capture was started inside the forward of a model that is being "
                "captured. Captures do not nest: end the outer one first."
            )


def _run(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    names: ModelNames,
    state: CaptureState,
) -> Any:
    sites = call_sites()
    tracker = ModuleTracker(names.addresses, state, sites)
    depth = torch._C._len_torch_function_stack()
    with ExitStack() as stack:
        stack.enter_context(preserved_randomness(model))
        stack.enter_context(preserved_state(model))
        stack.enter_context(preserved_attributes(model))
        stack.enter_context(EAGER_AND_UNFUSED)
        stack.callback(state.generators.restore)
        stack.callback(state.restore_written)
        stack.callback(_restore_modes, depth)
        stack.callback(tracker.remove)
        tracker.install()
        stack.enter_context(CompositeGuards())
        stack.enter_context(CaptureMode(state, sites))
        try:
            output = tracker.call(model, args, kwargs)
            state.stopped = False  # else the model has caught the stop
            return output
        except StopCapture:
            return None
        except _MODEL_ERRORS as error:
            if isinstance(error, torch.OutOfMemoryError | TorchLensError):
                raise
            failed = tracker.failure
            place = "" if failed is None else f", in module {failed[1].address!r}"
            raise _explain(model, args, kwargs, state, error, place) from error


def _restore_modes(depth: int) -> None:
    """Pop function modes that a stop or an error left behind."""
    while torch._C._len_torch_function_stack() > depth:
        torch._C._pop_torch_function_stack()


def _explain(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    state: CaptureState,
    error: Exception,
    place: str,
) -> InputError:
    given = ", ".join(
        f"{format_path(path[1:])} {str(tensor.dtype).removeprefix('torch.')} "
        f"{list(tensor.shape)} on {tensor.device}"
        for path, tensor in leaves((args, dict(kwargs)))
    )
    after = ""
    if state.nodes:
        node = state.nodes[-1]
        after = f" after {len(state.nodes)} nodes, the last one {node.call.type!r}"
    return InputError(
        f"The forward of {type(model).__name__} failed{place}{after}: "
        f"{type(error).__name__}: {error}. The inputs were: {given or 'no tensors'}. "
        "Check that they fit the model's call: shapes, dtypes, devices, arguments."
    )


def _add_outputs(state: CaptureState, output: Any, model: nn.Module) -> None:
    found = False
    for path, tensor in leaves(output):
        found = True
        node = state.table.node_of(tensor)
        if node is None:  # replaced by a hook of the root after ours
            node = len(state.nodes) - 1
        key = SiteKey("module_output", "self", 1, path=path)
        raw = state.boundary("output", "output", tensor, (node,), key)
        state.add(raw, tensor)
    if not found:
        raise CaptureError(
            f"The forward of {type(model).__name__} returned "
            f"{type(output).__name__} without any tensor in it, so there is no output "
            "to follow. Return the result from forward as a tensor, tuple, list, dict "
            "or dataclass."
        )


def _check_overwritten(graph: Graph, state: CaptureState) -> None:
    payloads = state.payloads
    for node in payloads.overwritten():
        del payloads.tensors[node], payloads.versions[node]
        state.gaps.append(
            f"The value of {graph.nodes[node].label!r} was overwritten by code that "
            "the capture cannot see, and was dropped."
        )

"""The faces of one look at one forward pass: trace it, and check the trace."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from .errors import CaptureError, InputError, SelectorError
from .graph import Graph, Site
from .lookup import Layers, resolve_layers
from .model_access import unwrap_model
from .model_state import preserved_randomness, preserved_state
from .records import SiteKey
from .structures import leaves
from .tracer import Capture, run_capture
from .validation import ValidationReport, output_differences, validate_capture
from .views import Trace

__all__ = ["trace", "validate"]


def trace(
    model: nn.Module,
    *args: Any,
    input_args: Sequence[Any] | None = None,
    input_kwargs: Mapping[str, Any] | None = None,
    save: Layers | Literal["all", "none"] = "all",
    stop_after: Layers | None = None,
    halt: Layers | None = None,
    detach: bool = False,
) -> Trace:
    """Run `model` once and return everything that happened.

    The forward runs in the grad mode and train/eval mode that are on.  Modes, buffers,
    `requires_grad` flags, hooks and the random generators are left as they were found.

    With `save`, `stop_after` or `halt` naming layers the forward runs twice: once to
    learn what the names mean, once to capture.

    Args:
        model: The module; DDP and compile wrappers are looked through.
        *args: Positional inputs, passed on as they are; numpy arrays become tensors.
        input_args: The same as a sequence, instead of `*args`.
        input_kwargs: Keyword inputs.
        save: Whose outputs to keep: "all", "none" (structure only), or layers as in
            `tl.pluck`.  Kept tensors are references; they are copied only when an
            in-place op is about to overwrite them.
        stop_after: End the forward once all of these layers have run.
        halt: End the forward once the first of these layers has run.
        detach: Whether kept tensors lose their connection to autograd.

    Returns:
        The trace: look up ops, layers and modules with `trace[key]`.

    Raises:
        ModelError: If `model` cannot be captured.
        InputError: If the model's forward fails on these inputs.
        SelectorError: If a layer names nothing.
        CaptureError: If a capture is running already, or the model returns no tensor.

    Example:
        >>> import torchlens as tl
        >>> model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
        >>> trace = tl.trace(model, torch.ones(4, 3))
        >>> trace["relu_1_2"].shape
        (4, 2)
    """
    module = unwrap_model(model)
    arguments = _arguments(args, input_args)
    keywords = {key: _tensor(value) for key, value in (input_kwargs or {}).items()}
    if stop_after is not None and halt is not None:
        raise SelectorError(
            "Both stop_after and halt were given. stop_after ends after the last of "
            "its layers, halt after the first: give one of them."
        )
    last = halt if stop_after is None else stop_after
    kept = None if isinstance(save, str) and save in ("all", "none") else save
    wanted: frozenset[SiteKey] | None = frozenset() if save == "none" else None
    stop_at = None
    if kept is not None or last is not None:
        graph = run_capture(module, arguments, keywords).graph
        if kept is not None:
            sites = resolve_layers(graph, kept).values()
            wanted = frozenset(graph.nodes[site.node].key for site in sites)
        if last is not None:
            ends = sorted(resolve_layers(graph, last).values(), key=lambda s: s.order)
            stop_at = _stop_key(graph, ends[0 if stop_after is None else -1])
    capture = run_capture(
        module, arguments, keywords, wanted=wanted, stop_at=stop_at, detach=detach
    )
    if stop_at is not None and not capture.graph.halted:
        raise CaptureError(
            f"The forward of {type(module).__name__} did not stop at {last!r}: it took "
            "another path the second time, or its own bare `except:` caught the stop. "
            "Trace it without stop_after and halt."
        )
    return Trace(capture)


def _stop_key(graph: Graph, site: Site) -> SiteKey:
    """Return where the forward ends: an input of a module ends at what made it."""
    if site.key.kind == "module_input":
        return graph.nodes[site.node].key
    return site.key


def validate(
    traced: Trace | nn.Module,
    *args: Any,
    input_kwargs: Mapping[str, Any] | None = None,
) -> ValidationReport:
    """Execute every op again from its saved parents and compare.

    Args:
        traced: A trace that kept all payloads, or a model to trace now.
        *args: Positional inputs; with a trace they may be left out.
        input_kwargs: Keyword inputs.

    Returns:
        The report; it is true when nothing failed.  With inputs, the output of a plain
        forward without any capture is compared too.

    Raises:
        InputError: If a model comes without inputs.

    Example:
        >>> import torchlens as tl
        >>> bool(tl.validate(nn.Linear(3, 2), torch.ones(4, 3)))
        True
    """
    has_inputs = bool(args) or bool(input_kwargs)
    if not isinstance(traced, Trace):
        if not has_inputs:
            raise InputError(
                f"To validate the model {type(traced).__name__} its inputs are needed: "
                "tl.validate(model, x)."
            )
        traced = trace(traced, *args, input_kwargs=input_kwargs)
    capture = traced.capture
    report = validate_capture(capture)
    if not has_inputs or capture.graph.halted:
        return report
    arguments = _arguments(args, None)
    keywords = {key: _tensor(value) for key, value in (input_kwargs or {}).items()}
    differences = output_differences(capture, _plain(capture, arguments, keywords))
    return ValidationReport(
        report.num_checked, report.skipped, (*report.failures, *differences)
    )


def _plain(
    capture: Capture, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Mapping[Any, torch.Tensor]:
    """Return the output tensors of a forward that nobody watches."""
    model = capture.model
    with (
        preserved_randomness(model),
        preserved_state(model),
        torch.set_grad_enabled(capture.graph.grad_mode),
    ):
        return dict(leaves(model(*args, **kwargs)))


def _arguments(
    args: tuple[Any, ...], input_args: Sequence[Any] | None
) -> tuple[Any, ...]:
    if input_args is None:
        return tuple(map(_tensor, args))
    if args:
        raise InputError(
            f"Both {len(args)} positional inputs and input_args were given; input_args "
            "stands for the positional inputs. Give one of the two."
        )
    if not isinstance(input_args, tuple | list):
        raise InputError(
            "input_args was wanted as a tuple or list of positional inputs, but came "
            f"as {type(input_args).__name__}. Write input_args=(x,) for one input."
        )
    return tuple(map(_tensor, input_args))


def _tensor(value: Any) -> Any:
    """Return a numpy array as a tensor, everything else as it is."""
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value

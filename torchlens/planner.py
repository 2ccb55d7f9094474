"""Makes a plan: traces once, then proves on small batches what every site will do."""

import inspect
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from .aliasing import Aliases
from .catch_choice import choose_catch
from .catches import Catch
from .errors import InputError, PlanError, TorchLensError
from .graph import Graph, Site
from .identity import digest_text, identify
from .lookup import Layers, resolve_layers
from .model_access import unwrap_model
from .model_inputs import ModelInputs, as_inputs
from .model_state import preserved_randomness, untouched
from .near_misses import listed
from .plan_fit import python_version
from .plans import CapturePlan, SitePlan
from .probe import OtherPathError, Probe, preserved_tensors
from .proofs import ALLOWED, Evidence, gather
from .run_modes import RunModes, ambient_autocast, training_mode
from .stored_dtypes import choose_dtypes
from .tracer import run_capture

__all__ = ["check_call", "device_type", "plan"]


def plan(
    model: nn.Module,
    example: Any,
    layers: Layers,
    *,
    dtype: str | torch.dtype | Mapping[str, str | torch.dtype] | None = None,
    batch_axis: int = 0,
    training: bool = False,
    allow: Collection[str] = (),
) -> CapturePlan:
    """Return a plan that captures `layers` of `model` for batches like `example`.

    The model is traced once and run a few times on batches of three, two and one
    samples taken from `example`; it is left as it was found.

    Args:
        model: The model to capture.
        example: One collated batch: a tensor, a tuple of positional arguments, a
            mapping of keyword arguments, or `ModelInputs`.
        layers: Labels, module addresses, globs, selectors, or a mapping to these.
        dtype: Kept as this; one for every floating-point site, or one by name.
        batch_axis: The axis of the inputs that holds the samples.
        training: Whether to run in train mode; otherwise in eval mode.
        allow: What is refused unless named here: "constants" (sites without a batch
            axis), "mixing" (values that depend on the other samples of a batch),
            "fixed_batch" (models that take batches of one size only).

    Raises:
        PlanError: If a site cannot be extracted row by row, or dtype or allow is wrong.
        InputError: If the example does not fit the model.
        SelectorError: If layers name nothing, or too much.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU())
        >>> plan(model, torch.randn(4, 3), "1").sites[0].row_shape
        (2,)
    """
    _check_allow(allow)
    module = unwrap_model(model)
    inputs = as_inputs(example)
    check_call(module, inputs)
    inputs.num_samples(batch_axis)
    autocast = ambient_autocast(device_type(module))
    modes = RunModes(autocast)
    with ExitStack() as stack:
        stack.enter_context(untouched(module))
        stack.enter_context(training_mode(module, training))
        left = stack.enter_context(preserved_tensors(module))
        stack.enter_context(preserved_randomness(module))
        modes.enter(stack, inference=False)
        probe = Probe(module, modes)
        study = _study(module, probe, inputs, layers, batch_axis, frozenset(allow))
        # A forward that turns autograd on for itself cannot do so in inference mode.
        differentiates = any(op.requires_grad for op in study.graph.ops)
        inference = not (left.found or differentiates)
    batch, graph, evidence = study.batch, study.graph, study.evidence
    site_plans = _site_plans(graph, study.sites, study.catches, evidence)
    site_plans = choose_dtypes(site_plans, dtype)
    return CapturePlan(
        sites=site_plans,
        model=identify(module),
        graph_digest=_graph_digest(graph, max(s.order for s in study.sites.values())),
        training=training,
        inference=inference,
        autocast=autocast,
        input_batch_axis=batch_axis,
        fixed_batch=batch.num_samples(batch_axis) if evidence.fixed else None,
        torch_version=torch.__version__,
        python_version=python_version(),
        weight_bytes=_weight_bytes(module),
        activation_bytes=_activation_bytes(graph) // batch.num_samples(batch_axis),
        checks=evidence.checks,
        notes=(*evidence.notes, *study.notes, *_alias_notes(study)),
    )


def _check_allow(allow: Collection[str]) -> None:
    strange = [allow] if isinstance(allow, str) else sorted(set(allow) - ALLOWED)
    if strange:
        raise PlanError(
            f"allow was wanted as a collection of {', '.join(sorted(ALLOWED))}, but "
            f"{strange[0]!r} came."
        )


def check_call(model: nn.Module, inputs: ModelInputs) -> None:
    """Refuse inputs that the signature of the model's forward does not take.

    Raises:
        InputError: If arguments are missing or unknown.
    """
    try:
        inspect.signature(model.forward).bind(*inputs.args, **inputs.kwargs)
    except TypeError as error:
        raise InputError(
            f"{type(model).__name__}.forward cannot be called with this example: "
            f"{error}. It takes {inspect.signature(model.forward)}; the example holds "
            f"{inputs.describe()}. A tuple gives positional arguments, a mapping "
            "keyword arguments."
        ) from error
    except ValueError:
        return  # a forward without a readable signature


@dataclass(frozen=True, slots=True)
class _Study:
    """What was traced, what is caught of it, and what the probe showed."""

    batch: ModelInputs
    graph: Graph
    sites: Mapping[str, Site]
    catches: Mapping[str, Catch]
    evidence: Evidence
    notes: tuple[str, ...] = ()


def _study(
    model: nn.Module,
    probe: Probe,
    inputs: ModelInputs,
    layers: Layers,
    batch_axis: int,
    allow: frozenset[str],
) -> _Study:
    """Trace and probe; near copies of one sample stand in where samples disagree."""
    try:
        return _study_batch(model, probe, inputs, layers, batch_axis, allow)
    except (OtherPathError, PlanError) as error:
        apart = isinstance(error, OtherPathError) or isinstance(
            error.__cause__, OtherPathError
        )
        if not apart or "fixed_batch" in allow:
            raise
        first = inputs.take((0,), batch_axis)
        try:
            study = _study_batch(model, probe, first, layers, batch_axis, allow)
        except TorchLensError:
            raise error from error.__cause__
    note = (
        "the first samples take different paths; planned on the path of the first one, "
        "and batches that take another are met as on_divergence says"
    )
    return replace(study, notes=(note,))


def _study_batch(
    model: nn.Module,
    probe: Probe,
    inputs: ModelInputs,
    layers: Layers,
    batch_axis: int,
    allow: frozenset[str],
) -> _Study:
    batch, graph = _trace(model, inputs, batch_axis, allow)
    sites = resolve_layers(graph, layers)
    catches = {name: choose_catch(graph, name, site) for name, site in sites.items()}
    evidence = gather(model, probe, graph, catches, batch, batch_axis, allow)
    return _Study(batch, graph, sites, catches, evidence)


def _trace(
    model: nn.Module, inputs: ModelInputs, batch_axis: int, allow: Collection[str]
) -> tuple[ModelInputs, Graph]:
    """Return the batch of the probe, and the graph of the model on it."""
    if "fixed_batch" not in allow:
        batch = inputs.distinct(3, batch_axis)
        try:
            return batch, _graph_of(model, batch)
        except InputError as error:
            size = inputs.num_samples(batch_axis)
            if size == 3:
                raise
            _graph_of(model, inputs)  # raises if the example itself does not fit
            raise PlanError(
                f"{type(model).__name__} runs on the example's {size} samples, but "
                f"not on 3 of them: {error} If it takes batches of {size} only, pass "
                'allow=("fixed_batch",); short batches are then padded and cut.'
            ) from error
    batch = inputs.distinct(inputs.num_samples(batch_axis), batch_axis)
    return batch, _graph_of(model, batch)


def _graph_of(model: nn.Module, inputs: ModelInputs) -> Graph:
    given = inputs.clone()
    return run_capture(model, given.args, given.kwargs).graph


def _site_plans(
    graph: Graph,
    sites: Mapping[str, Site],
    catches: Mapping[str, Catch],
    evidence: Evidence,
) -> tuple[SitePlan, ...]:
    """Return the sites in the order in which the probe saw them."""
    aliases = Aliases(graph)
    names = list(sites)
    plans = []
    for index in evidence.order:
        name, site = names[index], sites[names[index]]
        plans.append(
            SitePlan(
                name=name,
                label=site.label,
                address=site.address,
                catch=catches[name],
                layout=evidence.layouts[index],
                dtype=evidence.dtypes[index],
                stored_dtype=evidence.dtypes[index],
                copy=index in evidence.unsafe
                or aliases.needs_copy(site.node, site.key),
                graph_digest=_graph_digest(graph, site.order),
            )
        )
    return tuple(plans)


def _alias_notes(study: _Study) -> list[str]:
    """Say which of the planned modules can be reached under several addresses."""
    addresses = dict.fromkeys(site.address for site in study.sites.values())
    modules = (study.graph.modules[name] for name in addresses if name is not None)
    return [
        f"{listed((module.address, *module.aliases))} are one module"
        for module in modules
        if module.aliases
    ]


def _graph_digest(graph: Graph, last: int) -> str:
    """Return a digest of the ops up to a site: what the forward's code does."""
    lines = []
    for node in graph.nodes:
        if graph.op_site(node).order > last:
            break
        lines.append(
            f"{node.func_name}{list(node.parents)}{list(node.params)}"
            f"{list(node.spec.shape)}"
        )
    return digest_text("\n".join(lines))


def _weight_bytes(model: nn.Module) -> int:
    tensors: dict[int, torch.Tensor] = {id(item): item for item in model.parameters()}
    tensors |= {id(item): item for item in model.buffers()}
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())


def _activation_bytes(graph: Graph) -> int:
    """Return the most bytes that are alive at one time, by first and last use."""
    alive = peak = 0
    ends: dict[int, list[int]] = {}
    for node in graph.nodes:
        owns = not (node.view or node.inplace) and node.kind != "output"
        size = node.spec.nbytes if owns else 0
        last = max(graph.children(node.index), default=node.index)
        ends.setdefault(last, []).append(size)
        alive += size
        peak = max(peak, alive)
        alive -= sum(ends.pop(node.index, ()))
    return peak


def device_type(model: nn.Module) -> str:
    """Return the device type of the model's weights, "cpu" where there are none."""
    for parameter in model.parameters():
        return "cpu" if parameter.is_meta else parameter.device.type
    return "cpu"

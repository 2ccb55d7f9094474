"""Traces of whole architectures: complete, valid, and the model left as found."""

import copy
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from torchlens.tracer import Capture, run_capture
from torchlens.validation import validate_capture

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
try:
    from architectures import Architecture, architectures
finally:
    del sys.path[0]

ALL = architectures()
QUIET = pytest.mark.filterwarnings("ignore:::(torch|timm|transformers)")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other make small ops slow on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def parameters() -> list[Any]:
    return [
        pytest.param(one, id=one.name, marks=[pytest.mark.slow] * one.slow)
        for one in ALL
    ]


def tensors_of(value: object) -> list[torch.Tensor]:
    if hasattr(value, "to_tuple"):  # the output class of transformers
        value = value.to_tuple()
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]


def state_of(model: nn.Module) -> dict[str, Any]:
    """Return all that a look at a model must not change."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    return {
        "modes": [module.training for module in model.modules()],
        "attributes": [list(vars(module)) for module in model.modules()],
        "hooks": [len(vars(m)[name]) for m in model.modules() for name in hooks],
        "flags": [p.requires_grad for p in model.parameters()],
        "objects": [id(t) for t in (*model.parameters(), *model.buffers())],
    }


def outputs_by_hook(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, dict[str, list[torch.Tensor]]]:
    """Return a plain forward's output, and what hooks saw of plain tensor outputs."""
    seen: dict[str, list[torch.Tensor]] = {}
    handles = []
    for name, module in model.named_modules():

        def keep(module: object, args: object, output: object, name=name) -> None:
            if isinstance(output, torch.Tensor):
                seen.setdefault(name or "self", []).append(output.detach().clone())

        handles.append(module.register_forward_hook(keep))
    output = model(*args, **kwargs)
    for handle in handles:
        handle.remove()
    return output, seen


def test_the_registry_has_at_least_forty_architectures() -> None:
    names = [architecture.name for architecture in ALL]
    assert len(set(names)) == len(names) >= 80
    assert sum(name.startswith("torchvision/") for name in names) >= 25
    assert sum(name.startswith("transformers/") for name in names) >= 30


@QUIET
@pytest.mark.parametrize("architecture", parameters())
def test_trace_of_an_architecture_is_complete_and_valid(
    architecture: Architecture,
) -> None:
    torch.manual_seed(1)
    example = architecture.build()
    model, args, kwargs = example.model, example.args, example.kwargs
    weights = copy.deepcopy(model.state_dict())
    before, random_states = state_of(model), (torch.get_rng_state(), random.getstate())

    with torch.no_grad():
        capture = run_capture(model, args, kwargs, wanted=None)

    assert torch.equal(torch.get_rng_state(), random_states[0])
    assert random.getstate() == random_states[1]
    assert state_of(model) == before
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), name

    report = validate_capture(capture)
    graph = capture.graph
    assert report, str(report)
    if architecture.gap:
        assert any(architecture.gap in gap for gap in graph.gaps)
    else:
        assert graph.complete, graph.gaps
        assert not report.skipped, str(report)
    assert report.num_checked == len(graph.nodes) - len(graph.inputs)
    assert len({node.label for node in graph.nodes}) == len(graph.nodes)
    assert len({node.key for node in graph.nodes}) == len(graph.nodes)
    _check_against_hooks(capture, args, kwargs)


def _check_against_hooks(
    capture: Capture, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Compare with a plain forward that starts from the same random state."""
    model, graph = capture.model, capture.graph
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            output, seen = outputs_by_hook(model, args, kwargs)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    expected, found = tensors_of(output), tensors_of(capture.output)
    assert len(expected) == len(found) > 0
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other) or torch.allclose(
            one.float(), other.float(), equal_nan=True
        )
    calls = {
        address: [
            call
            for call in graph.calls_of(address)
            if not call.direct and [leaf.path for leaf in call.outputs] == [()]
        ]
        for address in seen
    }
    assert {address: len(found) for address, found in calls.items()} == {
        address: len(values) for address, values in seen.items()
    }
    for address, values in seen.items():
        for call, value in zip(calls[address], values, strict=True):
            payload = capture.payloads[call.outputs[0].node]
            assert torch.equal(payload, value) or torch.allclose(
                payload, value, equal_nan=True
            ), call.label

"""Names the op behind a failed self-check, by comparing two full captures op by op.

Runs only when a check has failed, since it keeps every payload of a small forward.
"""

import random
import sys

import torch
from torch import nn

from .axis_proof import close
from .graph import Graph
from .model_inputs import ModelInputs
from .model_state import preserved_randomness
from .records import OpRecord
from .tracer import Capture, run_capture

_BATCH_NORMS = ("batchnorm", "nativebatchnorm", "instancenorm")
_SEEDS = (7, 8)

__all__ = ["describe_op", "find_mixing_op", "find_random_op", "missing_mask_hint"]


def find_random_op(model: nn.Module, inputs: ModelInputs) -> str | None:
    """Return in words the first op that differs between two runs of one batch."""
    with preserved_randomness(model):
        first, second = (_capture_seeded(model, inputs, seed) for seed in _SEEDS)
    for node in first.graph.ops:
        twin = _twin(second.graph, node)
        one = first.payloads.get(node.index)
        other = None if twin is None else second.payloads.get(twin.index)
        if one is None or other is None:
            continue
        if not torch.equal(_comparable(one), _comparable(other)):
            return describe_op(first.graph, node)
    return None


def find_mixing_op(model: nn.Module, inputs: ModelInputs, batch_axis: int) -> str:
    """Return in words the first op whose value for a sample depends on its batch."""
    alone = inputs.take((0,), batch_axis)
    single = _capture(model, alone)
    batch = _capture(model, inputs)
    num_samples = inputs.num_samples(batch_axis)
    twins = {node.key: node for node in batch.graph.nodes}
    for node in single.graph.ops:
        twin = twins.get(node.key)
        one = single.payloads.get(node.index)
        many = None if twin is None else batch.payloads.get(twin.index)
        if one is None or many is None:
            continue
        if not _agrees(one, many, num_samples):
            return describe_op(single.graph, node)
    return "no single op could be found"


def describe_op(graph: Graph, node: OpRecord) -> str:
    """Return label, module and source line of an op, with a reason where known."""
    call = graph.module_calls[node.module_call]
    text = f"{node.label!r} ({node.func_name}) in module {call.address!r}"
    frames = graph.frames(node)
    if frames:
        text += f", {frames[-1].file}:{frames[-1].line}"
    if node.type in _BATCH_NORMS:
        text += "; batch norm in train mode computes statistics of its batch"
    elif node.type.endswith("dropout"):
        text += "; functional dropout is on unless it is given training=self.training"
    return text


def missing_mask_hint(model: nn.Module, inputs: ModelInputs) -> str:
    """Return a hint if the model takes an attention mask and none was given."""
    code = getattr(type(model).forward, "__code__", None)
    takes = code is not None and "attention_mask" in code.co_varnames
    if not takes or inputs.kwargs.get("attention_mask") is not None:
        return ""
    return (
        " The model takes an attention_mask and none was given: without one, padding "
        "changes every value. Pass the tokenizer's."
    )


def _capture_seeded(model: nn.Module, inputs: ModelInputs, seed: int) -> Capture:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)
    return _capture(model, inputs)


def _capture(model: nn.Module, inputs: ModelInputs) -> Capture:
    given = inputs.clone()
    return run_capture(model, given.args, given.kwargs, wanted=None, detach=True)


def _twin(graph: Graph, node: OpRecord) -> OpRecord | None:
    if node.index < len(graph.nodes) and graph.nodes[node.index].key == node.key:
        return graph.nodes[node.index]
    return next((other for other in graph.nodes if other.key == node.key), None)


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with NaN, which equals nothing, replaced."""
    return tensor.nan_to_num() if tensor.dtype.is_floating_point else tensor


def _agrees(one: torch.Tensor, many: torch.Tensor, num_samples: int) -> bool:
    """Return whether the single sample's value is where sizes say it should be."""
    if one.shape == many.shape:
        return close(one, many)
    if one.ndim != many.ndim:
        return True
    axes = [k for k in range(one.ndim) if one.shape[k] != many.shape[k]]
    if len(axes) != 1 or one.shape[axes[0]] != 1:
        return len(axes) == 1  # merged with another axis, or a table of pairs
    if many.shape[axes[0]] != num_samples:
        return True
    return close(one, many.narrow(axes[0], 0, 1))

"""Names the op behind a failed self-check, by comparing two full captures op by op.

Runs only when a check has failed, since it keeps every payload of a small forward.
"""

import random
import sys
from collections.abc import Iterable

import torch
from torch import nn

from .axis_proof import close, possible_layouts
from .errors import InputError
from .function_facts import facts_of
from .graph import Graph
from .model_inputs import ModelInputs
from .model_state import preserved_randomness
from .records import OpRecord, SiteKey
from .retracing import node_of_key
from .tracer import Capture, run_capture

_BATCH_NORMS = ("batchnorm", "nativebatchnorm", "instancenorm")
_SEEDS = (7, 8)

# Position and name of the argument without which these functions draw nothing.
_SWITCHES = {"rrelu": (3, "training"), "scaled_dot_product_attention": (4, "dropout_p")}

__all__ = [
    "describe_op",
    "find_drawing_op",
    "find_mixing_op",
    "find_random_op",
    "missing_mask_hint",
]


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


def find_drawing_op(graph: Graph, sites: Iterable[SiteKey]) -> str | None:
    """Return in words the first op that draws random numbers for one of `sites`."""
    above = {i for key in sites for i in _ancestors(graph, node_of_key(graph, key))}
    drawing = [graph.nodes[i] for i in sorted(above) if _draws(graph.nodes[i])]
    return describe_op(graph, drawing[0]) if drawing else None


def _draws(node: OpRecord) -> bool:
    """Return whether an op draws from torch's own generator, as far as it shows."""
    if node.func is None or node.kwargs.get("generator") is not None:
        return False
    facts = facts_of(node.func)
    if not facts.random:
        return False
    name = facts.name.rstrip("_")
    if "dropout" in name:
        # torch.dropout calls it train, torch.nn.functional.dropout training.
        train = node.kwargs.get("train", True)
        return bool(_argument(node, 2, "training", train))
    if name in _SWITCHES:
        return bool(_argument(node, *_SWITCHES[name], False))
    return True


def _argument(node: OpRecord, position: int, name: str, default: object) -> object:
    if position < len(node.args):
        return node.args[position]
    return node.kwargs.get(name, default)


def find_mixing_op(
    model: nn.Module, inputs: ModelInputs, batch_axis: int, key: SiteKey
) -> str:
    """Return in words the first op on the way to `key` that depends on the batch."""
    batch = _capture(model, inputs)
    num_samples = inputs.num_samples(batch_axis)
    # Every sample alone, since one may agree by chance, as does the one that holds the
    # batch's maximum; then pairs, for models that do not run on one sample.
    alone = [(sample,) for sample in range(num_samples)]
    for parts in (alone, [(0, 1), (1, 2)]):
        found = []
        for samples in parts:
            try:
                part = _capture(model, inputs.take(samples, batch_axis))
            except InputError:
                continue
            node = _first_mixing(part, batch, key, samples, num_samples)
            if node is not None:
                found.append((node.index, describe_op(part.graph, node)))
        if found:
            return min(found)[1]
    return "no single op could be found"


def _first_mixing(
    part: Capture,
    batch: Capture,
    key: SiteKey,
    samples: tuple[int, ...],
    num_samples: int,
) -> OpRecord | None:
    twins = {node.key: node for node in batch.graph.nodes}
    for index in sorted(_ancestors(part.graph, node_of_key(part.graph, key))):
        node = part.graph.nodes[index]
        twin = twins.get(node.key)
        some = part.payloads.get(index)
        every = None if twin is None else batch.payloads.get(twin.index)
        if some is None or every is None or node.kind != "op":
            continue
        if not _agrees(some, every, num_samples, samples):
            return node
    return None


def _ancestors(graph: Graph, index: int | None) -> set[int]:
    """Return `index` and everything it was computed from."""
    found: set[int] = set()
    waiting = [] if index is None else [index]
    while waiting:
        current = waiting.pop()
        if current not in found:
            found.add(current)
            waiting.extend(graph.nodes[current].parents)
    return found


def describe_op(graph: Graph, node: OpRecord) -> str:
    """Return label, module and source line of an op, with a reason where known."""
    call = graph.module_calls[node.module_call]
    text = f"{node.label!r} ({node.func_name}) in module {call.address!r}"
    frames = graph.frames(node)
    if frames:
        text += f", {frames[-1].file}:{frames[-1].line}"
    if node.type in _BATCH_NORMS:
        text += "; batch norm in train mode computes statistics of its batch"
    elif node.type.endswith("dynamic"):
        text += "; dynamic quantisation takes its scale from the whole batch"
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


def _agrees(
    part: torch.Tensor,
    whole: torch.Tensor,
    num_samples: int,
    samples: tuple[int, ...],
) -> bool:
    """Return whether the values of `samples` are where the sizes let them be."""
    if part.shape == whole.shape:
        return close(part, whole)
    if part.ndim != whole.ndim:
        return True
    axes = [k for k in range(part.ndim) if part.shape[k] != whole.shape[k]]
    if len(axes) != 1:
        return False  # a table of pairs of samples
    axis = axes[0]
    group = part.shape[axis] // len(samples)
    if (part.shape[axis], whole.shape[axis]) != (
        group * len(samples),
        group * num_samples,
    ):
        return False
    return any(
        close(
            layout.rows(part, len(samples)),
            layout.rows(whole, num_samples)[list(samples)],
        )
        for layout in possible_layouts(axis, group, tuple(whole.shape))
    )

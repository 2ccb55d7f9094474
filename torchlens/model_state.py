"""Leaves a model and the random generators as they were before a capture."""

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from .model_access import compiler_is_loaded

__all__ = [
    "eager_and_unfused",
    "preserved_randomness",
    "preserved_state",
    "random_state",
]


@contextmanager
def preserved_randomness(model: nn.Module) -> Iterator[None]:
    """Restore the states of torch's, Python's and numpy's generators on exit."""
    devices = sorted(
        {
            parameter.device.index
            for parameter in model.parameters()
            if parameter.device.type == "cuda" and parameter.device.index is not None
        }
    )
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = None if numpy is None else numpy.random.get_state()
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)


def random_state(model: nn.Module) -> torch.Tensor:
    """Return the state of the generator that ops of `model` draw from."""
    first = next(model.parameters(), None)
    if first is not None and first.device.type == "cuda":
        return torch.cuda.get_rng_state(first.device)
    return torch.get_rng_state()


@contextmanager
def preserved_state(model: nn.Module) -> Iterator[None]:
    """Restore train/eval modes, `requires_grad` flags and, after training, buffers.

    A forward in training mode updates running statistics; looking at a model must not.
    """
    modes = [(module, module.training) for module in model.modules()]
    flags = [(tensor, tensor.requires_grad) for tensor in model.parameters()]
    training = any(mode for _, mode in modes)
    buffers = [
        (buffer, buffer.detach().clone()) for buffer in model.buffers() if training
    ]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for tensor, flag in flags:
            if tensor.requires_grad is not flag:
                tensor.requires_grad_(flag)
        with torch.no_grad():
            for buffer, value in buffers:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


@contextmanager
def eager_and_unfused() -> Iterator[None]:
    """Run compiled parts from their original code and attention by its parts.

    torch's fused encoder path depends on whether hooks are present, so that what runs
    would depend on whether anybody watches.
    """
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with ExitStack() as stack:
            if compiler_is_loaded():
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)

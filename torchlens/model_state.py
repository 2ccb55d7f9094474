"""Leaves a model and the random generators as they were before a capture."""

import random
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from operator import is_
from types import TracebackType
from typing import Any

import torch
from torch import nn

from .model_access import compiler_is_loaded

# Hooks are in ordered dictionaries: a model may hang some on itself in its first
# forward, and note that it did.
_CONTAINERS = frozenset({dict, OrderedDict, list, set})

# Guards, fast paths, generators and a model's attributes are the process's: captures in
# threads take turns, and so does whoever changes what is on a model.
TURNS = threading.RLock()

__all__ = [
    "EAGER_AND_UNFUSED",
    "TURNS",
    "preserved_attributes",
    "preserved_randomness",
    "preserved_state",
    "random_state",
    "untouched",
]


@contextmanager
def preserved_randomness(model: nn.Module) -> Iterator[None]:
    """Restore the states of torch's, Python's and numpy's generators on exit."""
    devices = sorted(
        {
            parameter.device.index
            for parameter in _parameters(_submodules(model))
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
    modules = _submodules(model)
    modes = [(module, module.training) for module in modules]
    flags = [(tensor, tensor.requires_grad) for tensor in _parameters(modules)]
    training = any(mode for _, mode in modes)
    buffers = [
        (buffer, buffer.detach().clone()) for buffer in model.buffers() if training
    ]
    try:
        yield
    finally:
        for module, mode in modes:
            if module.training is not mode:
                module.training = mode
        for tensor, flag in flags:
            if tensor.requires_grad is not flag:
                tensor.requires_grad_(flag)
        with torch.no_grad():
            for buffer, value in buffers:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


@contextmanager
def preserved_attributes(model: nn.Module) -> Iterator[None]:
    """Restore what the modules' attributes refer to, and plain containers among them.

    A forward may replace a buffer, fill a cache or count its calls.
    """
    modules = [module.__dict__ for module in _submodules(model)]
    before = [attributes.copy() for attributes in modules]
    containers = [
        value
        for attributes in modules
        for value in attributes.values()
        if type(value) in _CONTAINERS  # parameters, children and hooks too
    ]
    filled = [(value, value.copy()) for value in containers if value]
    empty = [value for value in containers if not value]
    try:
        yield
    finally:
        for attributes, old in zip(modules, before, strict=True):
            if not _same_items(attributes, old):
                for name in attributes.keys() - old.keys():
                    del attributes[name]
                attributes.update(old)
        for container in empty:
            if container:
                container.clear()
        for container, content in filled:
            if not _same_items(container, content):
                container.clear()
                # A list is filled by `extend`, a dictionary or set by `update`.
                fill = "extend" if type(container) is list else "update"
                getattr(container, fill)(content)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Restore modes, flags and attributes of a model; threads take turns meanwhile."""
    with TURNS, preserved_attributes(model), preserved_state(model):
        yield


def _same_items(container: Any, content: Any) -> bool:
    """Tell whether two containers hold the same objects; tensors do not compare."""
    if len(container) != len(content):
        return False
    if isinstance(container, dict):
        same_keys = container.keys() == content.keys()
        return same_keys and all(map(is_, container.values(), content.values()))
    return all(map(is_, container, content))


def _submodules(model: nn.Module) -> list[nn.Module]:
    """Return the model and all below it; torch's own walk is many times slower."""
    found: dict[int, nn.Module] = {id(model): model}
    pending = [model]
    while pending:
        for child in pending.pop()._modules.values():
            if child is not None and id(child) not in found:
                found[id(child)] = child
                pending.append(child)
    return list(found.values())


def _parameters(modules: list[nn.Module]) -> Iterator[nn.Parameter]:
    for module in modules:
        for parameter in module._parameters.values():
            if parameter is not None:
                yield parameter


class _EagerAndUnfused:
    """Context in which compiled parts run from their code, and attention by its parts.

    torch's fused encoder path depends on whether hooks are present, so that what runs
    would depend on whether anybody watches.  These settings are the process's: of the
    threads that need them, the last one to end restores them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._restore = ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._depth:
                if torch.backends.mha.get_fastpath_enabled():
                    torch.backends.mha.set_fastpath_enabled(False)
                    self._restore.callback(
                        torch.backends.mha.set_fastpath_enabled, True
                    )
                if compiler_is_loaded():
                    stance = torch.compiler.set_stance("force_eager")
                    self._restore.enter_context(stance)
            self._depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._depth -= 1
            if not self._depth:
                self._restore.close()


EAGER_AND_UNFUSED = _EagerAndUnfused()

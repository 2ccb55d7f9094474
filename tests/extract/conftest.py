"""Tiny models, datasets and the oracle: plain forward hooks with clone."""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

Oracle = Callable[[nn.Module, Sequence[Tensor], Sequence[str]], dict[str, np.ndarray]]


@pytest.fixture(autouse=True)
def threads_left_as_found() -> Iterator[None]:
    """Fail a test that leaves a writer thread behind."""
    before = set(threading.enumerate())
    yield
    after = [
        t for t in threading.enumerate() if t not in before and "Thread-" in t.name
    ]
    assert not [t for t in after if "_work" in t.name], after


@pytest.fixture
def mlp() -> nn.Sequential:
    """Return a three-layer perceptron on 8 features, in train mode."""
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


@pytest.fixture
def cnn() -> nn.Sequential:
    """Return a small net whose ReLU overwrites the convolution before it."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.ReLU(inplace=True), nn.BatchNorm2d(6), nn.Conv2d(6, 4, 3)
    )


@pytest.fixture
def hooked() -> Oracle:
    """Return a function that runs batches through plain hooks and joins the clones."""

    def run(
        model: nn.Module, batches: Sequence[Tensor], layers: Sequence[str]
    ) -> dict[str, np.ndarray]:
        rows: dict[str, list[Tensor]] = {layer: [] for layer in layers}

        def keep(layer: str) -> Any:
            return lambda module, args, out: rows[layer].append(out.detach().clone())

        handles = [
            model.get_submodule(layer).register_forward_hook(keep(layer))
            for layer in layers
        ]
        training = [module.training for module in model.modules()]
        model.eval()
        with torch.no_grad():
            for batch in batches:
                model(batch)
        for module, mode in zip(model.modules(), training, strict=True):
            module.training = mode
        for handle in handles:
            handle.remove()
        return {layer: torch.cat(parts).numpy() for layer, parts in rows.items()}

    return run


@pytest.fixture
def count_forwards() -> Iterator[Callable[[nn.Module], list[int]]]:
    """Return a function that lists the batch size of every forward from then on."""
    handles = []

    def count(model: nn.Module) -> list[int]:
        sizes: list[int] = []
        handle = model.register_forward_pre_hook(
            lambda module, args: sizes.append(len(args[0]))
        )
        handles.append(handle)
        return sizes

    yield count
    for handle in handles:
        handle.remove()

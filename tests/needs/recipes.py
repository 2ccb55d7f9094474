"""The shorthand of the user-needs page: small models, datasets, an oracle, a check.

The oracle knows nothing of torchlens: plain forward hooks that clone what they see,
under no_grad, in eval mode, over the same batches.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import torchlens as tl

BATCH_SIZE = 4
WIDTH = 8
VOCABULARY = 50


class MLP(nn.Module):
    """Linear, ReLU, Linear of width 8."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.act = nn.ReLU()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.first(x)))


class CNN(nn.Module):
    """Convolution, ReLU in place, convolution on 3x8x8 images."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.act = nn.ReLU(inplace=True)
        self.last = nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.first(x)))


def language_model(kind: str = "gpt2", **options: Any) -> nn.Module:
    """Return a random "gpt2" or "llama" body of two layers, width 16, vocabulary 50."""
    import transformers

    torch.manual_seed(0)
    if kind == "llama":
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            **options,
        )
        return transformers.LlamaModel(config).eval()
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=32,
        bos_token_id=1,
        eos_token_id=2,
        **options,
    )
    return transformers.GPT2Model(config).eval()


class D(Dataset[dict[str, Any]]):
    """`n` items {"id": "s<i>", "x": noise seeded with i}; it counts what is read."""

    def __init__(self, n: int, shape: Sequence[int] = (WIDTH,)) -> None:
        self.n = n
        self.shape = tuple(shape)
        self.reads = 0

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads += 1
        noise = torch.randn(self.shape, generator=torch.Generator().manual_seed(index))
        return {"id": f"s{index}", "x": noise}


class Tokens(Dataset[dict[str, Any]]):
    """`n` items of `length` token ids, 3 and up, with a mask of ones."""

    def __init__(self, n: int, length: int = 6) -> None:
        self.n = n
        self.length = length

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(3, VOCABULARY, (self.length,), generator=generator)
        mask = torch.ones(self.length, dtype=torch.long)
        return {"id": f"s{index}", "input_ids": tokens, "attention_mask": mask}


def loader(
    dataset: Dataset[Any], batch_size: int = BATCH_SIZE, **options: Any
) -> DataLoader[Any]:
    """Return `dl` of the page: batches of four unless said otherwise."""
    return DataLoader(dataset, batch_size=batch_size, **options)


@dataclass(frozen=True)
class At:
    """Where the oracle looks: one call of a module, and what to take of it."""

    address: str
    pick: Callable[[Any], Tensor] = lambda output: output
    call: int = 1
    of_input: bool = False


Wanted = Sequence[str] | Mapping[str, str | At]


def R(  # noqa: N802  (the page's name)
    model: nn.Module,
    data: Dataset[Any] | DataLoader[Any],
    layers: Wanted,
    *,
    call: Callable[[nn.Module, Any], Any] | None = None,
) -> dict[str, np.ndarray[Any, Any]]:
    """Return the reference: what plain hooks with clones see, rows joined.

    Args:
        model: The model; it is copied, so that ours never meets the oracle's hooks.
        data: A dataset, read in batches of four, or a loader.
        layers: Addresses, or names of rows to an address or `At`.
        call: Runs the model on a batch; default `x` alone, or all entries but the id.
    """
    named = layers if isinstance(layers, Mapping) else {name: name for name in layers}
    places = {name: at if isinstance(at, At) else At(at) for name, at in named.items()}
    model = copy.deepcopy(model).eval()
    seen: dict[tuple[str, bool], list[Any]] = {}
    for address in {at.address for at in places.values()}:
        _watch(_submodule(model, address), address, seen)
    rows: dict[str, list[Tensor]] = {name: [] for name in places}
    with torch.no_grad():
        for batch in data if isinstance(data, DataLoader) else loader(data):
            seen.clear()
            (call or _plain_call)(model, batch)
            for name, at in places.items():
                found = seen[at.address, at.of_input][at.call - 1]
                rows[name].append(at.pick(found))
    return {name: torch.cat(parts).numpy() for name, parts in rows.items()}


def _submodule(model: nn.Module, address: str) -> nn.Module:
    return model if address == "self" else model.get_submodule(address)


def _watch(
    module: nn.Module, address: str, seen: dict[tuple[str, bool], list[Any]]
) -> None:
    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        seen.setdefault((address, True), []).append(
            copy.deepcopy((*args, *kwargs.values()))
        )

    def after(_: nn.Module, args: Any, output: Any) -> None:
        seen.setdefault((address, False), []).append(cloned(output))

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)


def _plain_call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping) and "input_ids" in batch:
        return model(**{key: value for key, value in batch.items() if key != "id"})
    return model(batch["x"] if isinstance(batch, Mapping) else batch)


def E(  # noqa: N802  (the page's name)
    model: nn.Module, data: Any, layers: Any, out: Any = None, **options: Any
) -> tl.Store:
    """Return the finished store of our engine, in memory unless `out` says where."""
    options.setdefault("progress", False)
    if not isinstance(data, DataLoader):
        options.setdefault("batch_size", BATCH_SIZE)
    return tl.extract_dataset(model, data, layers, output_dir=out, **options)


def OK(  # noqa: N802  (the page's name)
    store: tl.Store,
    reference: Mapping[str, np.ndarray[Any, Any]],
    *,
    ids: Sequence[str] | None = None,
    tolerance: float = 0.0,
) -> None:
    """Assert that the store holds exactly the reference, row by row.

    Args:
        store: A finished store.
        reference: From `R`; the store must have these layers and no others.
        ids: In dataset order; default s0, s1 ...
        tolerance: Largest difference allowed; by default none.
    """
    assert sorted(store.layers) == sorted(reference)
    rows = len(next(iter(reference.values())))
    wanted = tuple(ids) if ids is not None else tuple(f"s{i}" for i in range(rows))
    assert tuple(store.ids) == wanted
    for name, expected in reference.items():
        found = store[name][:]
        assert found.shape == expected.shape, name
        assert found.dtype == expected.dtype, name
        assert np.isfinite(found).all(), name
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)


def cloned(output: Any) -> Any:
    """Return a copy of a module's output."""
    # A tensor that autograd follows cannot be copied as an object.
    return output.detach().clone() if torch.is_tensor(output) else copy.deepcopy(output)


def hidden_state(output: Any) -> Tensor:
    """Return the hidden state of a block that returns it alone or first of several."""
    return output if isinstance(output, Tensor) else output[0]


def num_hooks(model: nn.Module) -> int:
    """Return how many hooks and replaced forwards are on a model and its parts."""
    return sum(
        len(module._forward_hooks)
        + len(module._forward_pre_hooks)
        + ("forward" in vars(module))
        for module in model.modules()
    )


class CallCounter:
    """Counts how often a module's forward is called, by a hook of its own."""

    def __init__(self, module: nn.Module) -> None:
        self.calls = 0
        module.register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.calls += 1

"""Row L2: functional dropout in eval mode is named; sane models draw no warning."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchlens as tl

from .recipes import MLP, OK, WIDTH, D, E, R, Tokens, language_model

DROPOUT_LINE = "h = F.dropout(self.first(x), self.p)"


class FunctionalDropout(nn.Module):
    """Forgets to pass `self.training` on."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = p
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.first(x), self.p)
        return self.last(h)


def dropout_line() -> int:
    """Return the number of the line that drops values."""
    with open(__file__, encoding="utf-8") as file:
        lines = [line.strip() for line in file]
    return lines.index(DROPOUT_LINE) + 1


@pytest.mark.parametrize("p", [0.5, 1e-6])
def test_l2_functional_dropout_is_warned_about_with_op_and_line(p: float) -> None:
    model = FunctionalDropout(p).eval()
    with pytest.warns(tl.TorchLensWarning) as caught:
        store = E(model, D(8), "last")
    (warning,) = caught
    text = str(warning.message)
    assert "FunctionalDropout is not deterministic" in text
    assert "'dropout_1_2' (dropout) in module 'self'" in text
    assert f"{__file__}:{dropout_line()}" in text
    assert "functional dropout is on unless it is given training=self.training" in text
    assert store["last"].shape == (8, WIDTH)


def test_l2_the_finding_is_recorded_in_the_store() -> None:
    with pytest.warns(tl.TorchLensWarning):
        store = E(FunctionalDropout(), D(8), "last")
    plan = store.info()["runs"][0]["provenance"]["plan"]
    checks = {check["name"]: check for check in plan["checks"]}
    twice = checks["same batch twice is identical"]
    assert not twice["passed"] and "dropout_1_2" in twice["detail"]
    assert any("dropout_1_2" in note for note in plan["notes"])


def test_l2_a_layer_before_the_dropout_is_not_warned_about() -> None:
    model = FunctionalDropout()
    OK(E(model, D(8), "first"), R(model, D(8), ["first"]))


class Noisy(nn.Module):
    """Draws numbers in the way that `draw` says."""

    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.draw = draw
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.draw(x))


def attend(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*[x[:, None]] * 3, dropout_p=0.3)[:, 0]


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda x: torch.dropout(x, 0.1, True), "dropout"),
        (lambda x: F.alpha_dropout(x, 0.1, training=True), "alpha_dropout"),
        (lambda x: F.rrelu(x, training=True), "rrelu"),
        (lambda x: x + torch.randn_like(x), "randn_like"),
        (lambda x: x + torch.zeros(WIDTH).normal_(), "normal_"),
        (lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)), "bernoulli"),
        (attend, "scaled_dot_product_attention"),
    ],
)
def test_l2_every_drawing_op_is_named(draw: Any, name: str) -> None:
    with pytest.warns(tl.TorchLensWarning, match=rf"\({name}\) in module 'self'"):
        E(Noisy(draw), D(8), "last")


class Seeded(nn.Module):
    """Draws the same numbers each time, from a generator of its own or a fixed seed."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.own = own
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.own:
            generator = torch.Generator().manual_seed(3)
            noise = torch.randn(WIDTH, generator=generator)
        else:
            torch.manual_seed(3)
            noise = torch.randn(WIDTH)
        return self.last(x + noise)


class Sane(nn.Module):
    """Dropout, recurrent layers and attention as they should be."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.rrelu = nn.RReLU()
        self.rnn = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.3, batch_first=True)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.rrelu(self.drop(x)), 0.5, self.training)
        x = F.dropout(x, p=0.5, training=self.training)
        x = torch.dropout(x, 0.5, train=self.training)
        x, _ = self.rnn(x[:, None])
        return self.last(self.block(x)[:, 0])


@pytest.mark.parametrize(
    "model",
    [MLP(), Sane(), Seeded(own=True), Seeded(own=False)],
    ids=["mlp", "sane", "own generator", "own seed"],
)
def test_l2_sane_models_are_not_warned_about(model: nn.Module) -> None:
    layer = "last"
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("error")
        store = E(model.train(), D(8), layer)
        np.testing.assert_allclose(
            store[layer][:], R(model, D(8), [layer])[layer], rtol=0, atol=1e-6
        )


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_l2_language_models_are_not_warned_about(kind: str) -> None:
    model = language_model(kind)
    last = "ln_f" if kind == "gpt2" else "norm"
    with warnings.catch_warnings():
        warnings.simplefilter("error", tl.TorchLensWarning)
        store = E(model, Tokens(8), last)
    assert store[last].shape[0] == 8


def test_l2_the_random_state_of_the_caller_is_kept() -> None:
    model = FunctionalDropout()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with pytest.warns(tl.TorchLensWarning):
        tl.plan(model, torch.ones(4, WIDTH), "last")
    assert torch.equal(torch.rand(3), expected)

"""`record` and `pluck`: one forward, tensors as a plain hook would see them."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchlens as tl
from torchlens.errors import (
    InputError,
    ModelError,
    PathDivergenceError,
    SelectorError,
)
from torchlens.recording import pluck, record


def model_of() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))


def test_pluck_equals_a_hook_with_a_clone() -> None:
    model, x = model_of().train(), torch.randn(5, 3)
    found: list[Tensor] = []
    handle = model[0].register_forward_hook(
        lambda module, args, output: found.append(output.detach().clone())
    )
    model(x)
    handle.remove()
    assert torch.equal(pluck(model, x, "0"), found[0])
    assert (found[0] < 0).any()
    assert torch.equal(pluck(model, (x,), "linear_1"), found[0])
    assert torch.equal(pluck(model, {"input": x}, tl.func("relu")), found[0].relu())
    assert model.training


def test_pluck_takes_one_tensor() -> None:
    act = nn.ReLU()
    model = nn.Sequential(nn.Linear(3, 3), act, nn.Linear(3, 3), act)
    with pytest.raises(SelectorError, match=r"names 2 tensors, 1:1, 1:2, and pluck"):
        pluck(model, torch.randn(2, 3), "1")
    assert pluck(model, torch.randn(2, 3), "1:2").shape == (2, 3)


def test_record_gives_tensors_in_order_as_the_model_makes_them() -> None:
    model = nn.LSTM(3, 4)
    x = torch.randn(7, 2, 3)
    recording = record(model, x, layers=["self"])
    with torch.no_grad():  # another kernel runs where gradients are recorded
        output, (hidden, cell) = model(x)
    assert list(recording) == ["self[0]", "self[1][0]", "self[1][1]"]
    assert torch.equal(recording["self[0]"], output)
    assert torch.equal(recording["self[1][0]"], hidden)
    assert len(recording) == 3 and "self[1][1]" in recording
    with pytest.raises(SelectorError, match="Nothing was recorded as 'x'; recorded"):
        recording["x"]


def test_record_ends_the_forward_unless_told_otherwise() -> None:
    model, x = model_of(), torch.randn(5, 3)
    early = record(model, x, layers=["0", "relu_1"])
    assert early.halted and early.output is None
    whole = record(model, x, layers={"first": "0"}, halt=False)
    assert not whole.halted
    assert torch.equal(whole.output, model(x))
    assert list(whole) == ["first"]


def test_record_takes_keyword_arguments() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
            return (x * scale).relu()

    x, scale = torch.randn(4, 3), torch.randn(3)
    recording = record(Model(), x, layers="mul_1", input_kwargs={"scale": scale})
    assert torch.equal(recording["mul_1"], x * scale)


def test_random_model_is_run_with_the_randomness_of_a_plain_call() -> None:
    model, x = nn.Sequential(nn.Linear(3, 30), nn.Dropout()), torch.randn(4, 3)
    torch.manual_seed(5)
    got = pluck(model, x, "1", training=True)
    torch.manual_seed(5)
    with torch.no_grad():
        assert torch.equal(got, model.train()(x))


def test_counters_in_buffers_move_by_one_run() -> None:
    class Counting(nn.Module):
        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return x + self.count

    model, x = Counting(), torch.randn(4, 3)
    assert torch.equal(pluck(model, x, "self"), x + 1)


def test_unstable_path_is_refused() -> None:
    turns: list[int] = []  # the attributes of a module are put back after a trace

    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            turns.append(1)
            out: Tensor = self.a(x) if len(turns) % 2 else self.b(x)
            return out

    with pytest.raises(
        PathDivergenceError, match="'a' never appeared.*Its path depends"
    ):
        pluck(Fickle(), torch.randn(4, 3), "a")


def test_what_does_not_fit_is_refused() -> None:
    x: Any = torch.randn(4, 3)
    with pytest.raises(InputError, match="cannot be called with this example"):
        pluck(model_of(), (x, x), "0")
    with pytest.raises(ModelError, match="nn.Module was wanted"):
        pluck(random, x, "0")  # type: ignore[arg-type]  # the point of the test
    with pytest.raises(SelectorError, match="no layer 'conv'"):
        record(model_of(), x, layers="conv")

"""User needs C, structures: every tensor of an output is an array with a name."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import torchlens as tl

from .recipes import (
    OK,
    WIDTH,
    At,
    D,
    E,
    R,
    Tokens,
    hidden_state,
    language_model,
)

VECTORS = D(10)


class Chooses(nn.Module):
    """Gives a structure away and goes on with one tensor of it."""

    def __init__(self, inner: nn.Module, pick: Any) -> None:
        super().__init__()
        self.inner = inner
        self.pick = pick
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.pick(self.inner(x)))


class Nested(nn.Module):
    def forward(self, x: Tensor) -> tuple[Any, ...]:
        return x * 2, {"a": x[:, :3]}, None


def test_c1_tuple_and_dict_outputs_become_named_arrays() -> None:
    model = Chooses(Nested(), lambda output: output[0])
    reference = R(
        model,
        VECTORS,
        {
            "inner[0]": At("inner", lambda output: output[0]),
            'inner[1]["a"]': At("inner", lambda output: output[1]["a"]),
        },
    )
    OK(E(model, VECTORS, ["inner"]), reference)
    for name, rows in reference.items():
        OK(E(model, VECTORS, [name]), {name: rows})


@dataclass
class Small:
    z: Tensor
    count: int


@dataclass
class Large:
    x: Tensor
    small: Small
    nothing: None = None


class MakesDataclass(nn.Module):
    def forward(self, x: Tensor) -> Large:
        return Large(x + 1, Small(x * 3, 4))


def test_c1_nested_dataclasses_become_named_arrays() -> None:
    model = Chooses(MakesDataclass(), lambda output: output.small.z)
    reference = R(
        model,
        VECTORS,
        {
            "inner.x": At("inner", lambda output: output.x),
            "inner.small.z": At("inner", lambda output: output.small.z),
        },
    )
    OK(E(model, VECTORS, ["inner"]), reference)


class Named(NamedTuple):
    hidden: Tensor
    rest: list[Any]


class MakesNamedTuple(nn.Module):
    def forward(self, x: Tensor) -> Named:
        return Named(x + 1, [x * 2, None, {"q": x * 5, 7: x}])


def test_c1_named_tuples_with_lists_become_named_arrays() -> None:
    model = Chooses(MakesNamedTuple(), lambda output: output.hidden)
    reference = R(
        model,
        VECTORS,
        {
            "inner.hidden": At("inner", lambda output: output.hidden),
            "inner.rest[0]": At("inner", lambda output: output.rest[0]),
            'inner.rest[2]["q"]': At("inner", lambda output: output.rest[2]["q"]),
            "inner.rest[2][7]": At("inner", lambda output: output.rest[2][7]),
        },
    )
    OK(E(model, VECTORS, ["inner"]), reference)


def test_c1_a_part_that_is_no_tensor_is_refused_with_the_parts_there_are() -> None:
    model = Chooses(Nested(), lambda output: output[0])
    with pytest.raises(tl.SelectorError, match=r"no tensor at \[2\].*inner\[0\]"):
        E(model, VECTORS, ["inner[2]"])


class Sometimes(nn.Module):
    """Its second part is a tensor for some batches and None for others."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return x, x * 2 if x[0, 0] < 100 else None


def test_c1_a_part_that_becomes_none_later_is_an_error_not_a_gap() -> None:
    model = Chooses(Sometimes(), lambda output: output[0])
    data = torch.randn(8, WIDTH)
    data[4] = 1000
    with pytest.raises(tl.PathDivergenceError, match="no tensor in this batch.*None"):
        E(model, data, ["inner"])


class Decoder(nn.Module):
    """The same layer in its old form, a tuple, and its new one, a tensor."""

    def __init__(self, returns_tuple: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.returns_tuple = returns_tuple

    def forward(self, x: Tensor) -> Any:
        hidden = self.linear(x)
        return (hidden,) if self.returns_tuple else hidden


class Stack(nn.Module):
    def __init__(self, returns_tuple: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Decoder(returns_tuple) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            output = layer(x)
            x = output[0] if isinstance(output, tuple) else output
        return x


def test_c2_a_layer_gives_the_same_store_as_tensor_and_as_tuple() -> None:
    old, new = Stack(True), Stack(False)
    new.load_state_dict(old.state_dict())
    data = D(9, (5, WIDTH))
    reference = R(new, data, ["layers.0", "layers.1"])
    for model in (old, new):
        store = E(model, data, "layers.*")
        OK(store, reference)
        assert store["layers.0"].shape == (9, 5, WIDTH)


def test_c2_an_index_into_a_tensor_is_refused_instead_of_taking_a_sample() -> None:
    with pytest.raises(tl.SelectorError, match=r"no tensor at \[0\]"):
        E(Stack(False), D(9, (5, WIDTH)), ["layers.0[0]"])


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_c3_blocks_of_language_models_are_hidden_states(kind: str) -> None:
    model = language_model(kind)
    blocks = ["h.0", "h.1"] if kind == "gpt2" else ["layers.0", "layers.1"]
    tokens = Tokens(7)
    reference = R(
        model,
        tokens,
        {name: At(name, hidden_state) for name in blocks},
    )
    store = E(model, tokens, blocks)
    OK(store, reference)
    assert store[blocks[0]].shape == (7, 6, 16)


def test_c3_model_outputs_of_transformers_become_named_arrays() -> None:
    model = language_model(output_hidden_states=True)
    tokens = Tokens(7)
    names = {
        'self["last_hidden_state"]': At("self", lambda out: out.last_hidden_state),
        'self["hidden_states"][0]': At("self", lambda out: out.hidden_states[0]),
        'self["hidden_states"][1]': At("self", lambda out: out.hidden_states[1]),
        'self["hidden_states"][2]': At("self", lambda out: out.hidden_states[2]),
    }
    OK(E(model, tokens, ["self"]), R(model, tokens, names))


def test_c4_attention_that_returns_weights_too_gives_both() -> None:
    model = language_model(output_attentions=True, attn_implementation="eager")
    tokens = Tokens(7)
    reference = R(
        model,
        tokens,
        {
            "h.0.attn[0]": At("h.0.attn", lambda output: output[0]),
            "h.0.attn[1]": At("h.0.attn", lambda output: output[1]),
        },
    )
    OK(E(model, tokens, ["h.0.attn"]), reference)
    assert reference["h.0.attn[1]"].shape == (7, 2, 6, 6)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.rnn = kind(WIDTH, 5, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0][:, -1]


def test_c16_an_lstm_gives_its_three_leaves_with_the_sample_first() -> None:
    model = Recurrent(nn.LSTM, num_layers=2, batch_first=True)
    data = D(10, (6, WIDTH))
    reference = R(
        model,
        data,
        {
            "rnn[0]": At("rnn", lambda output: output[0]),
            # Torch puts layers first even where batch_first is set.
            "rnn[1][0]": At("rnn", lambda output: output[1][0].transpose(0, 1)),
            "rnn[1][1]": At("rnn", lambda output: output[1][1].transpose(0, 1)),
        },
    )
    store = E(model, data, ["rnn"])
    OK(store, reference)
    assert store["rnn[1][0]"].shape == (10, 2, 5)


def test_c16_a_gru_of_two_directions_gives_its_two_leaves() -> None:
    model = Recurrent(nn.GRU, bidirectional=True, batch_first=True)
    data = D(10, (6, WIDTH))
    reference = R(
        model,
        data,
        {
            "rnn[0]": At("rnn", lambda output: output[0]),
            "rnn[1]": At("rnn", lambda output: output[1].transpose(0, 1)),
        },
    )
    OK(E(model, data, ["rnn"]), reference)

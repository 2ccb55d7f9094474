"""User needs C, calls and names: which call of which module, under which name."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchlens as tl

from .recipes import (
    MLP,
    OK,
    WIDTH,
    At,
    CallCounter,
    D,
    E,
    R,
    Tokens,
    hidden_state,
    language_model,
)

VECTORS = D(10)


class SharesReLU(nn.Module):
    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.act = nn.ReLU(inplace=inplace)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.second(self.act(self.first(x))))


@pytest.mark.parametrize("inplace", [False, True])
def test_c5_each_call_of_a_shared_activation_is_its_own_array(inplace: bool) -> None:
    model = SharesReLU(inplace)
    reference = R(model, VECTORS, {"act:1": "act", "act:2": At("act", call=2)})
    OK(E(model, VECTORS, ["act"]), reference)
    OK(E(model, VECTORS, ["act:2"]), {"act:2": reference["act:2"]})
    assert not np.array_equal(reference["act:1"], reference["act:2"])


class Unrolls(nn.Module):
    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        for step in range(5):
            state = self.cell(x[:, step], state)
        return state[0] if isinstance(state, tuple) else state


def test_c6_a_cell_called_in_a_loop_gives_an_array_for_each_step() -> None:
    model, data = Unrolls(nn.RNNCell(WIDTH, 6)), D(10, (5, WIDTH))
    steps = {f"cell:{step}": At("cell", call=step) for step in range(1, 6)}
    OK(E(model, data, ["cell"]), R(model, data, steps))


def test_c6_a_cell_with_two_states_gives_both_for_each_step() -> None:
    model, data = Unrolls(nn.LSTMCell(WIDTH, 6)), D(10, (5, WIDTH))
    steps = {
        f"cell:{step}[{part}]": At(
            "cell", lambda output, part=part: output[part], call=step
        )
        for step in range(1, 6)
        for part in range(2)
    }
    OK(E(model, data, ["cell"]), R(model, data, steps))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = self.a
        self.c = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.c(x))


def test_c7_both_names_of_a_tied_module_resolve() -> None:
    model = Tied()
    rows = R(model, VECTORS, ["a"])["a"]
    for layers, names in [
        (["b"], {"b"}),
        (["a", "b"], {"a", "b"}),
        (["b*"], {"b"}),
        ({"mine": "b"}, {"mine"}),
        (tl.module("b"), {"b"}),
    ]:
        OK(E(model, VECTORS, layers), dict.fromkeys(names, rows))


def test_c7_the_alias_is_noted() -> None:
    plan = tl.plan(Tied(), torch.randn(4, WIDTH), ["b"])
    assert "'a', 'b' are one module" in plan.notes
    assert plan.sites[0].key.address == "a"


def test_c7_blocks_tied_in_a_list_give_each_call_once() -> None:
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
    model = nn.Sequential(block, block, block)
    calls = {f"2.0:{call}": At("0.0", call=call) for call in (1, 2, 3)}
    reference = R(model, VECTORS, calls)
    OK(E(model, VECTORS, ["2.0"]), reference)
    once = {name.replace("2.0", "0.0"): rows for name, rows in reference.items()}
    OK(E(model, VECTORS, ["*.0"]), once)


def test_c14_hidden_states_are_named_by_what_produced_them() -> None:
    model = language_model(output_hidden_states=True)
    tokens = Tokens(7)
    layers = ["h.1", "ln_f", "self.hidden_states[2]", "self.last_hidden_state"]
    reference = R(
        model,
        tokens,
        {
            "h.1": At("h.1", hidden_state),
            "ln_f": "ln_f",
            "self.hidden_states[2]": At("self", lambda out: out.hidden_states[2]),
            "self.last_hidden_state": At("self", lambda out: out.last_hidden_state),
        },
    )
    OK(E(model, tokens, layers), reference)
    # GPT-2 counts the final norm into the last hidden state.
    assert not np.allclose(reference["self.hidden_states[2]"], reference["h.1"])
    np.testing.assert_array_equal(reference["self.hidden_states[2]"], reference["ln_f"])


def test_c14_the_last_hidden_state_of_a_vision_transformer_is_not_its_output() -> None:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=16,
        patch_size=4,
        output_hidden_states=True,
    )
    model = transformers.ViTModel(config).eval()
    images = D(6, (3, 16, 16))
    layers = [
        "layers.1",
        "layernorm",
        "self.hidden_states[2]",
        "self.last_hidden_state",
    ]
    reference = R(
        model,
        images,
        {
            "layers.1": At("layers.1", hidden_state),
            "layernorm": "layernorm",
            "self.hidden_states[2]": At("self", lambda out: out.hidden_states[2]),
            "self.last_hidden_state": At("self", lambda out: out.last_hidden_state),
        },
    )
    OK(E(model, images, layers), reference)
    np.testing.assert_array_equal(
        reference["self.hidden_states[2]"], reference["layers.1"]
    )
    np.testing.assert_array_equal(
        reference["self.last_hidden_state"], reference["layernorm"]
    )
    assert not np.allclose(reference["layers.1"], reference["layernorm"])


def test_c17_three_layers_take_one_pass() -> None:
    model = MLP()
    reference = R(model, VECTORS, ["first", "act", "last"])
    # What planning runs does not grow with the data: twice the data tells it apart.
    plan = tl.plan(model, torch.randn(4, WIDTH), ["first", "act", "last"])
    counter = CallCounter(model)
    OK(E(model, VECTORS, plan), reference)
    assert counter.calls == 3

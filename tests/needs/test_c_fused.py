"""User needs C, fused code: modules whose weights others read, inputs by keyword."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import torchlens as tl

from .recipes import OK, WIDTH, At, D, E, R, Tokens, num_hooks

FEATURES = 16
SEQUENCES = D(7, (5, FEATURES))
VECTORS = D(7)


def encoder(num_layers: int = 1, **options: Any) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(FEATURES, 2, 32, batch_first=True)
    options.setdefault("enable_nested_tensor", False)
    return nn.TransformerEncoder(layer, num_layers, **options).eval()


def plain_output(model: nn.Module, data: D) -> np.ndarray[Any, Any]:
    """Return what the model computes when nobody watches."""
    with torch.no_grad():
        return model(torch.stack([data[i]["x"] for i in range(len(data))])).numpy()


def test_c10_the_projection_of_attention_is_addressable() -> None:
    model = encoder()
    name = "layers.0.self_attn.out_proj"
    # The projection is the last thing that attention does.
    reference = R(
        model, SEQUENCES, {name: At("layers.0.self_attn", lambda output: output[0])}
    )
    OK(E(model, SEQUENCES, [name]), reference, tolerance=1e-6)


@pytest.mark.parametrize(
    "layers",
    [
        "layers.*.self_attn.out_proj",
        ["layers.0.self_attn.*", "layers.1.self_attn.*"],
        tl.module("layers.0.self_attn.out_proj")
        | tl.module("layers.1.self_attn.out_proj"),
        tl.module_type("NonDynamicallyQuantizableLinear"),
    ],
    ids=["glob", "globs", "selectors", "class"],
)
def test_c10_every_way_to_name_the_projections_finds_them(layers: Any) -> None:
    model = encoder(2)
    names = [f"layers.{index}.self_attn.out_proj" for index in range(2)]
    reference = R(
        model,
        SEQUENCES,
        {
            name: At(name.removesuffix(".out_proj"), lambda output: output[0])
            for name in names
        },
    )
    OK(E(model, SEQUENCES, layers), reference, tolerance=1e-6)


class Attends(nn.Module):
    """Attention in torch's default layout, sequence first."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(FEATURES, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        return self.attention(x, x, x)[0].transpose(0, 1)


def test_c10_the_projection_is_cut_into_samples_with_the_sequence_first() -> None:
    model = Attends()
    reference = R(
        model,
        SEQUENCES,
        {
            "attention.out_proj": At(
                "attention", lambda output: output[0].transpose(0, 1)
            ),
            "attention[0]": At("attention", lambda output: output[0].transpose(0, 1)),
            "attention[1]": At("attention", lambda output: output[1]),
        },
    )
    store = E(model, SEQUENCES, ["attention.out_proj", "attention"])
    OK(store, reference, tolerance=1e-6)


@pytest.mark.parametrize("nested", [False, True])
def test_c11_a_fused_encoder_gives_what_it_gives_unwatched(nested: bool) -> None:
    model = encoder(2, enable_nested_tensor=nested)
    layers = ["self", "layers.0.self_attn", "layers.1"]
    assert torch.backends.mha.get_fastpath_enabled()
    unwatched = plain_output(model, SEQUENCES)

    store = E(model, SEQUENCES, layers)

    np.testing.assert_allclose(store["self"][:], unwatched, rtol=0, atol=1e-6)
    assert store["layers.0.self_attn"].shape == (7, 5, FEATURES)
    np.testing.assert_array_equal(store["layers.1"][:], store["self"][:])
    np.testing.assert_array_equal(plain_output(model, SEQUENCES), unwatched)
    assert torch.backends.mha.get_fastpath_enabled()
    assert num_hooks(model) == 0


def test_c11_which_path_ran_does_not_depend_on_who_watches() -> None:
    model = encoder()
    batch = torch.stack([SEQUENCES[i]["x"] for i in range(3)])
    deep = tl.plan(model, batch, ["layers.0.self_attn", "self"])
    shallow = tl.plan(model, batch, ["self"])
    assert deep.sites[-1].graph_digest == shallow.sites[-1].graph_digest
    names = {op.func_name for op in tl.trace(model, batch).graph.ops}
    assert "scaled_dot_product_attention" in names or "softmax" in names
    assert not any("transformer_encoder" in name for name in names)


class FusedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return (x @ weight.t() + bias).relu()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None, None


class Fused(nn.Module):
    """Reads the weights of `inner` without calling it, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 2)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.inner.weight, self.inner.bias
        if self.how == "autograd":
            y = FusedLinear.apply(x, weight, bias)
        elif self.how == "addmm":
            y = torch.addmm(bias, x, weight.t())
        elif self.how == "part":
            y = functional.linear(x, weight)
        else:
            y = functional.linear(x, weight * 2, bias)
        return self.last(y)


@pytest.mark.parametrize(
    ("how", "op"),
    [
        ("autograd", "add_1_3"),
        ("addmm", "addmm_1_2"),
        ("part", "linear_1_1"),
        ("scaled", "linear_1_2"),
    ],
)
def test_c12_a_module_whose_weights_a_kernel_reads_is_refused(
    how: str, op: str
) -> None:
    model = Fused(how)
    with pytest.raises(tl.SelectorError) as caught:
        E(model, VECTORS, ["inner"])
    text = str(caught.value)
    assert "'inner' (Linear) was never called as a module" in text
    assert "its parameters were read directly by" in text
    assert "test_c_fused.py:" in text
    assert f"Ask for tl.label({op!r}) or the module 'self'" in text
    assert "run the model's unfused path" in text
    # What it advises works.
    assert E(model, VECTORS, tl.label(op))[op].shape == (7, WIDTH)


def test_c12_a_fused_mixer_names_the_op_that_took_its_weights() -> None:
    import transformers

    config = transformers.MambaConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, state_size=4
    )
    model = transformers.MambaModel(config).eval()
    with pytest.raises(tl.SelectorError, match=r"Ask for tl.label\('conv1d_1_\d+'\)"):
        E(model, Tokens(7), ["layers.0.mixer.conv1d"])


def test_c12_a_module_that_shares_its_weights_names_the_one_that_ran() -> None:
    model = nn.ModuleDict({"idle": nn.Linear(WIDTH, WIDTH), "used": nn.Linear(8, 8)})
    model["used"].weight = model["idle"].weight
    model.forward = lambda x: model["used"](x)
    with pytest.raises(
        tl.SelectorError, match="tied to those of 'used', which ran instead"
    ):
        E(model, VECTORS, ["idle"])


class Differentiates(nn.Module):
    """Goes on with a gradient that it computes itself, as energy models do."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.energy(x).pow(2).sum(), x)
        return self.last(force)


def test_c12_a_model_that_differentiates_in_its_forward_is_captured() -> None:
    model = Differentiates()
    layers = ["energy", "last"]
    reference = R(model, VECTORS, layers)
    OK(E(model, VECTORS, layers), reference)
    batch = torch.stack([VECTORS[index]["x"] for index in range(7)])
    with tl.Replayer(model, tl.plan(model, batch, layers)) as replayer:
        rows = replayer.run((batch,), {}, num_samples=7)
    assert not rows["energy"].requires_grad
    np.testing.assert_array_equal(rows["energy"].numpy(), reference["energy"])


class Vectorises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.vmap(lambda one: self.inner(one).relu())(x))


def test_c12_layers_inside_vmap_are_refused_and_those_outside_are_not() -> None:
    model = Vectorises()
    OK(E(model, VECTORS, ["last"]), R(model, VECTORS, ["last"]), tolerance=1e-6)
    for layer in ("inner", tl.func("relu")):
        with pytest.raises(tl.PlanError, match="lies inside torch.vmap"):
            E(model, VECTORS, layer)


def test_c12_a_torchscript_part_is_refused_with_the_reason() -> None:
    with pytest.warns(FutureWarning, match="torch.jit.trace|deprecated"):
        part = torch.jit.script(nn.Linear(WIDTH, WIDTH))
    model = nn.Sequential(part, nn.Linear(WIDTH, 2))
    assert E(model, VECTORS, ["1"])["1"].shape == (7, 2)
    with pytest.raises(tl.SelectorError, match="it is TorchScript, whose calls"):
        E(model, VECTORS, ["0"])


class StackedExperts(nn.Module):
    """Four experts as one stacked parameter, all of them run on every token."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, WIDTH, 6))
        self.gate = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        outputs = torch.bmm(tokens.expand(4, -1, -1), self.weight)
        share = self.gate(tokens).softmax(-1).t().unsqueeze(-1)
        return (outputs * share).sum(0).reshape(*x.shape[:2], 6)


def test_c13_grouped_experts_are_rows_of_samples_with_their_tokens_in_order() -> None:
    model, data = StackedExperts(), D(7, (3, WIDTH))
    store = E(model, data, {"experts": tl.func("bmm"), "gate": "gate"})
    items = torch.stack([data[index]["x"] for index in range(7)])
    expected = torch.einsum("btd,edf->betf", items, model.weight.detach())
    assert store["experts"].shape == (7, 4, 3, 6)
    np.testing.assert_allclose(store["experts"][:], expected.numpy(), atol=1e-5)
    gates = model.gate(items).detach().numpy()
    np.testing.assert_allclose(store["gate"][:], gates, atol=1e-6)


class RoutedExperts(nn.Module):
    """Each token goes to one expert, so that the experts' sizes are data."""

    def __init__(self, skips_idle: bool) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, 6) for _ in range(4))
        self.gate = nn.Linear(WIDTH, 4)
        self.skips_idle = skips_idle

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        chosen = self.gate(tokens).argmax(-1)
        output = tokens.new_zeros(len(tokens), 6)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().squeeze(-1)
            if len(rows) or not self.skips_idle:
                output[rows] = expert(tokens[rows])
        return output.reshape(*x.shape[:2], 6)


@pytest.mark.parametrize("skips_idle", [False, True])
def test_c13_routing_by_data_leaves_sites_around_it_extractable(
    skips_idle: bool,
) -> None:
    model, data = RoutedExperts(skips_idle), D(40, (3, WIDTH))
    names: dict[str, str | At] = {
        "self": "self",
        "gate": At("gate", lambda output: output.reshape(-1, 3, 4)),
    }
    reference = R(model, data, names)
    OK(E(model, data, ["gate", "self"]), reference, tolerance=1e-6)


@pytest.mark.parametrize("skips_idle", [False, True])
def test_c13_an_expert_that_gets_what_the_data_says_is_refused(
    skips_idle: bool,
) -> None:
    model = RoutedExperts(skips_idle)
    with pytest.raises(
        (tl.PlanError, tl.SelectorError),
        match="no axis grows in proportion|takes another path|took another way",
    ):
        E(model, D(7, (3, WIDTH)), ["experts.0", "experts.1"])


def test_c13_a_mixture_of_transformers_is_extracted_around_its_experts() -> None:
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=32,
    )
    model, tokens = transformers.MixtralModel(config).eval(), Tokens(7)
    layers = ["layers.0.mlp.experts", "layers.0.mlp", "layers.0"]
    reference = R(
        model,
        tokens,
        {
            "layers.0.mlp.experts": At(
                "layers.0.mlp.experts", lambda output: output.reshape(-1, 6, 16)
            ),
            "layers.0.mlp": "layers.0.mlp",
            "layers.0": "layers.0",
        },
    )
    OK(E(model, tokens, layers), reference, tolerance=1e-6)


class Adds(nn.Module):
    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        return input1 + input2


class CallsByKeyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.add = Adds()
        self.pair = nn.Bilinear(WIDTH, WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        total = self.add(input1=x, input2=x * 2)
        return self.pair(total, input2=x)


def test_c19_inputs_are_captured_however_they_were_passed() -> None:
    model = CallsByKeyword()
    reference = R(
        model,
        VECTORS,
        {
            'add.input["input1"]': At("add", lambda given: given[0], of_input=True),
            'add.input["input2"]': At("add", lambda given: given[1], of_input=True),
            "pair.input[0]": At("pair", lambda given: given[0], of_input=True),
            'pair.input["input2"]': At("pair", lambda given: given[1], of_input=True),
        },
    )
    layers = [tl.module_input("add"), tl.module_input("pair")]
    OK(E(model, VECTORS, layers), reference)
    one = 'add.input["input2"]'
    OK(E(model, VECTORS, tl.module_input("add", "input2")), {one: reference[one]})


def test_c19_an_input_that_was_not_passed_lists_those_that_were() -> None:
    with pytest.raises(tl.SelectorError, match="input of 'add' has no tensor at"):
        E(CallsByKeyword(), VECTORS, tl.module_input("add", "input3"))

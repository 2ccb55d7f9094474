"""What `layers=` accepts: names of the sites, and refusals."""

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from torchlens.errors import SelectorError
from torchlens.globs import compile_glob
from torchlens.graph import Graph
from torchlens.lookup import resolve_layers
from torchlens.selectors import everything, func, in_module, label, module, output
from torchlens.tracer import run_capture


class Deep(nn.Module):
    """Two stages of two steps, each with an inner "1"; one step is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stage1 = nn.Sequential(
            nn.Linear(3, 3), nn.Sequential(nn.ReLU(), nn.Tanh())
        )
        self.stage2 = nn.Sequential(
            nn.Linear(3, 3), nn.Sequential(nn.ReLU(), nn.Tanh())
        )
        self.act = nn.Sigmoid()
        self.lstm = nn.LSTM(3, 3)
        self.blocks = nn.ModuleList([nn.Linear(3, 3)])
        self.alias = self.act

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.stage2(self.act(self.stage1(x))))
        x = self.lstm(x[None])[0]
        for _ in range(3):
            x = self.blocks[0](x)
        return x


@cache
def deep_graph() -> Graph:
    return run_capture(Deep().eval(), (torch.randn(2, 3),), {}).graph


def chosen(layers: object, graph: Graph | None = None) -> dict[str, str]:
    """Return name -> label of the op behind it."""
    sites = resolve_layers(graph or deep_graph(), layers)  # type: ignore[arg-type]  # wrong kinds too
    assert all(name == site.name for name, site in sites.items())
    return {name: site.label for name, site in sites.items()}


LSTM = {"lstm[0]": "lstm_1_12", "lstm[1][0]": "lstm_2_13", "lstm[1][1]": "lstm_3_14"}
PASSES = {f"linear_3_15:{number}" for number in (1, 2, 3)}


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("linear_1_1", {"linear_1_1": "linear_1_1"}),
        ("linear_2", {"linear_2": "linear_2_5"}),
        ("linear_3_15:2", {"linear_3_15:2": "linear_3_15:2"}),
        ("linear_3:2", {"linear_3:2": "linear_3_15:2"}),
        ("linear_3_15", {name: name for name in PASSES}),
        ("linear_3", {f"linear_3:{n}": f"linear_3_15:{n}" for n in (1, 2, 3)}),
        ("stage1", {"stage1": "tanh_1_3"}),
        ("self.stage1", {"self.stage1": "tanh_1_3"}),
        ("stage1.1.0", {"stage1.1.0": "relu_1_2"}),
        ("act", {"act:1": "sigmoid_1_4", "act:2": "sigmoid_2_8"}),
        ("act:2", {"act:2": "sigmoid_2_8"}),
        ("alias", {"alias:1": "sigmoid_1_4", "alias:2": "sigmoid_2_8"}),
        ("alias:2", {"alias:2": "sigmoid_2_8"}),
        ("lstm", LSTM),
        ("lstm:1", LSTM),
        ("lstm[1]", {name: LSTM[name] for name in list(LSTM)[1:]}),
        ("lstm[1][0]", {"lstm[1][0]": "lstm_2_13"}),
        ("self", {"self": "linear_3_15:3"}),
        ("output_1", {"output_1": "linear_3_15:3"}),
        ("input_1", {"input_1": "input_1"}),
        (["stage2", "stage1"], {"stage2": "tanh_2_7", "stage1": "tanh_1_3"}),
        (("stage1", "stage1"), {"stage1": "tanh_1_3"}),
        (["stage1", module("stage1")], {"stage1": "tanh_1_3"}),
        (func("tanh"), {"tanh_1_3": "tanh_1_3", "tanh_2_7": "tanh_2_7"}),
        (["act:1", func("sigmoid")], None),
        ({"early": "stage1"}, {"early": "tanh_1_3"}),
        (
            {"a": ["act:1"], "b": module("act:2")},
            {"a": "sigmoid_1_4", "b": "sigmoid_2_8"},
        ),
        ({"s": "stage?"}, {"s.stage1": "tanh_1_3", "s.stage2": "tanh_2_7"}),
        ({"a": "stage1", "b": "stage1"}, {"a": "tanh_1_3", "b": "tanh_1_3"}),
        ("stage*.1", {"stage1.1": "tanh_1_3", "stage2.1": "tanh_2_7"}),
        ("stage1.*", {"stage1.0": "linear_1_1", "stage1.1": "tanh_1_3"}),
        ("stage?.1.0", {"stage1.1.0": "relu_1_2", "stage2.1.0": "relu_2_6"}),
        ("stage2.**", None),
        ("blocks.*", None),
        ("l*[1][0]", {"lstm[1][0]": "lstm_2_13"}),
        ("a*:2", {"act:2": "sigmoid_2_8"}),
        ("al*", {"alias:1": "sigmoid_1_4", "alias:2": "sigmoid_2_8"}),
    ],
    ids=repr,
)
def test_layers_name_these_sites(
    layers: object, expected: dict[str, str] | None
) -> None:
    found = chosen(layers)
    if expected is not None:
        assert found == expected
        if not isinstance(layers, str):
            assert list(found) == list(expected)


def test_glob_over_any_depth_takes_inner_modules_in_execution_order() -> None:
    expected = ["stage2.0", "stage2.1.0", "stage2.1.1", "stage2.1"]
    assert list(chosen("stage2.**")) == expected
    assert list(chosen("**.1")) == ["stage1.1.1", "stage1.1", "stage2.1.1", "stage2.1"]


def test_glob_over_a_list_gives_every_call() -> None:
    assert list(chosen("blocks.*")) == ["blocks.0:1", "blocks.0:2", "blocks.0:3"]


def test_glob_leaves_out_the_root_and_containers() -> None:
    names = list(chosen("*"))
    assert "self" not in names and "blocks" not in names
    assert names[0] == "stage1"


def test_description_adds_only_sites_that_are_new() -> None:
    layers = ["stage1", module("stage1") | module("stage2"), "stage*"]
    assert list(chosen(layers)) == ["stage1", "stage2"]


def test_two_spellings_of_one_tensor_are_both_there() -> None:
    both = chosen(["act:1", "alias:1"])
    assert both == {"act:1": "sigmoid_1_4", "alias:1": "sigmoid_1_4"}


def test_alias_keeps_the_primary_address_in_the_site() -> None:
    (site,) = resolve_layers(deep_graph(), "alias:1").values()
    assert (site.name, site.address, site.key.address) == ("alias:1", "act", "act")


def test_module_output_is_preferred_to_the_op_of_the_same_name_and_tensor() -> None:
    model = nn.Sequential()
    model.add_module("linear_1", nn.Linear(2, 2))
    graph = run_capture(model, (torch.randn(1, 2),), {}).graph
    (site,) = resolve_layers(graph, "linear_1").values()
    assert site.key.kind == "module_output"


class Swapped(nn.Module):
    """The module called "linear_1" runs second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.linear_1 = nn.Linear(2, 2), nn.Linear(2, 2)
        self.output_1 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_1(self.output_1(self.first(x))) + 1


def test_name_of_an_op_and_another_module_is_ambiguous() -> None:
    graph = run_capture(Swapped(), (torch.randn(1, 2),), {}).graph
    message = (
        r"'linear_1' is ambiguous: it is the label of 'linear_1_1' and the address of "
        r"a module, whose output is 'linear_2_3'\. Write 'linear_1_1' for the op or "
        r"'self\.linear_1' for the module\."
    )
    with pytest.raises(SelectorError, match=message):
        resolve_layers(graph, "linear_1")
    assert chosen("self.linear_1", graph) == {"self.linear_1": "linear_2_3"}
    assert chosen("linear_1_1", graph) == {"linear_1_1": "linear_1_1"}


def test_module_wins_over_a_boundary_of_the_same_name() -> None:
    graph = run_capture(Swapped(), (torch.randn(1, 2),), {}).graph
    assert chosen("output_1", graph) == {"output_1": "relu_1_2"}


FORMS = r"A layer is a label \(relu_1_2\), a module address"


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (3, FORMS + r".*never a number such as 3.*Node 3 of this graph is 'tanh_1_3'"),
        (-1, "never a number such as -1.*is 'output_1'"),
        (999, "never a number such as 999, which means"),
        (["stage1", 3], "never a number such as 3"),
        ({"a": 3}, "never a number such as 3"),
        (True, FORMS + ".*not bool"),
        (None, FORMS + ".*not NoneType"),
        (b"stage1", FORMS + ".*not bytes"),
        ({"stage1", "stage2"}, FORMS + ".*not set"),
        (["stage1", ["stage2"]], FORMS + ".*not list"),
        (nn.Linear(1, 1), FORMS + ".*not the module itself. Give the address of this"),
        ([], "layers is empty"),
        ({}, "layers is empty"),
        ({"a": []}, "layers is empty"),
        ({"": "stage1"}, "must be a text that is not empty, not ''"),
        ({1: "stage1"}, "must be a text that is not empty, not 1"),
        ("", "has no layer ''"),
        ("stage3", "has no layer 'stage3'.*Nearest: 'stage1', 'stage2'"),
        ("stage3", r"graph.modules lists all 15 addresses, trace.ops all 17 labels"),
        ("stage", "parts of names do not count"),
        ("tanh", r"tl.func\('tanh'\) picks the 2 ops"),
        ("Sigmoid", r"tl.func\('Sigmoid'\) picks the 2 ops"),
        ("LSTMCell", "Nearest: 'lstm'"),
        ("Sequential", r"tl.module_type\('Sequential'\) picks the modules"),
        ("tanh_9", "has no layer 'tanh_9'. neither a label"),
        ("tanh_1_9", "tanh number 1 is 'tanh_1_3'"),
        ("linear_3:9", "linear_3_15 has 3 passes, counted from 1"),
        ("act:3", "'act' was called 2 times, so there is no call 3"),
        ("lstm[2]", r"has no tensor at \[2\]. Its tensors: 'lstm\[0\]', 'lstm\[1\]"),
        ("blocks", r"only holds 1 modules that were.*\"blocks.\*\""),
        ("stage9.*", r"matches the glob 'stage9.\*'.*stay inside one component"),
        ("blocks.*.x", r"matches 1 modules, but none has such an output\. .*at \.x"),
        ("block?", "matches 1 modules, but none has such an output. 'blocks'"),
        (func("gelu"), "No site of Deep matches"),
        (
            {"a.tanh_1_3": "act:1", "a": func("tanh")},
            "stored as 'a.tanh_1_3', made by sigmoid_1_4 and tanh_1_3. Give them other",
        ),
    ],
    ids=repr,
)
def test_what_is_not_a_layer_is_refused(layers: object, message: str) -> None:
    with pytest.raises(SelectorError, match=message):
        chosen(layers)


def test_all_is_refused_with_its_cost_and_the_spelling_that_means_it() -> None:
    graph = deep_graph()
    num_bytes = sum(4 * torch.Size(op.spec.shape).numel() for op in graph.ops)
    message = (
        rf"'all' is refused: it would keep {len(graph.ops)} tensors, {num_bytes} B for "
        r"each batch like the traced one \(inputs \[2, 3\]\).*tl\.everything\(\)"
    )
    with pytest.raises(SelectorError, match=message):
        chosen("all")
    assert len(chosen(everything())) == len(graph.ops)


def test_module_called_all_is_still_an_address() -> None:
    model = nn.Sequential()
    model.add_module("all", nn.ReLU())
    graph = run_capture(model, (torch.randn(2),), {}).graph
    assert chosen("all", graph) == {"all": "relu_1_1"}


def test_buffer_is_never_a_layer() -> None:
    graph = run_capture(nn.BatchNorm1d(2).eval(), (torch.randn(3, 2),), {}).graph
    with pytest.raises(SelectorError, match="Buffers are not ops.*lists all 3"):
        chosen("buffer_1", graph)
    assert chosen(everything(), graph) == {"batchnorm_1_1": "batchnorm_1_1"}


class _Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.t()


class Fused(nn.Module):
    """Reads the weight of `inner` in a custom function; never calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.used, self.unused = (nn.Linear(2, 2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.used(_Custom.apply(x, self.inner.weight))


def test_module_whose_weight_a_fused_function_reads_is_refused_with_the_reason() -> (
    None
):
    graph = run_capture(Fused().eval(), (torch.randn(1, 2),), {}).graph
    message = (
        r"'inner' \(Linear\) was never called as a module.*parameters were read "
        r"directly by '.*' in module 'self' \(.*test_lookup.py:\d+\), a fused.*"
        r"Ask for tl\.label\('.*'\) or the module 'self', or run the model's unfused"
    )
    with pytest.raises(SelectorError, match=message):
        chosen("inner", graph)
    with pytest.raises(SelectorError, match="no op read its parameters: this input"):
        chosen("unused", graph)


class TiedHead(nn.Module):
    """Multiplies with the embedding's weight, which a linear layer owns too."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.emb(ids), self.head.weight) * 2


def test_functional_use_of_a_tied_weight_stands_for_the_module() -> None:
    graph = run_capture(TiedHead().eval(), (torch.tensor([1, 2]),), {}).graph
    assert chosen("head", graph) == {"head": "linear_1_2"}
    assert chosen("head:1", graph) == {"head:1": "linear_1_2"}
    assert chosen("emb", graph) == {"emb": "embedding_1_1"}
    with pytest.raises(SelectorError, match="linear_1_2 does its work once"):
        chosen("head:2", graph)
    with pytest.raises(SelectorError, match="linear_1_2 does its work once"):
        chosen("head[0]", graph)


class Partial(nn.Module):
    """Uses the weight of a linear layer in two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.fc.weight) + self.fc.weight.sum()


def test_module_whose_weight_is_used_otherwise_too_has_no_stand_in() -> None:
    graph = run_capture(Partial().eval(), (torch.randn(1, 2),), {}).graph
    with pytest.raises(SelectorError, match="read directly by 'linear_1_1', 'sum_1_2'"):
        chosen("fc", graph)


class Attending(nn.Module):
    """Applies one attention twice."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(*[self.attention(x, x, x)[0]] * 3)[0]


@pytest.mark.parametrize("grad", [True, False])
def test_projection_inside_attention_has_one_site_for_each_call(grad: bool) -> None:
    model, x = Attending().eval(), torch.randn(3, 2, 4)
    with torch.set_grad_enabled(grad):
        capture = run_capture(model, (x,), {}, wanted=None)
        expected = model.attention(x, x, x)[0]
    sites = resolve_layers(capture.graph, "attention.out_proj")
    assert list(sites) == ["attention.out_proj:1", "attention.out_proj:2"]
    first = sites["attention.out_proj:1"]
    value = capture.payloads[first.node].reshape(expected.shape)
    torch.testing.assert_close(value, expected)
    second = resolve_layers(capture.graph, "attention.out_proj:2")
    assert [site.node for site in second.values()] == [
        sites["attention.out_proj:2"].node
    ]


def test_child_whose_name_looks_like_a_call_or_a_glob_is_found() -> None:
    model = nn.ModuleDict({"rgb:1": nn.ReLU(), "a*": nn.Tanh()})

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: Tensor) -> Tensor:
            return self.parts["a*"](self.parts["rgb:1"](x))

    graph = run_capture(Holder(), (torch.randn(2),), {}).graph
    assert chosen("parts.rgb:1", graph) == {"parts.rgb:1": "relu_1_1"}
    assert chosen("parts.rgb:1:1", graph) == {"parts.rgb:1:1": "relu_1_1"}
    assert chosen("parts.a*", graph) == {"parts.a*": "tanh_1_2"}


def test_stopped_forward_says_what_did_not_return() -> None:
    full = deep_graph()
    stop = resolve_layers(full, "stage1")["stage1"].key
    graph = run_capture(Deep().eval(), (torch.randn(2, 3),), {}, stop_at=stop).graph
    assert chosen("stage1", graph) == {"stage1": "tanh_1_3"}
    with pytest.raises(SelectorError, match="stopped before 'self' returned"):
        chosen("self", graph)


def test_every_site_holds_the_tensor_that_a_hook_sees() -> None:
    model, x = Deep().eval(), torch.randn(2, 3)
    seen: dict[str, list[Tensor]] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: object, result: object) -> None:
            value = result[0] if isinstance(result, tuple) else result
            assert isinstance(value, Tensor)
            seen.setdefault(name, []).append(value.clone())

        return hook

    handles = [
        child.register_forward_hook(keep(name))
        for name, child in model.named_modules()
        if name
    ]
    model(x)
    for handle in handles:
        handle.remove()
    capture = run_capture(model, (x,), {}, wanted=None)
    for name, values in seen.items():
        text = f"{name}[0]" if name == "lstm" else name
        sites = list(resolve_layers(capture.graph, text).values())
        assert len(sites) == len(values), name
        for site, value in zip(sites, values, strict=True):
            assert torch.equal(capture.payloads[site.node], value), name


def test_glob_of_a_torchvision_model_takes_the_second_block_of_each_stage() -> None:
    import torchvision

    model = torchvision.models.resnet18().eval()
    graph = run_capture(model, (torch.randn(1, 3, 32, 32),), {}).graph
    assert list(chosen("layer*.1", graph)) == [f"layer{k}.1" for k in (1, 2, 3, 4)]
    assert chosen(["fc", "layer1.0.relu:2", "relu"], graph) == {
        "fc": "linear_1_69",
        "layer1.0.relu:2": "relu_3_11",
        "relu": "relu_1_3",
    }


def test_glob_of_a_language_model_takes_the_part_of_every_block() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2,
        n_embd=8,
        n_head=2,
        vocab_size=11,
        n_positions=8,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config).eval()
    graph = run_capture(model, (torch.tensor([[1, 2, 3]]),), {}).graph
    blocks = ["transformer.h.0.mlp", "transformer.h.1.mlp"]
    assert list(chosen("transformer.h.*.mlp", graph)) == blocks
    assert graph.nodes[resolve_layers(graph, "lm_head")["lm_head"].node].params == (
        "transformer.wte.weight",
    )
    for text in ("transformer.last_hidden_state", 'transformer["last_hidden_state"]'):
        assert list(chosen(text, graph)) == [text]


parts = st.text("ab1_", min_size=1, max_size=3)
dotted = st.lists(parts, min_size=1, max_size=4).map(".".join)


@settings(deadline=None)
@given(dotted)
def test_glob_without_wildcards_matches_itself_alone(address: str) -> None:
    pattern = compile_glob(address)
    assert pattern.fullmatch(address)
    assert not pattern.fullmatch(f"{address}.x") and not pattern.fullmatch(
        f"x{address}"
    )


@settings(deadline=None)
@given(st.lists(parts, min_size=2, max_size=4), st.data())
def test_glob_star_replaces_one_component(
    names: list[str], data: st.DataObject
) -> None:
    index = data.draw(st.integers(0, len(names) - 1))
    pattern = compile_glob(".".join([*names[:index], "*", *names[index + 1 :]]))
    assert pattern.fullmatch(".".join(names))
    assert not pattern.fullmatch(".".join([*names[:index], "x.y", *names[index + 1 :]]))


@settings(deadline=None)
@given(st.lists(parts, max_size=3), parts)
def test_glob_double_star_replaces_any_number_of_components(
    names: list[str], last: str
) -> None:
    assert compile_glob(f"**.{last}").fullmatch(".".join([*names, last]))
    assert compile_glob(f"{last}.**").fullmatch(".".join([last, *names, "x"]))
    assert not compile_glob(f"{last}.**").fullmatch(last)


def test_glob_treats_other_signs_as_themselves() -> None:
    assert not compile_glob("a+*").fullmatch("aa1")
    assert compile_glob("a+*").fullmatch("a+1")
    assert compile_glob("a?").fullmatch("ab") and not compile_glob("a?").fullmatch("a.")


def test_selector_in_a_list_keeps_module_and_op_names() -> None:
    layers = [module("stage1"), label("tanh_1_3"), in_module("stage2") & func("relu")]
    assert list(chosen(layers)) == ["stage1", "tanh_1_3", "relu_2_6"]
    assert list(chosen(func("lstm") & output(1))) == ["lstm_2_13"]


def test_views_and_foreign_objects_are_refused_by_name() -> None:
    with pytest.raises(SelectorError, match="not SimpleNamespace"):
        chosen([SimpleNamespace(label="tanh_1_3")])

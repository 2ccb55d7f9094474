"""What each selector picks, and the laws by which they combine."""

import pickle
from collections import namedtuple
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from torchlens.errors import SelectorError
from torchlens.graph import Graph
from torchlens.selector_algebra import evaluate
from torchlens.selectors import (
    Selector,
    contains,
    everything,
    followed_by,
    from_json,
    func,
    in_module,
    label,
    label_contains,
    module,
    module_input,
    module_type,
    output,
    preceded_by,
    regex,
    where,
)
from torchlens.tracer import run_capture


class Block(nn.Module):
    """Linear, then an in-place ReLU that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.act(self.fc(x)) * 2)


class Net(nn.Module):
    """A block "b", a block "b0", a list of layers, a split and a pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.b = Block()
        self.b0 = Block()
        self.heads = nn.ModuleList([nn.Linear(2, 3), nn.Linear(2, 3)])
        self.spare = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        first, second = self.b0(self.b(x)).chunk(2, dim=1)
        pooled = F.max_pool2d(x[None, None], 2)
        logits = self.heads[0](first).relu() + self.heads[1](input=second)
        return logits, {"pooled": pooled}


@cache
def net_graph() -> Graph:
    return run_capture(Net().eval(), (torch.randn(2, 4),), {}).graph


# Written by hand from the code of `Net`, not read off a graph.
LABELS = (
    "linear_1_1",  # b.fc
    "relu_1_2",  # b.act, in place
    "mul_1_3",
    "relu_2_4",  # b.act again, another line
    "linear_2_5",  # b0.fc
    "relu_3_6",
    "mul_2_7",
    "relu_4_8",
    "chunk_1_9",
    "chunk_2_10",
    "getitem_1_11",
    "maxpool2d_1_12",
    "linear_3_13",  # heads.0
    "relu_5_14",  # a Tensor method, not in place
    "linear_4_15",  # heads.1
    "add_1_16",
)
IN_PLACE = ("relu_1_2", "relu_2_4", "relu_3_6", "relu_4_8")
RELUS = (*IN_PLACE, "relu_5_14")


def names(selector: Selector, graph: Graph | None = None) -> tuple[str, ...]:
    return tuple(site.name for site in selector.resolve(graph or net_graph()))


def labels(selector: Selector) -> tuple[str, ...]:
    return tuple(site.label for site in selector.resolve(net_graph()))


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        (everything(), LABELS),
        (func("max_pool2d"), ("maxpool2d_1_12",)),
        (func("maxpool2d"), ("maxpool2d_1_12",)),
        (func("relu"), RELUS),
        (func("relu_"), IN_PLACE),
        (func("chunk", output=1), ("chunk_2_10",)),
        (func("chunk") & output(0), ("chunk_1_9",)),
        (output(1), ("chunk_2_10",)),
        (label("mul_1_3"), ("mul_1_3",)),
        (label("mul_1"), ("mul_1_3",)),
        (label("mul_1_3:1"), ("mul_1_3",)),
        (label_contains("MUL"), ("mul_1_3", "mul_2_7")),
        (contains("pool"), ("maxpool2d_1_12",)),
        (regex(r"^relu_[12]_"), ("relu_1_2", "relu_2_4")),
        (in_module("b"), LABELS[:4]),
        (in_module("b0"), LABELS[4:8]),
        (in_module("b.act:2"), ("relu_2_4",)),
        (in_module("heads"), ("linear_3_13", "linear_4_15")),
        (in_module("self"), LABELS),
        (followed_by(func("mul")), ("relu_1_2", "relu_3_6")),
        (preceded_by(func("mul")), ("relu_2_4", "relu_4_8")),
        (preceded_by(label("input_1")), ("linear_1_1", "getitem_1_11")),
        (followed_by(label("output_1")), ("add_1_16",)),
        (preceded_by(module("heads.0")), ("relu_5_14",)),
        (func("relu") - func("relu_"), ("relu_5_14",)),
        (everything() - in_module("self"), None),
        (~(in_module("b") | in_module("b0")) & func("linear"), LABELS[12:16:2]),
        (where(lambda op: op.shape[-1] == 3), LABELS[12:]),
        (where(lambda op: op.module == "b.fc"), ("linear_1_1",)),
    ],
    ids=repr,
)
def test_selector_picks_these_ops_in_execution_order(
    selector: Selector, expected: tuple[str, ...] | None
) -> None:
    if expected is None:
        with pytest.raises(SelectorError, match="No site of Net matches"):
            selector.resolve(net_graph())
    else:
        assert labels(selector) == expected


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        (module("b"), ["b"]),
        (module("b.act"), ["b.act:1", "b.act:2"]),
        (module("b.act:2"), ["b.act:2"]),
        (module("self"), ["self[0]", 'self[1]["pooled"]']),
        (module("self[1]"), ['self[1]["pooled"]']),
        (module("self[1].pooled"), ['self[1]["pooled"]']),
        (module_type(nn.Linear), ["b.fc", "b0.fc", "heads.0", "heads.1"]),
        (module_type("Block"), ["b", "b0"]),
        (module_input("b"), ["b.input[0]"]),
        (module_input("heads.1", "input"), ['heads.1.input["input"]']),
        (module_input("b0", 0), ["b0.input[0]"]),
        (module_input("b.act:2"), ["b.act:2.input[0]"]),
        (label("input_1"), ["self.input[0]"]),
        (label("output_2"), ['self[1]["pooled"]']),
    ],
    ids=repr,
)
def test_module_selector_picks_module_sites(
    selector: Selector, expected: list[str]
) -> None:
    sites = selector.resolve(net_graph())
    assert [site.name for site in sites] == expected
    assert all(site.key.kind.startswith("module_") for site in sites)


def test_module_site_intersected_with_ops_stays_a_module_site() -> None:
    expected = names(module("b.fc"))
    assert names(module("b.fc") & func("linear")) == expected == ("b.fc",)
    assert names(func("linear") & module("b.fc")) == expected
    assert names(everything() & module_type(nn.Linear)) == names(module_type(nn.Linear))


def test_union_of_a_module_and_its_op_is_one_site() -> None:
    sites = (module("b.fc") | func("linear")).resolve(net_graph())
    assert [site.name for site in sites] == [
        "b.fc",
        "linear_2_5",
        "linear_3_13",
        "linear_4_15",
    ]


def test_nested_modules_of_one_tensor_are_two_sites_inner_first() -> None:
    sites = (module("b") | module("b.act:2")).resolve(net_graph())
    assert [site.name for site in sites] == ["b.act:2", "b"]
    assert len({site.node for site in sites}) == 1


def test_complement_is_taken_over_ops_and_forgets_module_names() -> None:
    assert names(~module("b.fc") & func("linear")) == (
        "linear_2_5",
        "linear_3_13",
        "linear_4_15",
    )
    assert names(~~module("b.fc")) == ("linear_1_1",)


def test_resolve_follows_execution_order_over_all_kinds_of_sites() -> None:
    selector = module("b") | module_input("b") | label("linear_1_1") | module("self[0]")
    assert names(selector) == ("b.input[0]", "linear_1_1", "b", "self[0]")


class Linear(nn.Module):
    """Shares nothing but the name with torch's layer."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Lazy(nn.Linear):
    """A subclass of torch's layer."""


def test_module_type_compares_classes_and_not_their_last_names() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Linear(), Lazy(2, 2))
    graph = run_capture(model, (torch.randn(1, 2),), {}).graph
    assert names(module_type(nn.Linear), graph) == ("0", "2")
    assert names(module_type(Linear), graph) == ("1",)
    assert names(module_type(Lazy), graph) == ("2",)
    assert names(module_type("Linear"), graph) == ("0", "1", "2")
    assert names(module_type("torch.nn.modules.linear.Linear"), graph) == ("0", "2")
    assert names(from_json(module_type(Linear).to_json()), graph) == ("1",)


class Structured(nn.Module):
    """Returns a named tuple, calls its child by keyword and by `.forward`."""

    Result = namedtuple("Result", "hidden rest")

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.direct = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> "Structured.Result":
        hidden, (h, _) = self.lstm(x)
        attended, _ = self.attention(query=hidden, key=hidden, value=hidden)
        return self.Result(self.direct.forward(attended), (h,))


@pytest.mark.parametrize("grad", [True, False])
def test_structured_outputs_and_fused_projections_are_picked(grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        graph = run_capture(Structured().eval(), (torch.randn(2, 5, 3),), {}).graph
    assert names(module("lstm"), graph) == ("lstm[0]", "lstm[1][0]", "lstm[1][1]")
    assert names(module("lstm[1]"), graph) == ("lstm[1][0]", "lstm[1][1]")
    assert names(func("lstm", output=1), graph) == ("lstm_2_4",)
    assert names(module("self.hidden"), graph) == ("self.hidden",)
    assert names(module("direct"), graph) == ("direct",)
    assert names(module_input("attention", "key"), graph) == ('attention.input["key"]',)
    (projection,) = module("attention.out_proj").resolve(graph)
    assert (projection.name, projection.key.kind) == ("attention.out_proj", "op")
    assert graph.nodes[projection.node].params == (
        "attention.out_proj.weight",
        "attention.out_proj.bias",
    )


@pytest.mark.parametrize(
    ("selector", "message"),
    [
        (func("rellu"), r"No site of Net matches func\('rellu'\)\. Nearest: 'relu'"),
        (func("gelu"), "It ran 8 functions: 'add', 'chunk', 'getitem', 'linear'"),
        (func("chunk", output=2), "count from 0, and only among several: chunk has 2"),
        (func("linear", output=0), "linear has 1"),
        (output(7), "chunk has 2"),
        (module("b1"), "Net has no module 'b1'. Nearest: 'b', 'b0'"),
        (module("b1"), "graph.modules lists all 11"),
        (module("fc"), "Nearest: 'b.fc', 'b0.fc'"),
        (module("module.b.fc"), "Nearest: 'b.fc'"),
        (in_module("B"), "Nearest: 'b'"),
        (module("b.act:3"), "'b.act' was called 2 times, so there is no call 3"),
        (module("b.fc:2"), r"was called once, so there is no call 2.*b\.fc:1\."),
        (module("b[0]"), r"output of 'b' has no tensor at \[0\]\. Its tensors: 'b'"),
        (module_input("b", 1), r"input of 'b' has no tensor at \[1\].*'b\[0\]'"),
        (module("spare"), "'spare'.*never called as a module.*no op read its param"),
        (module_input("spare"), "'spare' was never called as a module, so it rec"),
        (in_module("spare"), "'spare'.*was never called"),
        (module("heads"), "only holds 2 modules that were, such as 'heads.0'"),
        (in_module("b[0]"), r"names part of an output.*in_module\('b'\)"),
        (label("relu_9"), "Net has no op labelled 'relu_9'. Nearest: 'relu_"),
        (label("relu_1_3"), "relu number 1 is 'relu_1_2'"),
        (label("relu_1:2"), "relu_1_2 has one pass, counted from 1"),
        (label("nothing at all"), "trace.ops lists all 19"),
        (label_contains("xyz"), "Nothing is spelt alike. trace.ops lists all 16"),
        (regex("^Relu"), "searched in labels such as 'linear_1_1'.*capitals count"),
        (module_type("Linnear"), "Nearest: 'Linear'"),
        (module_type(nn.Conv2d), "Classes that were called: 'Block', 'Linear'"),
        (module_type(nn.ModuleList), "exist but were never called: 'heads'"),
        (where(lambda op: False), "answered false for all 16 ops"),
        (followed_by(func("gelu")), r"func\('gelu'\) itself picks nothing"),
        (preceded_by(label("output_1")), "picks something, but no op reads it"),
        (followed_by(label("input_1")), "picks something, but no op is read by it"),
    ],
    ids=lambda value: repr(value)[:50],
)
def test_selector_that_picks_nothing_is_refused_with_near_misses(
    selector: Selector, message: str
) -> None:
    with pytest.raises(SelectorError, match=message):
        selector.resolve(net_graph())


def test_empty_combination_says_what_each_part_picked() -> None:
    with pytest.raises(SelectorError) as caught:
        (func("relu") & in_module("heads")).resolve(net_graph())
    text = str(caught.value)
    assert "func('relu') -> 5 sites: relu_1_2, relu_2_4, relu_3_6, relu_4_8" in text
    assert "in_module('heads') -> 2 sites: linear_3_13, linear_4_15" in text


@pytest.mark.parametrize(
    "selector",
    [
        func("relu") | module("typo"),
        everything() - in_module("typo"),
        ~label("typo_1") & func("relu"),
        followed_by(module("typo")) | func("relu"),
    ],
    ids=repr,
)
def test_unknown_name_is_refused_wherever_it_stands(selector: Selector) -> None:
    with pytest.raises(SelectorError, match="Net has no .*typo"):
        selector.resolve(net_graph())


def test_description_that_matches_nothing_may_stand_in_a_union() -> None:
    assert labels(func("gelu") | func("mul")) == ("mul_1_3", "mul_2_7")


def test_explain_shows_what_each_part_matched() -> None:
    selector = func("mul") - in_module("b") | followed_by(func("gelu"))
    assert selector.explain(net_graph()).splitlines() == [
        "(func('mul') - in_module('b')) | followed_by(func('gelu')) -> 1 site: mul_2_7",
        "  func('mul') - in_module('b') -> 1 site: mul_2_7",
        "    func('mul') -> 2 sites: mul_1_3, mul_2_7",
        "    in_module('b') -> 4 sites: linear_1_1, relu_1_2, mul_1_3, relu_2_4",
        "  followed_by(func('gelu')) -> nothing. func('gelu') itself picks nothing.",
        "    func('gelu') -> nothing. Nearest: 'relu', 'relu_'. It ran 8 functions: "
        "'add', 'chunk', 'getitem', 'linear', 'max_pool2d', 'mul', 'relu', 'relu_'.",
    ]


def test_explain_reports_unknown_names_and_does_not_raise() -> None:
    text = (func("mul") & module("typo")).explain(net_graph())
    assert "module('typo') -> an error. Net has no module 'typo'." in text
    assert "func('mul') -> 2 sites" in text


@pytest.mark.parametrize(
    ("selector", "text"),
    [
        (func("relu"), "func('relu')"),
        (func("lstm", output=1), "func('lstm', output=1)"),
        (module_input("a", "key"), "module_input('a', path=('key',))"),
        (everything(), "everything()"),
        (module_type("Conv2d"), "module_type('Conv2d')"),
        (~func("a") & func("b"), "~func('a') & func('b')"),
        (~(func("a") & func("b")), "~(func('a') & func('b'))"),
        (func("a") & func("b") & func("c"), "func('a') & func('b') & func('c')"),
        (func("a") - func("b") - func("c"), "func('a') - func('b') - func('c')"),
        (func("a") - (func("b") - func("c")), "func('a') - (func('b') - func('c'))"),
        (func("a") | func("b") & func("c"), "func('a') | (func('b') & func('c'))"),
        (followed_by(label("x_1")), "followed_by(label('x_1'))"),
    ],
)
def test_selector_prints_as_the_expression(selector: Selector, text: str) -> None:
    assert repr(selector) == text
    assert eval(text) == selector


def test_selector_cannot_be_changed() -> None:
    for selector, field in ((func("a"), "name"), (func("a") & func("b"), "operands")):
        with pytest.raises(AttributeError, match=field):
            setattr(selector, field, "other")


def test_python_keywords_between_selectors_are_refused() -> None:
    with pytest.raises(SelectorError, match="Combine selectors with &, |, - and ~"):
        func("relu") and func("mul")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: func("relu") & "fc", "needs another selector, not str 'fc'"),
        (lambda: func(""), "func needs a text that is not empty"),
        (lambda: func(nn.ReLU), "func needs a text.*not type"),
        (lambda: func("a", output=-1), "whole numbers from 0, not -1"),
        (lambda: func("a", output=True), "whole numbers from 0, not True"),
        (lambda: output(None), "output needs the number"),
        (lambda: module(3), "module needs a text.*not int 3"),
        (lambda: in_module(None), "in_module needs a text"),
        (lambda: label(b"x"), "label needs a text"),
        (lambda: regex("("), r"'\(' is not a regular expression: .*label_contains"),
        (lambda: where("relu"), "where needs a function of one op, not str"),
        (lambda: followed_by("relu"), r"followed_by needs a selector.*not str 'relu'"),
        (lambda: module_type(3), "module_type needs a class of modules"),
        (lambda: module_type(int), "module_type needs a class of modules"),
        (lambda: module_input("a", 1.5), "A path is an index, a key"),
        (lambda: module_input("a", "[x]"), "is not a path into an output"),
    ],
)
def test_argument_of_the_wrong_kind_is_refused(build, message: str) -> None:  # type: ignore[no-untyped-def]  # lambdas
    with pytest.raises(SelectorError, match=message):
        build()


def test_where_names_the_op_on_which_the_function_failed() -> None:
    with pytest.raises(SelectorError, match="failed on 'linear_1_1': ZeroDivisionErr"):
        where(lambda op: 1 / 0).resolve(net_graph())


def test_where_sees_no_payload() -> None:
    with pytest.raises(SelectorError, match="CaptureError.*was not saved"):
        where(lambda op: op.out.sum() > 0).resolve(net_graph())


PORTABLE = [
    func("relu"),
    func("chunk", output=1),
    module('a["b"]:2'),
    module_input("a", (0, "key")),
    module_input("a"),
    in_module("a"),
    module_type(nn.Linear),
    label("relu_1_2"),
    label_contains("x"),
    regex("^a"),
    output(3),
    everything(),
    followed_by(preceded_by(~func("é"))),
    (func("a") | func("b")) & ~func("c") - func("d"),
]


@pytest.mark.parametrize("selector", PORTABLE, ids=repr)
def test_selector_survives_json_and_pickle(selector: Selector) -> None:
    copy = from_json(selector.to_json())
    assert copy == selector and hash(copy) == hash(selector)
    assert pickle.loads(pickle.dumps(selector)) == selector


def test_every_kind_of_portable_selector_is_in_the_json_test() -> None:
    from torchlens.selectors import _BUILDERS

    kinds = {part for selector in PORTABLE for part in selector.to_json().split('"')}
    assert kinds >= set(_BUILDERS)


def test_where_is_refused_in_json_with_a_hint() -> None:
    with pytest.raises(SelectorError, match=r"where\(.*cannot be stored.*Say the same"):
        (func("relu") & where(lambda op: True)).to_json()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", 'an object with "select"'),
        ('{"select": "gone"}', "There is no selector 'gone'. This version knows: and"),
        ('{"select": "func", "nam": "x"}', "has other arguments than func takes"),
        ('{"select": "func", "name": 3}', "func needs a text"),
        ('{"select": "and", "parts": []}', "'and' needs a list of parts"),
        ('{"select": "not"}', "'not' needs a list of one part"),
    ],
)
def test_damaged_json_is_refused(text: str, message: str) -> None:
    with pytest.raises(SelectorError, match=message):
        from_json(text)


leaf_selectors = st.sampled_from(
    [
        everything(),
        func("relu"),
        func("relu_"),
        func("mul"),
        func("gelu"),
        in_module("b"),
        in_module("heads"),
        module("b"),
        module("b.act"),
        module("self"),
        module_input("b"),
        module_input("b0"),
        module_type(nn.Linear),
        label("mul_1_3"),
        label("input_1"),
        label("output_1"),
        output(1),
        regex("_1_"),
        followed_by(func("mul")),
        preceded_by(module("b")),
    ]
)
selectors = st.recursive(
    leaf_selectors,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda pair: pair[0] & pair[1]),
        st.tuples(inner, inner).map(lambda pair: pair[0] | pair[1]),
        st.tuples(inner, inner).map(lambda pair: pair[0] - pair[1]),
        inner.map(lambda selector: ~selector),
    ),
    max_leaves=6,
)


def picked(selector: Selector, named: Selector | None = None) -> set[int]:
    """Return the nodes, with the names in `named` known to the complement too."""
    widened = selector if named is None else selector | (named - named)
    return set(evaluate(widened, net_graph()))


def sites(selector: Selector) -> tuple[object, ...]:
    try:
        return selector.resolve(net_graph())
    except SelectorError:
        return ()


@settings(deadline=None)
@given(selectors, selectors)
def test_and_and_or_commute(a: Selector, b: Selector) -> None:
    assert sites(a & b) == sites(b & a)
    assert sites(a | b) == sites(b | a)


@settings(deadline=None)
@given(selectors, selectors, selectors)
def test_and_and_or_are_associative(a: Selector, b: Selector, c: Selector) -> None:
    assert sites((a & b) & c) == sites(a & (b & c))
    assert sites((a | b) | c) == sites(a | (b | c))


@settings(deadline=None)
@given(selectors, selectors)
def test_de_morgan_holds(a: Selector, b: Selector) -> None:
    assert sites(~(a & b)) == sites(~a | ~b)
    assert sites(~(a | b)) == sites(~a & ~b)


@settings(deadline=None)
@given(selectors, selectors)
def test_difference_is_intersection_with_the_complement(
    a: Selector, b: Selector
) -> None:
    assert sites(a - b) == sites(a & ~b)


@settings(deadline=None)
@given(selectors, selectors, selectors)
def test_and_distributes_over_or_and_or_over_and(
    a: Selector, b: Selector, c: Selector
) -> None:
    assert sites(a & (b | c)) == sites((a & b) | (a & c))
    left, right = a | (b & c), (a | b) & (a | c)
    assert picked(left) == picked(right)


@settings(deadline=None)
@given(selectors)
def test_doubling_and_complement_laws(a: Selector) -> None:
    assert sites(a & a) == sites(a) == sites(a | a)
    assert picked(~~a) == picked(a)
    assert not picked(a & ~a) and not picked(a - a)
    assert picked(a | ~a) >= picked(everything())


@settings(deadline=None)
@given(selectors, selectors)
def test_absorption_holds_for_tensors(a: Selector, b: Selector) -> None:
    assert picked(a | (a & b)) == picked(a, b) == picked(a & (a | b))


@settings(deadline=None)
@given(selectors)
def test_any_expression_prints_stores_and_orders(a: Selector) -> None:
    scope = {"torch": torch, **globals()}
    assert eval(repr(a), scope) == a
    assert from_json(a.to_json()) == a
    found = a.resolve(net_graph()) if picked(a) else ()
    assert list(found) == sorted(found, key=lambda site: site.order)
    assert len({site.key for site in found}) == len(found)

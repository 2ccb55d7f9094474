"""Validation: planted errors are found, and hard but right traces pass."""

import copy
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from torchlens.graph import Graph
from torchlens.records import ArgRef, OpRecord
from torchlens.tracer import Capture, run_capture
from torchlens.validation import validate_capture


class Lambda(nn.Module):
    """A model from a function of (self, x)."""

    def __init__(self, function: Callable[..., object], **modules: object) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, *args):
        return self.function(self, *args)


def captured(model: nn.Module, *args: object) -> Capture:
    return run_capture(model, args, {}, wanted=None)


def branches(self, x):
    left, right = self.a(x), self.b(x)
    return {"sum": (left + right.exp()).relu(), "left": left * 2}


@pytest.fixture
def clean() -> Capture:
    model = Lambda(branches, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    return captured(model, torch.randn(3, 4))


def changed(capture: Capture, node: OpRecord, **facts: object) -> Capture:
    """Return the capture with one node's facts changed."""
    nodes = list(capture.graph.nodes)
    nodes[node.index] = replace(node, **facts)
    return replace(capture, graph=replace(capture.graph, nodes=tuple(nodes)))


def node_of(graph: Graph, label: str) -> OpRecord:
    return next(node for node in graph.nodes if node.label == label)


def test_validation_passes_a_clean_capture(clean: Capture) -> None:
    report = validate_capture(clean)
    assert report and not report.skipped
    assert report.num_checked == len(clean.graph.nodes) - 1
    assert str(report).startswith("Validation passed: 8 ops executed again, 0 skipped")


def test_validation_finds_a_wrong_edge(clean: Capture) -> None:
    exp = node_of(clean.graph, "exp_1_3")
    wrong = node_of(clean.graph, "linear_1_1").index
    report = validate_capture(
        changed(clean, exp, args=(ArgRef(node=wrong),), parents=(wrong,))
    )
    assert len(report.failures) == 1
    assert report.failures[0].startswith("exp_1_3: executed again it differs by up to")
    assert "FAILED" in str(report)


def test_validation_finds_a_wrong_edge_in_the_arguments_alone(clean: Capture) -> None:
    exp = node_of(clean.graph, "exp_1_3")
    wrong = node_of(clean.graph, "linear_1_1").index
    report = validate_capture(changed(clean, exp, args=(ArgRef(node=wrong),)))
    assert any("exp_1_3 lists parents [2]" in text for text in report.failures)
    assert any("exp_1_3: executed again" in text for text in report.failures)


def test_validation_finds_a_wrong_edge_in_the_parents_alone(clean: Capture) -> None:
    exp = node_of(clean.graph, "exp_1_3")
    report = validate_capture(changed(clean, exp, parents=(0,)))
    assert report.failures == (
        "exp_1_3 lists parents [0] but its arguments came from [2].",
    )


def test_validation_finds_a_wrong_parameter(clean: Capture) -> None:
    node = node_of(clean.graph, "linear_1_1")
    args = tuple(
        replace(a, param="b.weight") if a.param == "a.weight" else a for a in node.args
    )
    assert validate_capture(changed(clean, node, args=args)).failures


def test_validation_finds_an_edge_from_the_future(clean: Capture) -> None:
    exp = node_of(clean.graph, "exp_1_3")
    late = node_of(clean.graph, "relu_1_5").index
    report = validate_capture(
        changed(clean, exp, args=(ArgRef(node=late),), parents=(late,))
    )
    assert any("a parent that ran after it" in text for text in report.failures)


@pytest.mark.parametrize("label", ["linear_1_1", "exp_1_3", "relu_1_5", "output_2"])
def test_validation_finds_a_wrong_payload(clean: Capture, label: str) -> None:
    node = node_of(clean.graph, label)
    payloads = {**clean.payloads, node.index: clean.payloads[node.index] + 1}
    report = validate_capture(replace(clean, payloads=payloads))
    assert any(text.startswith(f"{label}: ") for text in report.failures)


def test_validation_finds_a_payload_of_another_shape(clean: Capture) -> None:
    node = node_of(clean.graph, "exp_1_3")
    payloads = {**clean.payloads, node.index: torch.zeros(4, 3)}
    report = validate_capture(replace(clean, payloads=payloads))
    assert (
        "exp_1_3: executed again it gives torch.float32 [3, 4], saved was "
        "torch.float32 [4, 3]." in report.failures
    )


def without(capture: Capture, label: str, renumber: bool) -> Capture:
    """Return the capture without one op; its children read its parent instead."""
    gone = node_of(capture.graph, label)

    def index_of(index: int) -> int:
        index = gone.parents[0] if index == gone.index else index
        return index - 1 if renumber and index > gone.index else index

    def moved(value: object) -> object:
        if isinstance(value, ArgRef) and value.node is not None:
            return replace(value, node=index_of(value.node))
        if isinstance(value, tuple | list):
            return type(value)(map(moved, value))
        return value

    nodes = []
    for node in capture.graph.nodes:
        if node.index == gone.index:
            continue
        node = replace(
            node, parents=tuple(map(index_of, node.parents)), args=moved(node.args)
        )
        if renumber and node.index > gone.index:
            node = replace(
                node,
                index=node.index - 1,
                call=node.call - 1,
                step=max(node.step - 1, 0),
            )
        nodes.append(node)
    payloads = {
        index_of(index): tensor
        for index, tensor in capture.payloads.items()
        if index != gone.index
    }
    graph = replace(capture.graph, nodes=tuple(nodes))
    return replace(capture, graph=graph, payloads=payloads)


@pytest.mark.parametrize("label", ["exp_1_3", "add_1_4", "relu_1_5", "mul_1_6"])
@pytest.mark.parametrize("renumber", [True, False])
def test_validation_finds_a_missing_op(
    clean: Capture, label: str, renumber: bool
) -> None:
    report = validate_capture(without(clean, label, renumber))
    assert report.failures
    if not renumber:
        assert "an op is missing" in report.failures[0]


def test_validation_finds_a_missing_op_whose_result_nobody_used() -> None:
    def unused(self, x):
        x.exp()
        return x + 1

    capture = captured(Lambda(unused), torch.randn(2))
    report = validate_capture(without(capture, "exp_1_1", renumber=False))
    assert "an op is missing" in report.failures[0]


def test_validation_finds_outputs_that_are_exchanged() -> None:
    capture = captured(nn.LSTM(4, 4), torch.randn(3, 2, 4))
    hidden, cell = (node_of(capture.graph, f"lstm_{k}_{k + 2}") for k in (2, 3))
    assert validate_capture(capture)
    exchanged = changed(
        changed(capture, hidden, output_path=cell.output_path),
        cell,
        output_path=hidden.output_path,
    )
    failures = validate_capture(exchanged).failures
    assert {text.split(":")[0] for text in failures} == {hidden.label, cell.label}


def test_validation_finds_an_output_path_that_does_not_exist(clean: Capture) -> None:
    node = node_of(clean.graph, "exp_1_3")
    report = validate_capture(changed(clean, node, output_path=(3,)))
    assert report.failures == ("exp_1_3: executing it again returned no tensor there.",)


def test_validation_finds_a_model_output_at_another_path(clean: Capture) -> None:
    first = node_of(clean.graph, "output_1")
    wrong = changed(clean, first, key=replace(first.key, path=("left",)))
    assert any("has no node" in text for text in validate_capture(wrong).failures)


def test_validation_finds_a_missing_model_output(clean: Capture) -> None:
    nodes = clean.graph.nodes[:-1]
    short = replace(clean, graph=replace(clean.graph, nodes=nodes))
    assert any("left" in text for text in validate_capture(short).failures)


def test_validation_finds_a_wrong_module_output(clean: Capture) -> None:
    calls = list(clean.graph.module_calls)
    call = next(call for call in calls if call.address == "b")
    other = node_of(clean.graph, "linear_1_1")
    leaf = replace(call.outputs[0], node=other.index)
    calls[call.index] = replace(call, outputs=(leaf,))
    wrong = replace(clean, graph=replace(clean.graph, module_calls=tuple(calls)))
    assert any("b:1" in text for text in validate_capture(wrong).failures)


def test_validation_skips_what_was_not_kept(clean: Capture) -> None:
    exp = node_of(clean.graph, "exp_1_3").index
    payloads = {i: t for i, t in clean.payloads.items() if i != exp}
    report = validate_capture(replace(clean, payloads=payloads))
    assert report and report.skipped == (
        "exp_1_3: no payload was kept.",
        f"add_1_4: the payload of node {exp} was not kept.",
    )


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def in_place(self, x):
    y = x * 1
    y += 2
    y.mul_(3).relu_()
    return y.t()


def views(self, x):
    y = x * 1
    flat, row = y.view(-1), y[0]
    flat.add_(1)
    row.mul_(2)
    y[1, 2] = 5
    y.T[0] = 7
    return y + flat.view(3, 4) + row, y


def written_by_the_caller(self, x):
    y = self.a(x)
    y[0].zero_()
    return self.a(y)


def random_draws(self, x):
    noise = torch.rand_like(x) + torch.randn(4) + torch.normal(0.0, 1.0, (4,))
    kept = F.dropout(x, 0.5, True) * torch.bernoulli(torch.full((4,), 0.5))
    started = nn.init.kaiming_uniform_(torch.empty(4, 4))
    return noise + kept @ started + torch.empty(4).uniform_() + torch.randperm(4)


def transforms(self, x):
    spectrum = torch.fft.rfft(x)
    real = torch.view_as_real(spectrum).sum() + spectrum.real + spectrum.imag
    return torch.fft.irfft(spectrum * (1 + 2j), n=4), real


def indices(self, x):
    rows = torch.tensor([0, 1])
    grid = torch.zeros(3, 4)
    grid.index_put_((rows, rows), x[0, :2], accumulate=True)
    z = x.clone()
    z[x > 0] = 0
    z[torch.tensor([2]), :] = x[1]
    z[..., -1] = 3
    spread = torch.zeros(3, 4).scatter_(1, rows.expand(3, 2), x[:, :2])
    return grid + z + spread.scatter_add(1, torch.zeros(3, 4).long(), x)


def choices(self, x):
    values, places = x.topk(2)
    biggest = x.max(1)
    ordered = x.sort(descending=True)
    signed = torch.where(x > 0, x, -x)
    return values.sum() + places.sum() + biggest.values[0] + ordered[1] + signed


def checkpointed(self, x):
    again = checkpoint(self.a, x, use_reentrant=False)
    return again + checkpoint(self.a, x.requires_grad_(), use_reentrant=True)


def stepwise(self, x):
    table, total = torch.empty(3, 4), torch.empty(3, 4)
    for row in range(3):
        table[row] = self.a(x[row])
    torch.add(table.detach(), 1, out=total)
    return table + total


def swapped(self, x):
    y = x * 2
    y.data = x * 3
    y.data.add_(1)
    return y + 1


def several_at_once(self, x):
    pair = [x * 1, x * 2]
    torch._foreach_add_(pair, 1.0)
    return pair[0] + torch._foreach_mul(pair, 2.0)[1]


def drawn_from_a_generator(self, x):
    return x + torch.rand(4, generator=self.source) + torch.randn(4)


def cast(self, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = self.a(x)
        with torch.autocast("cpu", enabled=False):
            high = self.a(low.float())
    return low.float() + high


def sparse(self, x):
    return torch.sparse.mm(x.to_sparse(), x.t()).relu() + x.to_sparse().sum()


def inference(self, x):
    with torch.inference_mode():
        y = self.a(x) * 2
    return y.clone() + 1


def reweighted(self, x):
    weights = {"weight": self.a.weight * 2, "bias": self.a.bias + 1}
    return torch.func.functional_call(self.a, weights, (x,))


def halved_weight(self, x):
    with torch.no_grad():
        self.a.weight.mul_(0.5)
    return self.a(x)


def stateful(self, x):
    self.state = self.state * 0.5 + x.mean(0)
    self.seen.append(x)
    return x + self.state + len(self.seen)


def packed(self, x):
    pack = nn.utils.rnn.pack_padded_sequence(x, [3, 2])
    return nn.utils.rnn.pad_packed_sequence(self.lstm(pack)[0])[0]


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def norm() -> nn.BatchNorm1d:
    return nn.BatchNorm1d(4)


def matrix() -> tuple[torch.Tensor, ...]:
    return (torch.randn(3, 4),)


def sequence() -> tuple[torch.Tensor, ...]:
    return (torch.randn(3, 2, 4),)


def image() -> tuple[torch.Tensor, ...]:
    return (torch.randn(2, 3, 8, 8),)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[object, ...]]]] = {
    "in-place": (lambda: Lambda(in_place), matrix),
    "views of one memory": (lambda: Lambda(views), matrix),
    "input written through a view": (
        lambda: Lambda(written_by_the_caller, a=linear()),
        matrix,
    ),
    "rows of a table": (lambda: Lambda(stepwise, a=linear()), matrix),
    "data replaced": (lambda: Lambda(swapped), matrix),
    "foreach": (lambda: Lambda(several_at_once), matrix),
    "dropout": (lambda: nn.Sequential(linear(), nn.Dropout()).train(), matrix),
    "random draws": (lambda: Lambda(random_draws), matrix),
    "generator": (
        lambda: Lambda(drawn_from_a_generator, source=torch.Generator()),
        matrix,
    ),
    "attention in training": (
        lambda: nn.MultiheadAttention(4, 2, dropout=0.3).train(),
        lambda: sequence() * 3,
    ),
    "lstm in training": (lambda: nn.LSTM(4, 5, 2, dropout=0.5).train(), sequence),
    "packed sequence": (lambda: Lambda(packed, lstm=nn.LSTM(4, 5)), sequence),
    "batch norm in training": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(True)),
        image,
    ),
    "one batch norm twice": (
        lambda: Lambda(lambda s, x: s.n(s.n(x) * 2) + s.n.running_mean, n=norm()),
        matrix,
    ),
    "fft": (lambda: Lambda(transforms), matrix),
    "einsum": (
        lambda: Lambda(
            lambda s, x: torch.einsum("ij,kj->ik", x, s.a.weight), a=linear()
        ),
        matrix,
    ),
    "indices": (lambda: Lambda(indices), matrix),
    "choices": (lambda: Lambda(choices), matrix),
    "custom autograd function": (
        lambda: Lambda(lambda s, x: Double.apply(s.a(x)) + 1, a=linear()),
        matrix,
    ),
    "checkpointing": (lambda: Lambda(checkpointed, a=linear()), matrix),
    "weight norm": (
        lambda: nn.Sequential(
            nn.utils.parametrizations.weight_norm(linear()),
            nn.utils.parametrizations.spectral_norm(linear()),
        ).train(),
        matrix,
    ),
    "autocast": (lambda: Lambda(cast, a=linear()), matrix),
    "sparse": (lambda: Lambda(sparse), matrix),
    "inference mode inside": (lambda: Lambda(inference, a=linear()), matrix),
    "functional call": (lambda: Lambda(reweighted, a=linear()), matrix),
    "weight written": (lambda: Lambda(halved_weight, a=linear()), matrix),
    "state kept on the model": (
        lambda: Lambda(stateful, state=torch.zeros(4), seen=[]),
        matrix,
    ),
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_validation_passes(case: str, grad: bool) -> None:
    make, inputs = CASES[case]
    model, args = make(), inputs()
    plain = copy.deepcopy(model), copy.deepcopy(args)
    state = torch.get_rng_state()
    with torch.set_grad_enabled(grad):
        capture = captured(model, *args)
        torch.set_rng_state(state)
        expected = plain[0](*plain[1])
    report = validate_capture(capture)
    assert report and not report.skipped, str(report)
    assert capture.graph.complete, capture.graph.gaps
    first = expected if isinstance(expected, torch.Tensor) else expected[0]
    found = capture.output
    found = found if isinstance(found, torch.Tensor) else found[0]
    assert torch.allclose(first, found, atol=1e-6)


def test_validation_passes_twice_and_leaves_everything_alone(clean: Capture) -> None:
    capture = captured(Lambda(random_draws), *matrix())
    before = torch.get_rng_state()
    copies = {index: tensor.clone() for index, tensor in capture.payloads.items()}
    assert validate_capture(capture) and validate_capture(capture)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(capture.payloads[i], t) for i, t in copies.items())


@pytest.mark.filterwarnings("ignore")
def test_validation_passes_a_quantized_model() -> None:
    model = torch.ao.quantization.quantize_dynamic(
        nn.Sequential(linear(), nn.ReLU(), linear()), {nn.Linear}, dtype=torch.qint8
    )
    capture = captured(model, *matrix())
    report = validate_capture(capture)
    assert report and not report.skipped and capture.graph.complete


def test_vmapped_ops_have_edges_and_are_skipped() -> None:
    def vmapped(self, x):
        return torch.func.vmap(lambda row: self.a(row) * 2)(x + 1) - 1

    capture = captured(Lambda(vmapped, a=linear()), *matrix())
    graph = capture.graph
    assert [op.type for op in graph.ops] == ["add", "linear", "mul", "sub"]
    assert [op.parents for op in graph.ops] == [(0,), (1,), (2,), (3,)]
    assert graph.complete
    report = validate_capture(capture)
    assert report and len(report.skipped) == 3


def test_ops_in_another_thread_are_a_named_gap() -> None:
    def threaded(self, x):
        found: list[torch.Tensor] = []
        worker = threading.Thread(target=lambda: found.append(self.a(x)))
        worker.start()
        worker.join()
        return found[0] + 1

    capture = captured(Lambda(threaded, a=linear()), *matrix())
    assert not capture.graph.complete and not capture.graph.calls_of("a")
    assert [op.type for op in capture.graph.ops] == ["unknown", "add"]
    assert validate_capture(capture).skipped == (
        "unknown_1_1: its origin was not seen.",
    )

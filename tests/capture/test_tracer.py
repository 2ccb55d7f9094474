"""Tracing: payloads against plain hooks, and the model left as it was found."""

import gc
from dataclasses import dataclass

import numpy as np
import psutil
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchlens.errors import CaptureError, InputError, ModelError
from torchlens.model_access import unwrap_model
from torchlens.records import SiteKey
from torchlens.tracer import Capture, run_capture
from torchlens.validation import validate_capture


def trace_all(model: nn.Module, *args: object) -> Capture:
    return run_capture(model, args, {}, wanted=None)


def payload_of(capture: Capture, label: str) -> torch.Tensor:
    node = next(n for n in capture.graph.nodes if n.label == label)
    return capture.payloads[node.index]


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(4, 2, 3)

    def forward(self, x):
        return self.conv2(self.relu(self.conv1(x)))


def test_payload_is_the_value_before_an_in_place_op() -> None:
    model, x = Conv().eval(), torch.randn(2, 3, 8, 8)
    expected = model.conv1(x).clone()
    capture = trace_all(model, x)
    assert torch.equal(payload_of(capture, "conv2d_1_1"), expected)
    assert (payload_of(capture, "conv2d_1_1") < 0).any()
    assert torch.equal(payload_of(capture, "relu_1_2"), expected.relu())


def test_payload_keeps_autograd_unless_detached() -> None:
    model, x = nn.Linear(2, 2), torch.randn(1, 2)
    payload_of(trace_all(model, x), "linear_1_1").norm().backward()
    assert model.weight.grad is not None
    detached = run_capture(model, (x,), {}, wanted=None, detach=True)
    assert not payload_of(detached, "linear_1_1").requires_grad


def test_payload_of_a_parameter_view_survives_training() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 2))

        def forward(self, x):
            return x @ self.weight.t()

    model = Tied()
    capture = trace_all(model, torch.ones(1, 2))
    with torch.no_grad():
        model.weight.add_(5)
    assert torch.equal(payload_of(capture, "t_1_1"), torch.ones(2, 2))


def test_only_wanted_payloads_are_kept() -> None:
    model, x = Conv().eval(), torch.randn(2, 3, 8, 8)
    graph = run_capture(model, (x,), {}).graph
    key = graph.ops[1].key
    capture = run_capture(model, (x,), {}, wanted=frozenset({key}))
    assert list(capture.payloads) == [graph.ops[1].index]


def test_forward_stops_at_a_key() -> None:
    model, x = Conv().eval(), torch.randn(2, 3, 8, 8)
    key = SiteKey("module_output", "relu", 1)
    calls: list[str] = []
    model.conv2.register_forward_pre_hook(lambda *_: calls.append("conv2"))
    capture = run_capture(model, (x,), {}, stop_at=key)
    assert capture.graph.halted and capture.output is None and calls == []
    assert [op.label for op in capture.graph.ops] == ["conv2d_1_1", "relu_1_2"]


def test_model_is_left_as_found() -> None:
    model, x = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(), nn.Linear(3, 3)), None
    x = torch.randn(4, 3)
    model.train()
    model[2].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state, random_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    trace_all(model, x)
    assert [m.training for m in model] == [True, True, False]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert torch.equal(torch.get_rng_state(), state)
    assert (np.random.get_state()[1] == random_state).all()
    for module in model.modules():
        assert "forward" not in module.__dict__
        assert not module._forward_hooks and not module._forward_pre_hooks


def test_model_is_left_as_found_after_an_error() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(4, 4))
    depth = torch._C._len_torch_function_stack()
    with pytest.raises(InputError, match=r"module '1'.*float32 \[2, 3\] on cpu"):
        trace_all(model, torch.randn(2, 3))
    assert torch._C._len_torch_function_stack() == depth
    assert all("forward" not in m.__dict__ for m in model.modules())
    assert not model[0]._forward_hooks
    assert torch.nn.functional.has_torch_function(()) is False
    assert torch.backends.mha.get_fastpath_enabled()
    trace_all(model[0], torch.randn(2, 3))


def test_buffers_written_in_place_are_restored() -> None:
    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(3))

        def forward(self, x):
            self.cache[:] = x
            return self.cache * 2

    model = Cache().eval()
    capture = trace_all(model, torch.ones(3))
    assert torch.equal(model.cache, torch.zeros(3))
    assert torch.equal(payload_of(capture, "mul_1_2"), torch.full((3,), 2.0))
    assert validate_capture(capture)


def test_own_instance_forward_is_put_back() -> None:
    model = nn.Sequential(nn.ReLU())
    replacement = model[0].forward
    model[0].forward = replacement
    trace_all(model, torch.ones(1))
    assert model[0].__dict__["forward"] is replacement


def test_direct_forward_calls_are_module_calls() -> None:
    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x):
            return self.fc.forward(x) + self.fc(x)

    graph = trace_all(Direct(), torch.randn(1, 2)).graph
    assert [call.direct for call in graph.calls_of("fc")] == [True, False]
    assert all(call.outputs for call in graph.calls_of("fc"))


def test_module_output_is_what_user_hooks_return() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model[0].register_forward_hook(lambda module, args, output: output * 0)
    graph = trace_all(model, torch.randn(1, 2)).graph
    call = graph.calls_of("0")[0]
    assert graph.nodes[call.outputs[0].node].type == "mul"
    assert graph.nodes[graph.ops[-1].parents[0]].type == "mul"


@dataclass
class Pair:
    first: torch.Tensor
    rest: dict[str, torch.Tensor]


def test_structured_outputs_have_paths() -> None:
    class Inner(nn.Module):
        def forward(self, x):
            return Pair(x + 1, {"a": x + 2, "b": x + 3}), None, [x + 4]

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            pair, _, rest = self.inner(x)
            return pair.first + pair.rest["a"] + rest[0]

    graph = trace_all(Outer(), torch.zeros(1)).graph
    call = graph.calls_of("inner")[0]
    assert [leaf.path for leaf in call.outputs] == [
        (0, ".first"),
        (0, ".rest", "a"),
        (0, ".rest", "b"),
        (2, 0),
    ]
    names = [graph.output_site(call, leaf).name for leaf in call.outputs]
    assert names[1] == 'inner[0].rest["a"]'


def test_tied_modules_are_one_record_with_aliases() -> None:
    model = nn.Module()
    model.a = nn.Linear(2, 2)
    model.b = model.a
    model.forward = lambda x: model.b(model.a(x))  # type: ignore[method-assign]
    graph = trace_all(model, torch.randn(1, 2)).graph
    assert graph.module_at("b") is graph.module_at("a")
    assert graph.modules["a"].aliases == ("b",)
    assert graph.params["a.weight"].aliases == ("b.weight",)
    assert len(graph.calls_of("b")) == 2


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_blocks_are_seen_once(use_reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(3, 3), nn.Tanh())

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=use_reentrant) * 2

    model, x = Checkpointed(), torch.randn(2, 3, requires_grad=True)
    capture = trace_all(model, x)
    ops = [op.type for op in capture.graph.ops]
    assert ops.count("linear") == 1 and ops.count("tanh") == 1
    assert torch.equal(payload_of(capture, "tanh_1_2"), model.block(x))
    payload_of(capture, capture.graph.ops[-1].label).sum().backward()
    assert capture.graph.complete


def test_ops_inside_a_custom_autograd_function_are_seen() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    class Model(nn.Module):
        def forward(self, x):
            return Double.apply(x) + 1

    graph = trace_all(Model(), torch.ones(2, requires_grad=True)).graph
    assert [op.type for op in graph.ops] == ["mul", "add"]
    assert graph.ops[1].parents == (graph.ops[0].index,)


@pytest.mark.parametrize("grad", [True, False])
def test_attention_is_expanded_alike_with_and_without_grad(grad: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    x = torch.randn(2, 5, 8)
    with torch.set_grad_enabled(grad):
        capture = trace_all(layer, x)
        expected = layer(x)
    types = [op.type for op in capture.graph.ops]
    assert "scaleddotproductattention" in types and len(types) > 25
    assert torch.allclose(capture.output, expected, atol=1e-6)
    assert validate_capture(capture)


def test_compiled_modules_are_captured_from_their_own_code() -> None:
    torch._dynamo.reset()
    inner = torch.compile(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), backend="eager")
    model = nn.Sequential(inner, nn.Linear(3, 3)).eval()
    x = torch.randn(2, 3)
    with torch.no_grad():
        expected = model(x)
        capture = trace_all(model, x)
    assert [op.type for op in capture.graph.ops] == ["linear", "relu", "linear"]
    assert torch.allclose(capture.output, expected)
    whole = unwrap_model(torch.compile(model, backend="eager"))
    assert whole is model


def test_numpy_round_trip_makes_the_trace_incomplete() -> None:
    class Numpy(nn.Module):
        def forward(self, x):
            return torch.from_numpy(x.numpy() + 1) * 2

    capture = trace_all(Numpy(), torch.ones(2))
    assert torch.equal(capture.output, torch.full((2,), 4.0))
    assert not capture.graph.complete
    assert "module call 'self:1'" in capture.graph.gaps[0]
    assert [op.type for op in capture.graph.ops] == ["unknown", "mul"]
    assert capture.graph.ops[0].parents == ()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_script_submodule_makes_the_trace_incomplete() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scripted = torch.jit.script(nn.Sigmoid())

        def forward(self, x):
            return self.scripted(x) + 1

    graph = trace_all(Hidden(), torch.ones(2)).graph
    assert not graph.complete and "'self:1'" in graph.gaps[0]
    assert [op.type for op in graph.ops] == ["unknown", "add"]
    assert graph.ops[0].parents == ()


def test_plain_tensor_attributes_are_buffers_not_ops() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.tensor(3.0)
            self.norm = nn.BatchNorm1d(2)

        def forward(self, x):
            return self.norm(x) * self.scale

    graph = trace_all(Scaled().eval(), torch.randn(3, 2)).graph
    assert [op.type for op in graph.ops] == ["batchnorm", "mul"]
    assert graph.ops[0].buffers == ("norm.running_mean", "norm.running_var")
    assert graph.ops[1].buffers == ("scale",)
    assert [b.label for b in graph.buffers.values()] == [
        f"buffer_{k}" for k in range(1, 5)
    ]


def test_reads_through_another_name_depend_on_the_write() -> None:
    class Alias(nn.Module):
        def forward(self, x):
            y = x * 1
            y[0].mul_(2)
            return y + 0

    model = Alias()
    capture = trace_all(model, torch.ones(2))
    graph = capture.graph
    assert [graph.nodes[p].type for p in graph.ops[-1].parents] == ["mul", "mul"]
    assert torch.equal(payload_of(capture, "mul_1_1"), torch.ones(2))
    assert validate_capture(capture)


def test_same_input_twice_is_one_node() -> None:
    class Two(nn.Module):
        def forward(self, a, b):
            return a + b

    x = torch.ones(1)
    assert len(trace_all(Two(), x, x).graph.inputs) == 1


def test_source_lines_point_into_the_model() -> None:
    graph = trace_all(Conv().eval(), torch.randn(1, 3, 8, 8)).graph
    frame = graph.frames(graph.ops[0])[-1]
    assert frame.file == __file__ and "forward" in frame.function
    with open(__file__) as lines:
        assert "self.conv2(self.relu(self.conv1(x)))" in list(lines)[frame.line - 1]


def test_costs_of_known_ops() -> None:
    graph = trace_all(Conv().eval(), torch.randn(2, 3, 8, 8)).graph
    conv, relu, _ = graph.ops
    outputs = 2 * 4 * 6 * 6
    assert conv.flops == 2 * outputs * 3 * 9 + outputs
    assert conv.macs == conv.flops // 2
    assert relu.flops == outputs and conv.spec.nbytes == 4 * outputs


def test_captures_do_not_nest() -> None:
    class Nested(nn.Module):
        def forward(self, x):
            trace_all(nn.ReLU(), x)
            return x + 1

    with pytest.raises(CaptureError, match="Captures do not nest"):
        trace_all(Nested(), torch.ones(1))


def test_model_that_returns_nothing_is_an_error() -> None:
    class Silent(nn.Module):
        def forward(self, x):
            x + 1

    with pytest.raises(CaptureError, match="returned NoneType without any tensor"):
        trace_all(Silent(), torch.ones(1))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_things_that_are_no_models_are_refused() -> None:
    with pytest.raises(ModelError, match="an object of type 'int' came"):
        unwrap_model(3)
    with pytest.raises(ModelError, match="the class 'ReLU' came"):
        unwrap_model(nn.ReLU)
    with pytest.raises(ModelError, match="TorchScript"):
        unwrap_model(torch.jit.script(nn.ReLU()))
    with pytest.raises(ModelError, match=r"Pass model\.module"):
        unwrap_model(nn.DataParallel(nn.ReLU()))
    with pytest.raises(ModelError, match="'weight' of Linear lies on the meta"):
        unwrap_model(nn.Linear(2, 2, device="meta"))


def test_traces_leave_no_cycles() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256)) for _ in range(4)])
    x = torch.randn(256, 256)
    process = psutil.Process()
    gc.collect()
    gc.disable()
    try:
        sizes = []
        for step in range(200):
            trace_all(model, x)
            if step in (20, 199):
                sizes.append(process.memory_info().rss)
    finally:
        gc.enable()
    # One trace holds 1 MB; a leak of every trace would be 180 MB.
    assert sizes[1] - sizes[0] < 10e6

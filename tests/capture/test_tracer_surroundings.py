"""Tracing models with hooks, state, errors inside, other modes, other threads."""

import gc
import threading
import warnings
from collections.abc import Callable, Iterator

import psutil
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchlens.errors import ModelError
from torchlens.graph import Graph
from torchlens.model_access import unwrap_model
from torchlens.tracer import Capture, run_capture
from torchlens.validation import validate_capture


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other make small ops slow on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
    capture = run_capture(model, args, {}, wanted=None)
    report = validate_capture(capture)
    assert report, str(report)
    return capture


def types_of(graph: Graph) -> list[str]:
    return [op.type for op in graph.ops]


def output_type(graph: Graph, address: str) -> str:
    return graph.nodes[graph.calls_of(address)[0].outputs[0].node].type


def test_ops_of_user_hooks_belong_to_the_module_they_hang_on() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    seen: list[object] = []
    model.register_forward_pre_hook(lambda module, args: (args[0] * 3,))
    model.register_forward_hook(lambda module, args, output: output.exp())
    model[0].register_forward_pre_hook(lambda module, args: (args[0] - 1,))
    model[0].register_forward_hook(lambda module, args, output: output / 2)
    model[1].register_forward_hook(lambda module, args, output: seen.append(output))
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    x = torch.randn(2, 4)
    expected = model(x)
    capture = captured(model, x)
    graph = capture.graph
    assert torch.equal(capture.output, expected)
    assert types_of(graph) == ["mul", "sub", "linear", "truediv", "relu", "exp"]
    assert [op.parents for op in graph.ops] == [(i,) for i in range(6)]
    assert output_type(graph, "0") == "truediv" and output_type(graph, "self") == "exp"
    assert graph.calls_of("0")[0].inputs[0].node == 2
    owners = [graph.module_calls[op.module_call].address for op in graph.ops]
    assert owners == ["self", "self", "0", "0", "1", "self"]
    assert hooks == [
        len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()
    ]


def test_call_sites_of_hooks_do_not_depend_on_who_traces() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model.register_forward_pre_hook(lambda module, args: (args[0] * 3,))

    def elsewhere() -> Graph:
        return captured(model, torch.randn(2, 4)).graph

    here = captured(model, torch.randn(2, 4)).graph
    assert [op.key for op in here.ops] == [op.key for op in elsewhere().ops]


def test_a_hook_that_raises_closes_the_call() -> None:
    def refuse(module: object, args: object, output: object) -> None:
        raise ValueError("refused")

    def forward(self, x):
        try:
            x = self.first(x)
        except ValueError:
            x = x + 1
        return self.second(x)

    model = Lambda(forward, first=nn.Linear(4, 4), second=nn.Linear(4, 4))
    model.first.register_forward_hook(refuse)
    graph = captured(model, torch.randn(2, 4)).graph
    assert types_of(graph) == ["linear", "add", "linear"]
    assert [graph.module_calls[op.module_call].address for op in graph.ops] == [
        "first",
        "self",
        "second",
    ]


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fits = nn.Linear(4, 4)
        self.breaks = nn.Linear(9, 9)

    def forward(self, x):
        return self.breaks(self.fits(x))


def test_calls_unwind_when_the_model_catches_an_error_of_a_part() -> None:
    def forward(self, x):
        try:
            x = self.fragile(x)
        except RuntimeError:
            x = self.safe(x)
        return self.safe(x)

    model = Lambda(forward, fragile=Fragile(), safe=nn.Linear(4, 4))
    graph = captured(model, torch.randn(2, 4)).graph
    calls = {call.label: call for call in graph.module_calls}
    assert list(calls) == [
        "self:1",
        "fragile:1",
        "fragile.fits:1",
        "fragile.breaks:1",
        "safe:1",
        "safe:2",
    ]
    assert calls["safe:1"].parent == calls["self:1"].index
    assert not calls["fragile:1"].outputs and not calls["fragile.breaks:1"].outputs
    assert calls["fragile:1"].end_node == calls["safe:1"].first_node == 2
    assert graph.complete


def test_one_module_called_again_and_again_has_numbered_calls() -> None:
    def forward(self, x):
        return self.parts[0](self.parts[1](self.parts[0](self.parts[0](x))))

    parts = nn.ModuleList([nn.Linear(4, 4), nn.ReLU()])
    graph = captured(Lambda(forward, parts=parts), torch.randn(2, 4)).graph
    assert [call.call_index for call in graph.calls_of("parts.0")] == [1, 2, 3]
    assert [op.label for op in graph.ops] == [
        "linear_1_1:1",
        "linear_1_1:2",
        "relu_1_2",
        "linear_1_1:3",
    ]


def test_containers_of_modules_and_parameters() -> None:
    class Contained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps = nn.ModuleDict({"fc": nn.Linear(4, 4), "act": nn.ReLU()})
            self.scales = nn.ParameterList([torch.ones(4), torch.ones(4)])
            self.shifts = nn.ParameterDict({"last": torch.ones(4)})

        def forward(self, x):
            for step in self.steps.values():
                x = step(x)
            for scale in self.scales:
                x = x * scale
            return x + self.shifts["last"]

    graph = captured(Contained(), torch.randn(2, 4)).graph
    assert [op.params for op in graph.ops] == [
        ("steps.fc.weight", "steps.fc.bias"),
        (),
        ("scales.0",),
        ("scales.1",),
        ("shifts.last",),
    ]


def test_parametrized_weights_are_ops_inside_the_module() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
    graph = captured(model, torch.randn(2, 4)).graph
    assert types_of(graph) == ["weightnorm", "linear"] and graph.complete
    assert graph.ops[1].parents == (0, graph.ops[0].index)
    assert graph.params["0.parametrizations.weight.original1"].used_by


def test_tied_weights_of_a_language_model_are_one_parameter() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=32,
        n_positions=8,
        n_embd=8,
        n_layer=1,
        n_head=2,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    graph = captured(model, torch.randint(0, 32, (1, 4))).graph
    tied = graph.params["transformer.wte.weight"]
    assert tied.aliases == ("lm_head.weight",) and "lm_head.weight" not in graph.params
    assert [graph.nodes[i].type for i in tied.used_by] == ["embedding", "linear"]


def test_functional_call_uses_the_given_weights() -> None:
    def forward(self, x):
        doubled = {"weight": self.fc.weight * 2, "bias": self.fc.bias}
        return torch.func.functional_call(self.fc, doubled, (x,))

    model, x = Lambda(forward, fc=nn.Linear(4, 4)), torch.randn(2, 4)
    capture = captured(model, x)
    assert types_of(capture.graph) == ["mul", "linear"]
    assert capture.graph.ops[1].parents == (0, 1)
    assert capture.graph.calls_of("fc")
    assert torch.allclose(
        capture.output, F.linear(x, model.fc.weight * 2, model.fc.bias)
    )


def test_autocast_is_seen_in_the_dtypes() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)), torch.randn(2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        capture = run_capture(model, (x,), {}, wanted=None)
    assert [op.spec.dtype for op in capture.graph.ops] == ["bfloat16", "bfloat16"]
    assert validate_capture(capture)
    with torch.autocast("cpu", dtype=torch.float16):
        assert validate_capture(capture), "validation must not follow what is on now"


@pytest.mark.parametrize("default", [True, False])
def test_device_contexts_change_no_label_and_no_key(default: bool) -> None:
    def forward(self, x):
        x += torch.ones(4)
        return x / 2

    model = Lambda(forward)
    plain = captured(model, torch.randn(2, 4)).graph
    if default:
        torch.set_default_device("cpu")
    try:
        with torch.device("cpu"):
            inside = captured(model, torch.randn(2, 4)).graph
    finally:
        if default:
            torch.set_default_device(None)
    assert types_of(plain) == ["ones", "iadd", "truediv"] == types_of(inside)
    assert [op.key for op in plain.ops] == [op.key for op in inside.ops]


def test_operators_are_spelled_inside_a_device_context() -> None:
    def forward(self, x):
        with torch.device("cpu"):
            x += torch.ones(4)
            return x / 2

    graph = captured(Lambda(forward), torch.randn(2, 4)).graph
    assert types_of(graph) == ["ones", "iadd", "truediv"]


def test_generators_held_by_a_model_are_left_as_found() -> None:
    source = torch.Generator().manual_seed(3)
    model = Lambda(lambda self, x: x + torch.rand(4, generator=source))
    before = source.get_state()
    expected = captured(model, torch.zeros(4)).output
    assert torch.equal(source.get_state(), before)
    assert torch.equal(model(torch.zeros(4)), expected)


def test_attributes_and_containers_of_the_model_are_left_as_found() -> None:
    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))
            self.fc = nn.Linear(4, 4)
            self.steps, self.seen, self.cache = 0, ["start"], {"a": torch.ones(4)}
            self.fc.extra = None

        def forward(self, x):
            self.mean = self.mean * 0.5 + x.mean(0)
            self.steps += 1
            self.seen.append(x)
            self.cache["b"] = x
            self.cache["a"] = x + self.cache["a"]
            self.fc.extra = self.late = x
            with torch.no_grad():
                self.fc.weight.mul_(0.5)
            return self.fc(x + self.mean) + len(self.cache)

    model, x = Stateful(), torch.randn(2, 4)
    mean, cached, weight = model.mean, model.cache["a"], model.fc.weight.clone()
    names = list(vars(model))
    capture = captured(model, x)
    assert model.mean is mean and torch.equal(mean, torch.zeros(4))
    assert model.steps == 0 and model.seen == ["start"]
    assert list(model.cache) == ["a"] and model.cache["a"] is cached
    assert model.fc.extra is None and list(vars(model)) == names
    assert torch.equal(model.fc.weight, weight)
    assert torch.equal(model(x), capture.output)


def test_hooks_that_a_forward_hangs_on_its_parts_are_taken_off_again() -> None:
    def forward(self, x):
        if not self.hooked:
            self.fc.register_forward_hook(lambda module, args, output: output * 2)
            self.hooked = True
        return self.fc(x)

    model, x = Lambda(forward, fc=nn.Linear(4, 4), hooked=False), torch.randn(2, 4)
    first, second = captured(model, x), captured(model, x)
    assert not model.fc._forward_hooks and not model.hooked
    assert types_of(first.graph) == types_of(second.graph) == ["linear", "mul"]
    assert torch.equal(model(x), first.output)


def test_output_written_through_a_view_is_an_op_with_the_final_value() -> None:
    def forward(self, x):
        y = x * 1
        y[0].zero_()
        return y

    capture = captured(Lambda(forward), torch.ones(2, 2))
    graph = capture.graph
    assert types_of(graph) == ["mul", "getitem", "zero", "identity"]
    assert graph.ops[3].parents == (1, 3)
    leaf = graph.module_calls[0].outputs[0]
    expected = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    assert torch.equal(capture.payloads[leaf.node], expected)
    assert torch.equal(capture.payloads[1], torch.ones(2, 2))


def test_input_written_through_a_view_is_an_op_with_the_value_then() -> None:
    def forward(self, x):
        y = x * 1
        y[0].zero_()
        return self.act(y)

    capture = captured(Lambda(forward, act=nn.ReLU()), torch.ones(2, 2))
    leaf = capture.graph.calls_of("act")[0].inputs[0]
    assert capture.graph.nodes[leaf.node].type == "identity"
    assert capture.payloads[leaf.node].sum() == 2


def test_reads_of_a_buffer_written_through_a_view_depend_on_the_write() -> None:
    def forward(self, x):
        self.cache[0].copy_(x)
        return self.cache * 2

    model = Lambda(forward, cache=torch.zeros(2, 3))
    graph = captured(model, torch.ones(3)).graph
    assert types_of(graph) == ["getitem", "copy", "mul"]
    assert graph.ops[2].parents == (graph.ops[1].index,)
    assert graph.ops[2].buffers == ("cache",)
    assert torch.equal(model.cache, torch.zeros(2, 3))


def test_a_write_that_nobody_saw_is_a_gap_in_the_structure_too() -> None:
    class Dirty(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.mark_dirty(x)
            return x

        @staticmethod
        def backward(ctx, grad):
            return grad

    model = Lambda(lambda self, x: Dirty.apply(x * 1) + 1)
    graph = run_capture(model, (torch.randn(2, requires_grad=True),), {}).graph
    assert not graph.complete and "was written by code" in graph.gaps[0]
    assert types_of(graph) == ["mul", "unknown", "add"]
    assert graph.ops[1].parents == (graph.ops[0].index,)


def test_custom_ops_that_write_their_arguments_are_seen_as_writes() -> None:
    @torch.library.custom_op("torchlens_tests::bump", mutates_args=["x"])
    def bump(x: torch.Tensor, y: torch.Tensor) -> None:
        x.add_(y)

    def forward(self, x):
        y = x * 1
        bump(y, x)
        return y * 3 + torch.ops.aten.relu.default(x)

    capture = captured(Lambda(forward), torch.ones(2))
    graph = capture.graph
    assert types_of(graph) == ["mul", "bump", "mul", "relu", "add"]
    assert graph.ops[1].inplace and graph.ops[2].parents == (graph.ops[1].index,)
    assert torch.equal(capture.payloads[graph.ops[0].index], torch.ones(2))


def test_ragged_tensors_have_no_size_where_they_are_ragged() -> None:
    def forward(self, x):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.nested.nested_tensor([x[0], x[1, :2]]).to_padded_tensor(0.0)

    graph = run_capture(Lambda(forward), (torch.ones(2, 3),), {}).graph
    shapes = [op.spec.shape for op in graph.ops]
    assert (2, -1) in shapes and shapes[-1] == (2, 3)


def test_calls_from_another_thread_are_left_alone() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4)
    found: list[torch.Tensor] = []

    def beside(self, x):
        worker = threading.Thread(target=lambda: found.append(model(x)))
        worker.start()
        worker.join()
        return self.model(x)

    graph = captured(Lambda(beside, model=model), x).graph
    assert types_of(graph) == ["linear", "relu"]
    assert [call.label for call in graph.module_calls] == [
        "self:1",
        "model:1",
        "model.0:1",
        "model.1:1",
    ]
    assert torch.equal(found[0], model(x))


def test_captures_in_threads_take_turns() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    models = [layer, nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()]
    x = torch.randn(2, 3, 8)
    expected = types_of(run_capture(layer, (x,), {}).graph)
    found: list[list[str]] = []

    def work(model: nn.Module) -> None:
        for _ in range(10):
            found.append(types_of(run_capture(model, (x,), {}).graph))

    workers = [threading.Thread(target=work, args=(model,)) for model in models]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert found == [expected] * 20
    assert torch.backends.mha.get_fastpath_enabled()
    assert not F.has_torch_function((x,))


def test_lazy_modules_are_refused_before_their_first_forward() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ModelError, match=r"'0\.weight' of Sequential has no shape yet"):
        unwrap_model(model)
    model(torch.randn(2, 4))
    assert types_of(captured(unwrap_model(model), torch.randn(2, 4)).graph) == [
        "linear"
    ]


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(128, 128) for _ in range(3))

    def forward(self, x):
        for part in self.parts:
            x = part(x).relu_()
            x += 1
            x[0] = 0
        return x


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.TransformerEncoderLayer(64, 4, 64, batch_first=True), (4, 64, 64)),
        (InPlace, (512, 128)),
    ],
    ids=["attention", "in-place"],
)
def test_traces_are_freed_without_the_collector(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    model, x = make().eval(), torch.randn(shape)
    process = psutil.Process()
    held = sum(
        tensor.nbytes
        for tensor in run_capture(model, (x,), {}, wanted=None).payloads.values()
    )
    gc.collect()
    gc.disable()
    try:
        sizes = []
        for step in range(200):
            run_capture(model, (x.clone(),), {}, wanted=None)
            if step in (40, 199):
                sizes.append(process.memory_info().rss)
        garbage = gc.collect()
    finally:
        gc.enable()
    assert sizes[1] - sizes[0] < 0.2 * 160 * held
    assert garbage < 200 * 20

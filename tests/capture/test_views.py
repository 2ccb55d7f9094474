"""A trace as the user indexes it: keys, views, payloads, memory."""

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from torchlens.errors import CaptureError, SelectorError
from torchlens.layer_views import Layer
from torchlens.module_views import Module
from torchlens.op_views import Op
from torchlens.selectors import everything, func, module, module_input
from torchlens.tensor_views import Buffer, Param
from torchlens.tracer import run_capture
from torchlens.views import Trace


class Net(nn.Module):
    """A norm, a layer applied three times, an LSTM, a tied head, a list, an orphan."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.step = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.lstm = nn.LSTM(4, 3, batch_first=True)
        self.head = nn.Linear(3, 3, bias=False)
        self.twin = self.head
        self.parts = nn.ModuleList([nn.Identity()])
        self.orphan = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for _ in range(3):
            x = self.step(x)
        hidden, _ = self.lstm(x[:, None])
        return self.parts[0](self.head(hidden[:, -1]))


LABELS = [
    "input_1",
    "batchnorm_1_1",
    *["linear_1_2:1", "relu_1_3:1"],
    *["linear_1_2:2", "relu_1_3:2"],
    *["linear_1_2:3", "relu_1_3:3"],
    "getitem_1_4",
    *["zeros_1_5", "zeros_2_6"],
    *["lstm_1_7", "lstm_2_8", "lstm_3_9"],
    "getitem_2_10",
    "linear_2_11",
    "identity_1_12",
    "output_1",
]


def make_trace(keep: bool = True) -> Trace:
    torch.manual_seed(0)
    wanted = None if keep else frozenset[object]()
    return Trace(run_capture(Net().eval(), (torch.randn(2, 4),), {}, wanted=wanted))  # type: ignore[arg-type]  # empty


@pytest.fixture(scope="module")
def trace() -> Trace:
    return make_trace()


def test_trace_is_a_sequence_of_nodes_with_boundaries(trace: Trace) -> None:
    assert [op.label for op in trace] == LABELS
    assert len(trace) == len(LABELS)
    assert [trace[number].label for number in range(len(trace))] == LABELS
    assert (trace[-1].label, trace[-2].label) == ("output_1", "identity_1_12")
    assert [op.label for op in trace[1:3]] == LABELS[1:3]
    assert [op.label for op in trace[::-1]] == LABELS[::-1]
    assert trace[5:5] == ()


def test_ops_and_layers_leave_out_boundaries(trace: Trace) -> None:
    assert list(trace.ops.keys()) == LABELS[1:-1]
    assert [op.label for op in trace.ops] == LABELS[1:-1]
    layers = list(dict.fromkeys(label.split(":")[0] for label in LABELS[1:-1]))
    assert list(trace.layers.keys()) == layers
    assert [layer.num_passes for layer in trace.layers] == [1, 3, 3, *[1] * 9]


@pytest.mark.parametrize(
    ("key", "kind", "label"),
    [
        ("batchnorm_1_1", Layer, "batchnorm_1_1"),
        ("batchnorm_1", Layer, "batchnorm_1_1"),
        ("batchnorm_1:1", Op, "batchnorm_1_1"),
        ("linear_1_2", Layer, "linear_1_2"),
        ("linear_1_2:2", Op, "linear_1_2:2"),
        ("linear_1:3", Op, "linear_1_2:3"),
        ("input_1", Layer, "input_1"),
        ("output_1", Layer, "output_1"),
        ("buffer_2", Buffer, "buffer_2"),
        ("norm", Module, "batchnorm_1_1"),
        ("step:2", Module, "relu_1_3:2"),
        ("lstm[1][0]", Module, "lstm_2_8"),
        ("lstm:1[0]", Module, "lstm_1_7"),
        ("twin", Module, "linear_2_11"),
        ("self", Module, "identity_1_12"),
        (func("batch_norm"), Op, "batchnorm_1_1"),
        (module("norm"), Module, "batchnorm_1_1"),
        (module("step:2"), Module, "relu_1_3:2"),
        (module_input("head"), Op, "getitem_2_10"),
        (func("lstm", output=1), Op, "lstm_2_8"),
    ],
    ids=str,
)
def test_key_gives_this_kind_of_view(
    trace: Trace, key: str, kind: type, label: str
) -> None:
    view = trace[key]
    assert type(view) is kind
    assert view.label == label
    assert key in trace


def test_last_module_resolves_beside_the_output_node(trace: Trace) -> None:
    for name in ("head", "twin", "parts.0"):
        found = trace[name]
        assert isinstance(found, Module) and found.num_calls == 1
    assert torch.equal(trace["parts.0"].out, trace.output)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (18, r"no node 18: this trace has 18, from 0 \('input_1'\) to 17 \('output_1'"),
        (-19, "There is no node -19"),
        (True, "A trace is indexed with a number.*not bool True"),
        (None, "A trace is indexed with.*not NoneType"),
        (1.0, "A trace is indexed with.*not float"),
        ("nor", "has no layer 'nor'.*parts of names do not count. Nearest: 'norm'"),
        ("step.2", "Nearest: 'step.0', 'step.1'"),
        ("step:4", "'step' was called 3 times"),
        ("lstm[2]", r"no tensor at \[2\]"),
        ("linear_1:4", "linear_1_2 has 3 passes"),
        ("buffer_9", "no buffer 'buffer_9'"),
        (func("linear"), r"picks 4 sites: 'linear_1_2:1'.*trace\[\.\.\.\] gives one"),
        (func("gelu"), "No site of Net matches"),
        (module("step"), "picks 3 sites: 'step:1', 'step:2', 'step:3'"),
    ],
    ids=str,
)
def test_key_that_names_nothing_or_several_is_refused(
    trace: Trace, key: str, message: str
) -> None:
    with pytest.raises(SelectorError, match=message):
        trace[key]
    assert key not in trace


def test_payloads_equal_what_hooks_see() -> None:
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(2, 4)
    seen: dict[str, list[Tensor]] = {}
    handles = [
        child.register_forward_hook(
            lambda _, __, result, name=name: seen.setdefault(name, []).append(
                result.clone()
            )
        )
        for name, child in model.named_modules()
        if name not in ("", "lstm")
    ]
    model(x)
    for handle in handles:
        handle.remove()
    trace = Trace(run_capture(model, (x,), {}, wanted=None))
    for name, values in seen.items():
        for number, value in enumerate(values, 1):
            assert torch.equal(trace[f"{name}:{number}"].out, value), (name, number)
    assert torch.equal(trace["input_1"].out, x)


def test_op_view_shows_its_facts(trace: Trace) -> None:
    op = trace["linear_1_2:2"]
    assert isinstance(op, Op)
    assert (op.type, op.func_name, op.layer_label) == ("linear", "linear", "linear_1_2")
    assert (op.pass_index, op.num_passes) == (2, 3)
    assert (op.shape, op.dtype, op.device) == (
        (2, 4),
        torch.float32,
        torch.device("cpu"),
    )
    assert op.nbytes == 2 * 4 * 4
    assert op.out.shape == op.shape and op.is_saved
    assert (op.parents, op.children) == (("relu_1_3:1",), ("relu_1_3:2",))
    assert (op.module, op.module_call) == ("step.0", "step.0:2")
    assert op.module_calls == ("self:1", "step:2", "step.0:2")
    assert op.params == ("step.0.weight", "step.0.bias") and op.buffers == ()
    assert op.flops_forward == 2 * op.macs_forward >= 2 * 2 * 4 * 4
    assert op.duration_seconds > 0
    assert not op.is_inplace and not op.is_view and op.requires_grad
    frame = op.source.frames[-1]
    assert frame.file == __file__ and frame.function.endswith("forward")
    assert op.source.text == "x = self.step(x)"
    lstm = trace["lstm_2_8"]
    assert (lstm.output_index, lstm.output_path) == (1, (1,))
    assert trace["batchnorm_1"].buffers == ("norm.running_mean", "norm.running_var")


def test_printed_op_is_a_page_one_fact_a_line(trace: Trace) -> None:
    lines = str(trace["linear_1_2:2"]).splitlines()
    facts = {line[2:12].strip(): line[12:].strip() for line in lines[1:]}
    assert lines[0] == "Op linear_1_2:2"
    assert facts["output"] == "[2, 4] float32 on cpu"
    assert facts["call"] == "linear(relu_1_3:1, step.0.weight, step.0.bias)"
    assert facts["module"] == "self:1 > step:2 > step.0:2"
    assert (facts["parents"], facts["children"]) == ("relu_1_3:1", "relu_1_3:2")
    assert facts["pass"] == "2 of 3" and "FLOPs" in facts["cost"]
    assert facts["source"].endswith("x = self.step(x)")
    assert repr(trace[0]) == "<Op input_1 [2, 4] float32 of the model>"
    assert repr(trace[1]) == "<Op batchnorm_1_1 [2, 4] float32 in norm:1>"


def test_layer_with_one_pass_has_what_its_op_has(trace: Trace) -> None:
    layer = trace["batchnorm_1"]
    assert isinstance(layer, Layer)
    assert layer.out is trace["batchnorm_1:1"].out
    assert (layer.shape, layer.module) == ((2, 4), "norm")
    assert layer.ops == (trace["batchnorm_1:1"],)
    assert str(layer) == str(layer.op)


def test_layer_with_several_passes_asks_which(trace: Trace) -> None:
    layer = trace["linear_1"]
    assert isinstance(layer, Layer)
    assert [op.label for op in layer.ops] == LABELS[2:8:2]
    assert len(layer) == layer.num_passes == 3
    assert layer.params == ("step.0.weight", "step.0.bias")
    message = "'linear_1_2' ran 3 times. Choose a pass: 'linear_1_2:1', 'linear_1_2:2'"
    with pytest.raises(SelectorError, match=message):
        layer.out  # noqa: B018
    assert "3 passes" in repr(layer) and str(layer).count("\n") == 3


def test_module_view_shows_its_facts(trace: Trace) -> None:
    step = trace.modules["step"]
    assert (step.address, step.aliases, step.type_name) == ("step", (), "Sequential")
    assert step.num_calls == len(step.calls) == 3
    assert [call.out is trace[f"step:{k}"].out for k, call in enumerate(step.calls, 1)]
    assert [op.label for op in step.ops] == LABELS[2:8]
    assert [op.label for op in step.calls[1].ops] == LABELS[4:6]
    assert (step.num_ops, step.calls[0].num_ops) == (6, 2)
    assert step.total_flops_forward == sum(op.flops_forward for op in step.ops)
    assert step.total_flops_forward == 3 * step.calls[0].total_flops_forward
    assert step.num_params == 4 * 4 + 4 and step.params == ()
    assert step.calls[1].parents == ("linear_1_2:2",)
    assert list(step.calls[1].inputs.values()) == [trace["relu_1_3:1"]]
    assert step.duration_seconds > 0
    assert repr(step) == "<Module step (Sequential), 3 calls>"
    assert "output    step:3 [2, 4] float32 by relu_1_3:3" in str(step)


def test_module_with_several_outputs_asks_which(trace: Trace) -> None:
    lstm = trace["lstm"]
    assert isinstance(lstm, Module)
    assert list(lstm.outputs) == ["lstm[0]", "lstm[1][0]", "lstm[1][1]"]
    message = r"'lstm' has 3 output tensors. Choose one: 'lstm\[0\]', 'lstm\[1\]\[0\]'"
    with pytest.raises(SelectorError, match=message):
        lstm.out  # noqa: B018
    with pytest.raises(SelectorError, match="'step' has 3 output tensors.*'step:2'"):
        trace["step"].shape  # noqa: B018
    assert trace["lstm[1][0]"].shape == (1, 2, 3)


def test_module_that_was_not_called_has_no_output(trace: Trace) -> None:
    for name in ("orphan", "parts"):
        view = trace[name]
        assert isinstance(view, Module) and view.num_calls == view.num_ops == 0
        with pytest.raises(SelectorError, match=f"'{name}'.*was never called"):
            view.out  # noqa: B018


def test_tied_module_is_found_by_both_names(trace: Trace) -> None:
    assert trace["twin"].address == "head" and trace["head"].aliases == ("twin",)
    assert torch.equal(trace["twin"].out, trace["head"].out)
    assert trace["twin"].name == "twin"
    assert "also twin" in str(trace["head"])


def test_lists_are_indexed_by_number_name_and_slice(trace: Trace) -> None:
    assert len(trace.modules) == 10 and trace.modules[0].address == "self"
    assert trace.modules["twin"].address == "head"
    assert "twin" in trace.modules and "nope" not in trace.modules
    assert [view.address for view in trace.modules[1:3]] == ["norm", "step"]
    assert trace.ops[-1].label == "identity_1_12" and trace.ops["lstm_1"] in trace.ops
    assert trace.layers["linear_1"].num_passes == 3
    assert dict(trace.ops.items())["zeros_1_5"].shape == (1, 2, 3)
    assert len(trace.ops.values()) == len(trace.ops)
    assert repr(trace.layers).startswith("<12: 'batchnorm_1_1', 'linear_1_2'")
    with pytest.raises(IndexError):
        trace.ops[99]
    with pytest.raises(SelectorError, match="Net has no module 'steps'. Nearest: 'st"):
        trace.modules["steps"]
    with pytest.raises(SelectorError, match="Net has no op labelled 'norm'"):
        trace.ops["norm"]
    with pytest.raises(SelectorError, match="'linear_1_2' ran 3 times"):
        trace.ops["linear_1"]
    with pytest.raises(SelectorError, match="'linear_1:2' is one pass of 'linear_1_2'"):
        trace.layers["linear_1:2"]


def test_params_and_buffers_are_views(trace: Trace) -> None:
    weight = trace.params["twin.weight"]
    assert isinstance(weight, Param) and weight.address == "head.weight"
    assert (weight.shape, weight.used_by) == ((3, 3), ("linear_2_11",))
    assert weight.requires_grad and weight.aliases == ("twin.weight",)
    assert trace.params["orphan.bias"].used_by == ()
    assert trace.params[0].address == "norm.weight"
    buffer = trace.buffers["norm.running_mean"]
    assert buffer.label == "buffer_1" and buffer.used_by == ("batchnorm_1_1",)
    assert trace.buffers["buffer_1"].shape == (4,)
    assert repr(buffer).startswith("Buffer norm.running_mean: [4] float32 on cpu, 16 B")
    with pytest.raises(SelectorError, match="no parameter 'head.wait'. Nearest: 'head"):
        trace.params["head.wait"]


def test_buffers_are_never_among_ops_or_picked(trace: Trace) -> None:
    assert not [op for op in trace if op.type == "buffer"]
    sites = everything().resolve(trace.graph)
    assert len(sites) == len(trace.ops)


def test_views_of_one_thing_are_equal_across_accesses(trace: Trace) -> None:
    other = make_trace()
    for key in ("linear_1", "linear_1:2", "step", "step:2"):
        assert trace[key] == trace[key] and hash(trace[key]) == hash(trace[key])
        assert trace[key] != other[key]
    assert trace["step:1"] != trace["step:2"]


@pytest.mark.parametrize("key", ["linear_1", "norm", "batchnorm_1"])
def test_view_has_no_attributes_by_accident(trace: Trace, key: str) -> None:
    for name in ("nonsense", "__wrapped__", "_op"):
        assert not hasattr(trace[key], name)
    assert {"out", "shape", "parents", "index"} <= set(dir(trace[key]))


def test_unsaved_payload_says_how_to_save_it() -> None:
    trace = make_trace(keep=False)
    message = (
        r"The output of 'linear_2_11' was not saved: this trace holds 0 of 18 tensors\."
        r" Trace again with save=tl\.label\('linear_2_11'\)"
    )
    for key in ("linear_2_11", "head", "linear_2:1"):
        with pytest.raises(CaptureError, match=message):
            trace[key].out  # noqa: B018
    assert trace["head"].shape == (2, 3) and not trace["head"].is_saved
    assert "saved     no" in str(trace["linear_2"])


def test_model_output_is_there_when_the_op_that_made_it_was_saved() -> None:
    full = make_trace()
    key = full["identity_1"].key
    model = Net().eval()
    capture = run_capture(model, (torch.ones(2, 4),), {}, wanted=frozenset([key]))
    trace = Trace(capture)
    assert list(trace.payloads) == [trace["identity_1"].index]
    assert trace["output_1"].out is trace["identity_1"].out
    assert trace["output_1"].is_saved


def test_payload_changed_after_the_trace_is_refused() -> None:
    with torch.no_grad():
        trace = make_trace()
        trace.output.add_(1)
    with pytest.raises(CaptureError, match="'linear_2_11' was changed in place after"):
        trace["head"].out  # noqa: B018


def test_totals_add_up(trace: Trace) -> None:
    assert trace.total_flops_forward == sum(op.flops_forward or 0 for op in trace.ops)
    assert trace.total_flops_forward == trace.modules["self"].total_flops_forward
    assert trace.total_macs_forward == trace.total_flops_forward // 2
    assert trace.complete and not trace.halted
    assert repr(trace) == "<Trace of Net: 16 ops, 10 modules, 18 saved>"


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_dropped_trace_frees_its_payloads_without_the_collector(
    no_collector: None,
) -> None:
    trace = make_trace()
    views = [trace["step"], trace["linear_1"], trace.ops, trace[3], trace.modules]
    str(trace), trace.to_pandas(), list(trace.layers), [str(view) for view in views]
    del views
    alive = weakref.ref(trace)
    payloads = [weakref.ref(tensor) for tensor in trace.payloads.values()]
    del trace
    assert alive() is None
    assert not [tensor for tensor in payloads if tensor() is not None]


def test_view_keeps_its_payload_alive_on_its_own(no_collector: None) -> None:
    op = make_trace()["norm"].output
    assert op.out.shape == (2, 4)

"""`tl.trace` and `tl.validate` as a user calls them."""

import numpy as np
import pytest
import torch
from torch import nn

import torchlens as tl


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(3, 4)
        self.fc2 = nn.Linear(4, 2)

    def forward(self, x, scale=1.0):
        return self.fc2(torch.relu(self.fc1(x))) * scale


def hooked(module: nn.Module, run) -> torch.Tensor:
    seen: list[torch.Tensor] = []
    handle = module.register_forward_hook(lambda m, a, out: seen.append(out.clone()))
    run()
    handle.remove()
    return seen[0]


def test_trace_saves_everything_by_default() -> None:
    model, x = Net().eval(), torch.randn(5, 3)
    trace = tl.trace(model, x)
    assert torch.equal(trace["fc1"].out, hooked(model.fc1, lambda: model(x)))
    assert torch.equal(trace.output, model(x))
    assert trace.complete and not trace.halted
    assert len(trace.payloads) == len(trace.graph.nodes)


def test_trace_takes_arguments_in_every_form() -> None:
    model, x = Net().eval(), torch.randn(5, 3)
    expected = model(x, 2.0)
    for trace in (
        tl.trace(model, x, 2.0),
        tl.trace(model, input_args=(x, 2.0)),
        tl.trace(model, x, input_kwargs={"scale": 2.0}),
        tl.trace(model, x.numpy(), 2.0),
        tl.trace(model, input_kwargs={"x": np.asarray(x), "scale": 2.0}),
    ):
        assert torch.equal(trace.output, expected)


def test_trace_passes_a_list_as_one_argument() -> None:
    class Listed(nn.Module):
        def forward(self, pair):
            return pair[0] + pair[1]

    trace = tl.trace(Listed(), [torch.ones(1), torch.ones(1)])
    assert len(trace.graph.inputs) == 2


def test_trace_refuses_inputs_given_twice() -> None:
    x = torch.randn(5, 3)
    with pytest.raises(tl.InputError, match="Both 1 positional inputs and input_args"):
        tl.trace(Net(), x, input_args=(x,))
    with pytest.raises(tl.InputError, match="came as Tensor"):
        tl.trace(Net(), input_args=x)


def test_trace_saves_only_what_is_chosen() -> None:
    model, x = Net().eval(), torch.randn(5, 3)
    trace = tl.trace(model, x, save=["fc1", "relu_1_2"])
    assert {trace.graph.nodes[n].label for n in trace.payloads} == {
        "linear_1_1",
        "relu_1_2",
    }
    with pytest.raises(tl.CaptureError, match="'linear_2_3' was not saved"):
        _ = trace["fc2"].out
    assert not tl.trace(model, x, save="none").payloads
    assert set(tl.trace(model, x, save=tl.func("linear")).payloads) == {1, 3}
    with pytest.raises(tl.SelectorError, match="fc1"):
        tl.trace(model, x, save="fc3")


def test_trace_stops_after_the_last_and_halts_at_the_first() -> None:
    model, x = Net().eval(), torch.randn(5, 3)
    after = tl.trace(model, x, stop_after=["fc1", "relu_1_2"])
    assert [op.label for op in after.ops] == ["linear_1_1", "relu_1_2"]
    assert after.halted and after.output is None
    first = tl.trace(model, x, halt=["fc1", "relu_1_2"])
    assert [op.label for op in first.ops] == ["linear_1_1"]
    whole = tl.trace(model, x, stop_after=tl.module_input("fc2"))
    assert [op.label for op in whole.ops] == ["linear_1_1", "relu_1_2"]
    with pytest.raises(tl.SelectorError, match="give one of them"):
        tl.trace(model, x, halt="fc1", stop_after="fc1")


def test_trace_says_when_a_model_swallows_the_stop() -> None:
    class Stubborn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            try:
                return self.fc(x)
            except:  # noqa: E722
                return x * 2

    model, x = Stubborn(), torch.randn(1, 3)
    with pytest.raises(tl.CaptureError, match="bare `except:` caught the stop"):
        tl.trace(model, x, stop_after="fc")


def test_trace_detaches_on_request() -> None:
    x = torch.randn(5, 3)
    assert tl.trace(Net(), x)["fc1"].out.requires_grad
    assert not tl.trace(Net(), x, detach=True)["fc1"].out.requires_grad
    with torch.no_grad():
        assert not tl.trace(Net(), x)["fc1"].out.requires_grad


def test_validate_accepts_models_and_traces() -> None:
    model, x = Net().eval(), torch.randn(5, 3)
    assert tl.validate(model, x)
    assert tl.validate(tl.trace(model, x))
    assert tl.validate(tl.trace(model, x), x)
    assert tl.validate(nn.Sequential(Net(), nn.Dropout(0.5)).train(), x)
    with pytest.raises(tl.InputError, match="its inputs are needed"):
        tl.validate(model)


def test_validate_compares_with_a_forward_nobody_watches() -> None:
    class Shy(nn.Module):
        """Gives another answer when its part is watched."""

        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            return self.fc(x) * (2 if "forward" in vars(self.fc) else 1)

    report = tl.validate(Shy().eval(), torch.randn(2, 3))
    assert not report
    assert "without capture" in report.failures[0]
    assert "FAILED" in str(report)


def test_validate_fails_on_changed_weights() -> None:
    model, x = Net().eval(), torch.randn(5, 3)
    trace = tl.trace(model, x)
    with torch.no_grad():
        model.fc1.weight.add_(1)
    report = tl.validate(trace)
    assert not report and report.failures[0].startswith("linear_1_1:")

"""Summaries and tables of a trace."""

import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from torchlens.costs import module_costs, params_under
from torchlens.tracer import run_capture
from torchlens.units import counted, shaped, sized, timed
from torchlens.views import Trace


class Recursive(nn.Module):
    """Calls itself, and a shared layer that a sibling holds too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3, bias=False)
        self.tail = nn.Sequential(nn.Flatten(), nn.Linear(8, 4))
        self.alias = self.tail[1]
        self.idle = nn.Linear(5, 5)

    def forward(self, x: Tensor, depth: int = 1) -> Tensor:
        if depth:
            return self(x, depth=depth - 1) * 2
        hidden: Tensor = self.tail(self.conv(x))
        return hidden.cumprod(1)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return Trace(run_capture(Recursive().eval(), (torch.randn(2, 3, 4, 4),), {}))


CONV_FLOPS = 2 * (2 * 2 * 2 * 2) * (3 * 3 * 3)  # 2 x outputs x multiplications of each
LINEAR_FLOPS = 2 * (2 * 4) * 8


def test_summary_is_a_tree_with_aligned_columns(trace: Trace) -> None:
    lines = trace.summary().splitlines()
    assert lines[0].split() == [
        *["module", "type", "calls", "output", "params", "FLOPs", "ops"]
    ]
    end = lines.index("")
    rows = {line.split()[0]: line for line in lines[2:end]}
    assert list(rows) == ["Recursive", "conv", "tail", "0", "1", "idle"]
    assert rows["conv"].startswith("  conv ") and rows["0"].startswith("    0 ")
    for row in rows.values():  # numbers end where their column ends
        assert len(row) == len(lines[1])
    assert "[2, 2, 2, 2]" in rows["conv"] and " 54 " in rows["conv"]
    assert counted(CONV_FLOPS) in rows["conv"]
    assert "1 (also alias)" in rows["1"]
    assert "not called" in rows["idle"] and rows["idle"].split()[-1] == "-"


def test_summary_ends_with_totals(trace: Trace) -> None:
    text = trace.summary()
    assert "Recursive: eval mode, grad enabled; inputs: input_1 [2, 3, 4, 4]" in text
    assert "5 ops in 5 layers, 6 module calls" in text
    assert "120 parameters (480 B)" in text
    assert "0 tensors (0 B) saved" in text
    assert str(trace) == text


def test_summary_stops_at_the_depth_asked_for(trace: Trace) -> None:
    names = [line.split()[0] for line in trace.summary(depth=1).splitlines()[2:6]]
    assert names == ["Recursive", "conv", "tail", "idle"]
    assert trace.summary(depth=0).splitlines()[3] == ""


def test_summary_marks_flops_that_are_a_lower_bound(trace: Trace) -> None:
    unknown = [op.label for op in trace.ops if op.flops_forward is None]
    assert unknown == ["cumprod_1_4"]
    root = trace.summary().splitlines()[2]
    assert ">= " in root
    assert "1 ops without a formula" in trace.summary()


def test_summary_says_what_the_capture_did_not_see() -> None:
    class Round(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.from_numpy(x.detach().numpy() + 1) * 2

    text = Trace(run_capture(Round(), (torch.zeros(2),), {})).summary()
    assert "Not complete:" in text and "cannot see" in text


def test_summary_says_that_the_forward_was_stopped(trace: Trace) -> None:
    key = trace["conv"].key
    model = Recursive().eval()
    capture = run_capture(model, (torch.randn(2, 3, 4, 4),), {}, stop_at=key)
    text = Trace(capture).summary()
    assert "stopped early" in text and "no tensor" in text


def test_cost_of_a_module_in_its_own_call_is_counted_once(trace: Trace) -> None:
    costs = module_costs(trace.graph)
    assert len(trace.graph.calls_of("self")) == 2
    assert costs["self"].num_ops == len(trace.ops) == 5
    assert costs["self"].num_unknown == 1
    assert costs["conv"].flops == CONV_FLOPS and costs["tail"].num_ops == 2
    assert trace["tail"].total_flops_forward >= LINEAR_FLOPS
    assert costs["idle"].num_ops == 0


def test_params_under_a_module_hold_those_inside(trace: Trace) -> None:
    graph = trace.graph
    tail = [param.address for param in params_under(graph, graph.modules["tail"])]
    assert tail == ["tail.1.weight", "tail.1.bias"]
    assert len(params_under(graph, graph.modules["self"])) == len(graph.params) == 5


def test_ops_table_has_a_row_for_each_node(trace: Trace) -> None:
    frame = trace.to_pandas()
    assert isinstance(frame, pd.DataFrame)
    assert list(frame["label"]) == [op.label for op in trace]
    row = frame.set_index("label").loc["conv2d_1_1"]
    assert (row["module"], row["module_call"]) == ("conv", "conv:1")
    assert (row["shape"], row["dtype"]) == ((2, 2, 2, 2), "float32")
    assert (row["parents"], row["children"]) == (("input_1",), ("flatten_1_2",))
    assert row["params"] == ("conv.weight",)
    assert row["flops_forward"] == CONV_FLOPS and row["nbytes"] == 64
    assert row["file"] == __file__ and row["line"] > 0
    assert frame["flops_forward"].isna().sum() == 1
    assert trace.ops.to_pandas().equals(frame)


def test_modules_table_has_a_row_for_each_module(trace: Trace) -> None:
    frame = trace.modules.to_pandas().set_index("address")
    assert list(frame.index) == list(trace.graph.modules)
    row = frame.loc["tail.1"]
    assert (row["type"], row["num_calls"], row["num_params"]) == ("Linear", 1, 36)
    assert (row["aliases"], row["output_shapes"]) == (("alias",), ((2, 4),))
    assert frame.loc["idle", "num_calls"] == 0
    assert frame.loc["self", "num_params"] == 54 + 36 + 30


def test_params_and_buffers_tables_have_a_row_for_each() -> None:
    trace = Trace(run_capture(nn.BatchNorm1d(2).eval(), (torch.ones(3, 2),), {}))
    params = trace.params.to_pandas()
    assert list(params["address"]) == ["weight", "bias"]
    assert params.loc[0, "used_by"] == ("batchnorm_1_1",)
    assert list(params["num_elements"]) == [2, 2]
    buffers = trace.buffers.to_pandas()
    assert list(buffers["label"]) == ["buffer_1", "buffer_2", "buffer_3"]
    assert buffers.loc[0, "address"] == "running_mean"


def test_tables_of_nothing_are_empty() -> None:
    trace = Trace(run_capture(nn.ReLU(), (torch.ones(2),), {}))
    assert trace.params.to_pandas().empty and trace.buffers.to_pandas().empty
    assert "0 parameters (0 B)" in trace.summary()


@pytest.mark.parametrize(
    ("number", "text"),
    [
        *[(0, "0"), (999, "999"), (1000, "1.0 K"), (999_940, "999.9 K")],
        *[(999_999, "1.0 M"), (25_557_032, "25.6 M"), (8 * 10**18, "8000.0 P")],
        (None, "?"),
    ],
)
def test_counts_read_in_four_digits(number: int | None, text: str) -> None:
    assert counted(number) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 * 2**40, "3.0 TiB")],
)
def test_bytes_read_with_binary_units(num_bytes: int, text: str) -> None:
    assert sized(num_bytes) == text


def test_durations_and_shapes_read_well() -> None:
    texts = [timed(seconds) for seconds in (65.0, 1.0, 0.5, 2e-3, 3.25e-6)]
    assert texts == ["65.0 s", "1.0 s", "500.0 ms", "2.0 ms", "3.2 us"]
    assert (shaped((2, 3)), shaped(())) == ("[2, 3]", "[]")

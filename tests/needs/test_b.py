"""Rows B1, B4, B5: nothing runs for nothing, changed branches, what a run reports."""

import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchlens as tl

from .recipes import MLP, OK, WIDTH, At, D, E, R, num_hooks


class Counted(nn.Module):
    """A linear layer that counts its forwards itself, not by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return torch.tanh(self.body(x))


class Stack(nn.Module):
    """Twelve counted layers in a row."""

    def __init__(self, depth: int = 12) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Counted() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def runs_of(self, work: Any) -> list[int]:
        """Return how often each layer runs during `work()`."""
        for layer in self.layers:
            layer.runs = 0
        work()
        return [layer.runs for layer in self.layers]


class Nest(nn.Module):
    """The wanted layer lies two modules deep, with work after it on every level."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.ModuleDict({"inner": Stack(3), "after": Counted()})
        self.end = Counted()

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.outer["after"](self.outer["inner"](x)))


def planned(model: nn.Module, layers: Any) -> tl.CapturePlan:
    """Plan, so that the forwards of the probe do not count in what follows."""
    return tl.plan(model, torch.randn(4, WIDTH), layers)


def test_b1_layers_after_the_wanted_one_do_not_run() -> None:
    model = Stack()
    reference = R(model, D(12), ["layers.2"])
    plan = planned(model, "layers.2")
    stores = []
    runs = model.runs_of(lambda: stores.append(E(model, D(12), plan)))
    assert runs == [3, 3, 3] + [0] * 9
    OK(stores[0], reference)
    assert num_hooks(model) == 0


def test_b1_the_deepest_of_several_layers_decides() -> None:
    model = Stack()
    layers = ["layers.7", "layers.0", "layers.4"]
    reference = R(model, D(10), layers)
    plan = planned(model, layers)
    stores = []
    runs = model.runs_of(lambda: stores.append(E(model, D(10), plan)))
    assert runs == [3] * 8 + [0] * 4
    OK(stores[0], reference)


def test_b1_the_last_layer_runs_everything_once() -> None:
    model = Stack()
    reference = R(model, D(8), ["layers.11"])
    plan = planned(model, "layers.11")
    stores = []
    runs = model.runs_of(lambda: stores.append(E(model, D(8), plan)))
    assert runs == [2] * 12
    OK(stores[0], reference)


def test_b1_a_nested_layer_ends_every_module_around_it() -> None:
    model = Nest()
    wanted = "outer.inner.layers.1"
    reference = R(model, D(8), [wanted])
    plan = planned(model, wanted)
    counted = {n: m for n, m in model.named_modules() if isinstance(m, Counted)}
    for module in counted.values():
        module.runs = 0
    store = E(model, D(8), plan)
    ran = {name for name, module in counted.items() if module.runs}
    assert ran == {"outer.inner.layers.0", wanted}
    OK(store, reference)


def test_b1_an_op_inside_a_layer_ends_the_forward_too() -> None:
    model = Stack()
    sites = [site for site in tl.trace(model, torch.randn(4, WIDTH)).graph.ops]
    label = [op.label for op in sites if op.type == "tanh"][2]
    reference = R(model, D(8), {label: "layers.2"})
    plan = planned(model, label)
    stores = []
    runs = model.runs_of(lambda: stores.append(E(model, D(8), plan)))
    assert runs == [2, 2, 2] + [0] * 9
    OK(stores[0], reference)


def test_b1_the_input_of_a_layer_ends_the_forward_before_it() -> None:
    model = Stack()
    reference = R(model, D(8), {"in": At("layers.3", lambda v: v[0], of_input=True)})
    plan = planned(model, {"in": tl.module_input("layers.3")})
    stores = []
    runs = model.runs_of(lambda: stores.append(E(model, D(8), plan)))
    assert runs == [2] * 3 + [0] * 9
    OK(stores[0], reference)


def test_b1_without_a_plan_at_hand_the_layers_after_run_for_the_probe_only() -> None:
    model = Stack()
    few = model.runs_of(lambda: E(model, D(8), "layers.2"))
    many = model.runs_of(lambda: E(model, D(80), "layers.2"))
    assert many[2] - few[2] == 18
    assert many[3:] == few[3:]


class Swallows(nn.Module):
    """Its bare except swallows whatever would end the forward early."""

    def __init__(self) -> None:
        super().__init__()
        self.body = MLP()
        self.after = Counted()

    def forward(self, x: Tensor) -> Tensor:
        try:
            x = self.body(x)
        except:  # noqa: E722
            pass
        return self.after(x)


def test_b1_a_model_that_swallows_the_halt_gives_right_rows_and_says_so() -> None:
    model = Swallows()
    reference = R(model, D(8), ["body.first"])
    plan = planned(model, "body.first")
    with pytest.warns(tl.TorchLensWarning, match="swallowed the signal") as caught:
        store = E(model, D(8), plan)
    assert len(caught) == 1
    OK(store, reference)


class Branches(nn.Module):
    """Takes one of two ways by the mean of its batch; `shared` is on both."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.shared(x)
        if x.mean() > 0:
            return self.up(h)
        return self.down(h).relu()


def signs(*batches: int) -> list[dict[str, Any]]:
    """Return items in batches of four whose values all have the sign given."""
    return [
        {"id": f"s{4 * k + i}", "x": sign * (D(400)[4 * k + i]["x"].abs() + 0.1)}
        for k, sign in enumerate(batches)
        for i in range(4)
    ]


def test_b4_a_layer_on_every_branch_is_extracted_as_ever() -> None:
    model, items = Branches(), signs(1, -1, 1, -1)
    OK(E(model, items, "shared"), R(model, items, ["shared"]))  # type: ignore[arg-type]


def test_b4_a_changed_branch_is_refused_with_site_batch_and_ids() -> None:
    model = Branches()
    with pytest.raises(tl.PathDivergenceError) as caught:
        E(model, signs(1, 1, -1, 1), ["shared", "up"])
    text = str(caught.value)
    assert "the output of call 1 of 'up' never appeared" in text
    assert "Batch 3" in text
    assert "'s8', 's9', 's10', 's11'" in text
    assert 'on_divergence="retrace"' in text
    assert num_hooks(model) == 0


def test_b4_retrace_keeps_what_exists_and_records_what_does_not(
    tmp_path: Path,
) -> None:
    model, items = Branches(), signs(1, -1, 1, -1, -1, 1)
    out = tmp_path / "store"
    E(model, items, ["shared", "up"], out, on_divergence="retrace")
    store = tl.open_store(out)
    other = [*range(4, 8), *range(12, 20)]
    taken = [row for row in range(24) if row not in other]
    shared = R(model, items, ["shared"])["shared"]  # type: ignore[arg-type]
    np.testing.assert_array_equal(store["shared"][:], shared)
    up = np.concatenate(
        [
            R(model, items[at : at + 4], ["up"])["up"]  # type: ignore[arg-type]
            for at in (0, 8, 20)
        ]
    )
    np.testing.assert_array_equal(store["up"][taken], up)
    assert np.isnan(store["up"][other]).all()
    assert store.missing == {"up": tuple(other)}
    assert store.complete and store.verify(deep=True).ok


def test_b4_retrace_that_misses_nothing_equals_the_planned_path() -> None:
    model, items = Branches(), signs(1, -1)
    plan = planned(model, "shared")
    store = E(model, items, plan, on_divergence="retrace")
    OK(store, R(model, items, ["shared"]))  # type: ignore[arg-type]
    assert store.missing == {}


def test_b4_the_summary_says_which_layers_have_rows_without_a_value(
    capfd: pytest.CaptureFixture[str],
) -> None:
    E(
        Branches(),
        signs(1, -1),
        ["shared", "up"],
        on_divergence="retrace",
        progress=True,
    )
    assert "up: 4 rows took a path without it" in capfd.readouterr().err


def test_b4_a_probe_on_both_sides_still_gives_a_plan_or_names_the_site() -> None:
    """The first samples already disagree about the branch."""
    items = [
        {"id": f"s{i}", "x": sign * (D(400)[i]["x"].abs() + 0.1)}
        for i, sign in enumerate([5, -1, -1, 5, 1, 1, 1, 1, -1, -1, -1, -1])
    ]
    model = Branches()
    with pytest.raises(tl.PathDivergenceError, match="call 1 of 'up' never appeared"):
        E(model, items, "up")
    store = E(model, items, ["shared", "up"], on_divergence="retrace")
    assert store.missing == {"up": (8, 9, 10, 11)}
    reference = R(model, items, ["shared"])  # type: ignore[arg-type]
    np.testing.assert_array_equal(store["shared"][:], reference["shared"])


def test_b4_a_layer_that_the_first_samples_do_not_reach_needs_a_plan_that_does() -> (
    None
):
    model, items = Branches(), signs(-1, 1, -1)
    with pytest.raises(tl.SelectorError, match="'up' .* was never called as a module"):
        E(model, items, "up")
    plan = tl.plan(model, torch.rand(4, WIDTH) + 0.1, "up")
    store = E(model, items, plan, on_divergence="retrace")
    assert store.missing == {"up": (*range(4), *range(8, 12))}
    wanted = R(model, items[4:8], ["up"])["up"]  # type: ignore[arg-type]
    np.testing.assert_array_equal(store["up"][4:8], wanted)


@pytest.mark.parametrize("kind", ["op", "input"])
def test_b4_ops_and_inputs_are_told_apart_as_layers_are(kind: str) -> None:
    model, items = Branches(), signs(1, -1, 1)
    if kind == "op":
        layers: Any = {"h": tl.func("linear") & tl.in_module("up")}
    else:
        layers = {"h": tl.module_input("up")}
    with pytest.raises(tl.PathDivergenceError, match="'s4', 's5', 's6', 's7'"):
        E(model, items, layers)
    store = E(model, items, layers, on_divergence="retrace")
    assert store.missing == {"h": (4, 5, 6, 7)}
    at = At("up") if kind == "op" else At("up", lambda v: v[0], of_input=True)
    for start in (0, 8):
        rows = items[start : start + 4]
        wanted = R(model, rows, {"h": at})["h"]  # type: ignore[arg-type]
        np.testing.assert_array_equal(store["h"][start : start + 4], wanted)


class Shifted(nn.Module):
    """On one branch an extra pass comes before the one that both branches have."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.end = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if x.mean() < 0:
            x = self.body(-3 * x)
        return self.end(self.body(x).tanh())


LAYERS = {
    "module": "body",
    "input": {"body": tl.module_input("body")},
    "op": {"body": tl.func("linear") & tl.in_module("body")},
}


@pytest.mark.parametrize("kind", LAYERS)
def test_b4_an_extra_call_before_the_planned_one_is_not_taken_for_it(kind: str) -> None:
    """The first call on the other branch fits in shape, and is another site."""
    model, items = Shifted(), signs(1, -1, 1)
    with pytest.raises(tl.PathDivergenceError) as caught:
        E(model, items, LAYERS[kind])
    assert "'body' was called 2 times" in str(caught.value)
    assert "'s4', 's5', 's6', 's7'" in str(caught.value)
    store = E(model, items, LAYERS[kind], on_divergence="retrace")
    of_input = kind == "input"
    pick = (lambda v: v[0]) if of_input else (lambda v: v)
    wanted = [
        R(
            model,
            items[start : start + 4],  # type: ignore[arg-type]
            {"body": At("body", pick, call=call, of_input=of_input)},
        )["body"]
        for start, call in ((0, 1), (4, 2), (8, 1))
    ]
    OK(store, {"body": np.concatenate(wanted)})
    assert store.missing == {}


def test_b4_halting_goes_on_where_the_call_is_the_planned_one() -> None:
    model = Shifted()
    plan = planned_positive(model)
    ends: list[int] = []
    model.end.register_forward_pre_hook(lambda module, args: ends.append(1))
    E(model, signs(1, 1, 1), plan)
    assert not ends


class OneOfTwo(nn.Module):
    """Either branch calls the layer once, on a line of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if x.mean() > 0:
            return self.body(x).relu()
        return self.body(-x)


def test_b4_one_call_on_either_branch_is_the_layer() -> None:
    model, items = OneOfTwo(), signs(1, -1, 1)
    for policy in ("raise", "retrace"):
        store = E(model, items, "body", on_divergence=policy)
        OK(store, R(model, items, ["body"]))  # type: ignore[arg-type]


class Outer(nn.Module):
    """The extra call happens to the module around the wanted one."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        if x.mean() < 0:
            x = self.block(2 * x)
        return self.block(x)


def test_b4_an_extra_call_of_a_module_around_the_layer_is_seen_too() -> None:
    model, items = Outer(), signs(1, -1)
    with pytest.raises(tl.PathDivergenceError, match="'block.0' was called 2 times"):
        E(model, items, "block.0")
    store = E(model, items, "block.0", on_divergence="retrace")
    wanted = [
        R(model, items[at : at + 4], {"block.0": At("block.0", call=call)})["block.0"]  # type: ignore[arg-type]
        for at, call in ((0, 1), (4, 2))
    ]
    OK(store, {"block.0": np.concatenate(wanted)})


def planned_positive(model: nn.Module) -> tl.CapturePlan:
    return tl.plan(model, torch.rand(4, WIDTH) + 0.1, "body")


class Loops(nn.Module):
    """Repeats its layer as long as the values are large."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.end = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        size = int(x.abs().amax() > 10) + 1
        for _ in range(size):
            x = self.body(x)
        return self.end(x)


def test_b4_a_loop_that_runs_longer_is_refused_and_names_the_layer() -> None:
    items = [
        {"id": f"s{i}", "x": D(8)[i]["x"] * (100 if i > 3 else 1)} for i in range(8)
    ]
    with pytest.raises(tl.PathDivergenceError, match="'body' was called 2 times"):
        E(Loops(), items, ["body", "end"])


def test_b4_a_loop_that_runs_shorter_leaves_its_later_passes_empty() -> None:
    items = [
        {"id": f"s{i}", "x": D(8)[i]["x"] * (100 if i < 4 else 1)} for i in range(8)
    ]
    model = Loops()
    with pytest.raises(tl.PathDivergenceError, match="call 2 of 'body' was due"):
        E(model, items, ["body", "end"])
    store = E(model, items, ["body", "end"], on_divergence="retrace")
    assert store.missing == {"body:2": (4, 5, 6, 7)}
    first = R(model, items, {"body:1": "body", "end": "end"})  # type: ignore[arg-type]
    np.testing.assert_array_equal(store["body:1"][:], first["body:1"])
    np.testing.assert_array_equal(store["end"][:], first["end"])


def test_b4_rows_of_integers_without_a_value_are_told_apart_too() -> None:
    class Picks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.mean() > 0:
                return x.argmax(1)
            return x.argmin(1) + 1

    store = E(
        Picks(), signs(1, -1), {"top": tl.func("argmax")}, on_divergence="retrace"
    )
    assert store["top"].dtype == np.int64
    assert store.missing == {"top": (4, 5, 6, 7)}


class Slow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = MLP()

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.02)
        return self.body(x)


def test_b5_the_summary_has_rates_and_stage_times_that_add_up(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    E(Slow(), D(60), ["body"], tmp_path / "store", progress=True)
    text = capfd.readouterr().err
    assert re.search(r"[\d.]+ rows/s, [\d.]+ MB/s\)", text)
    wall = float(re.search(r"MB in ([\d.]+) s ", text)[1])  # type: ignore[index]
    line = re.search(r"^preparing .*?;", text, re.MULTILINE)
    assert line is not None
    stages = dict(re.findall(r"([a-z ]+?) ([\d.]+) s[,;]", line[0]))
    stages = {name.strip(): float(seconds) for name, seconds in stages.items()}
    assert {"preparing", "reading data", "forward", "writing"} <= set(stages)
    # Each number is printed to a tenth of a second.
    assert abs(sum(stages.values()) - wall) <= 0.1 * wall + 0.05 * (len(stages) + 1)
    assert stages["forward"] >= 0.25

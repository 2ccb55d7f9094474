"""User needs H: compiled models are captured from their code, all of it or an error.

The compiled callable is left as it was: it still runs its graph, is not compiled
again, and has no break in it.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchlens as tl
from torchlens.recording import record

from .recipes import MLP, OK, WIDTH, D, E, R, num_hooks

VECTORS = D(10)
LAYERS = ["first", "act", "last"]
BATCH = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


class CountsGraphs:
    """A backend that runs graphs as they are and counts how many it was given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, example: Any) -> Any:
        self.graphs += 1
        return graph.forward


def compiled(model: nn.Module, how: str, **options: Any) -> nn.Module:
    """Return `model` compiled in a wrapper ("wrapper") or in place ("method")."""
    options.setdefault("backend", "eager")
    if how == "wrapper":
        wrapper = torch.compile(model, **options)
        assert isinstance(wrapper, nn.Module)
        return wrapper
    model.compile(**options)
    return model


def run(model: nn.Module) -> Tensor:
    with torch.no_grad():
        output: Tensor = model(BATCH)
    return output


@pytest.mark.parametrize("how", ["wrapper", "method"])
@pytest.mark.parametrize("runs_before", [False, True])
def test_h1_a_compiled_model_is_captured_from_its_code(
    how: str, runs_before: bool
) -> None:
    plain = MLP()
    reference = R(plain, VECTORS, LAYERS)
    model = compiled(plain, how)
    if runs_before:
        run(model)
    OK(E(model, VECTORS, LAYERS), reference)
    OK(E(model, VECTORS, LAYERS), reference)
    assert num_hooks(plain) == 0
    assert torch.equal(run(model), plain.last(plain.act(plain.first(BATCH))))


def test_h1_names_that_the_wrapper_gives_resolve_too() -> None:
    plain = MLP()
    reference = R(plain, VECTORS, ["act"])
    model = compiled(plain, "wrapper")
    OK(E(model, VECTORS, ["_orig_mod.act"]), {"_orig_mod.act": reference["act"]})
    assert "_orig_mod.act" in dict(model.named_modules())


@pytest.mark.parametrize("how", ["wrapper", "method"])
@pytest.mark.parametrize("runs_before", [False, True])
def test_h1_a_compiled_submodule_has_the_addresses_of_the_plain_one(
    how: str, runs_before: bool
) -> None:
    model = nn.Sequential(MLP(), MLP()).eval()
    layers = ["0.act", "1", "1.first", "1.act"]
    reference = R(model, VECTORS, layers)
    before = tl.plan(model, BATCH, layers)
    model[1] = compiled(model[1], how)
    if runs_before:
        run(model)
    OK(E(model, VECTORS, layers), reference)
    OK(
        E(model, VECTORS, ["1._orig_mod.act"]),
        {"1._orig_mod.act": reference["1.act"]},
    )
    # One store can be begun with the plain model and finished with this one.
    assert tl.plan(model, BATCH, layers).digest == before.digest
    with tl.Replayer(model, before) as replayer:
        rows = replayer.run((BATCH,), {}, num_samples=4)
    assert rows["1.act"].shape == (4, WIDTH)


class CallsCompiledFunction(nn.Module):
    """Its modules are not compiled, but a function that it calls is."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 2)
        self.shift = torch.compile(lambda x: torch.relu(x) + 1, backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.shift(self.first(x)))


@pytest.mark.parametrize("runs_before", [False, True])
def test_h1_ops_of_a_compiled_function_are_captured(runs_before: bool) -> None:
    model = CallsCompiledFunction()
    if runs_before:
        run(model)
    names = ["first", "last", "relu_1_2", "add_1_3"]
    store = E(model, VECTORS, names)
    items = torch.stack([VECTORS[index]["x"] for index in range(10)])
    with torch.no_grad():
        first = model.first(items)
    np.testing.assert_allclose(store["first"][:], first.numpy(), atol=1e-6)
    np.testing.assert_array_equal(store["relu_1_2"][:], store["first"][:].clip(min=0))
    np.testing.assert_array_equal(store["add_1_3"][:], store["relu_1_2"][:] + 1)


@pytest.mark.parametrize("runs_before", [False, True])
def test_h1_a_compiled_forward_method_is_captured_and_kept(runs_before: bool) -> None:
    model = MLP()
    reference = R(model, VECTORS, LAYERS)
    forward = model.forward = torch.compile(model.forward, backend="eager")
    if runs_before:
        run(model)
    OK(E(model, VECTORS, LAYERS), reference)
    assert vars(model)["forward"] is forward


@pytest.mark.parametrize("how", ["wrapper", "method"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_h2_all_layers_are_captured_under_compile(how: str, backend: str) -> None:
    model = nn.Sequential(MLP(), MLP(), nn.Linear(WIDTH, 2))
    layers = ["0.first", "0.act", "0.last", "0", "1.act", "1", "2", "self"]
    reference = R(model, VECTORS, layers)
    model = compiled(model, how, backend=backend)
    run(model)
    OK(E(model, VECTORS, layers), reference)


def test_h2_regions_compiled_one_by_one_are_all_captured() -> None:
    model = nn.Sequential(MLP(), MLP(), MLP()).eval()
    layers = [f"{index}.{name}" for index in range(3) for name in LAYERS]
    reference = R(model, VECTORS, layers)
    backend = CountsGraphs()
    for block in model:
        block.compile(backend=backend, fullgraph=True)
    run(model)
    graphs = backend.graphs
    OK(E(model, VECTORS, ["*.*"]), reference)
    with torch.compiler.set_stance("fail_on_recompile"):
        run(model)
    assert backend.graphs == graphs


def test_h2_a_caller_in_another_stance_gets_all_layers_and_keeps_it() -> None:
    model = MLP().eval()
    reference = R(model, VECTORS, LAYERS)
    wrapper = compiled(model, "wrapper", fullgraph=True)
    run(wrapper)
    with torch.compiler.set_stance("fail_on_recompile"):
        OK(E(wrapper, VECTORS, LAYERS), reference)
        run(wrapper)
        with torch.no_grad(), pytest.raises(RuntimeError, match="fail_on_recompile"):
            wrapper(BATCH[:3])


@pytest.mark.parametrize("how", ["wrapper", "method"])
@pytest.mark.parametrize("dynamic", [None, False])
def test_h3_a_full_graph_stays_whole_and_is_not_compiled_again(
    how: str, dynamic: bool | None
) -> None:
    backend = CountsGraphs()
    plain = MLP().eval()
    reference = R(plain, VECTORS, LAYERS)
    model = compiled(plain, how, backend=backend, fullgraph=True, dynamic=dynamic)
    before = run(model)
    assert backend.graphs == 1

    OK(E(model, VECTORS, LAYERS), reference)
    E(model, VECTORS, tl.func("relu"))
    record(model, BATCH, layers="act")
    tl.trace(model, BATCH)

    # A guard on hooks, on `forward` or on the mode would fail here.
    with torch.compiler.set_stance("fail_on_recompile"):
        assert torch.equal(run(model), before)
    assert backend.graphs == 1
    torch._dynamo.reset()
    assert torch.equal(run(model), before)
    assert backend.graphs == 2


def test_h3_a_model_compiled_whole_while_it_is_replayed_has_no_break() -> None:
    model = MLP().eval()
    backend = CountsGraphs()
    reference = R(model, VECTORS, LAYERS)
    with tl.Replayer(model, tl.plan(model, BATCH, LAYERS)) as replayer:
        whole = torch.compile(model, backend=backend, fullgraph=True)
        assert torch.equal(run(whole), model(BATCH))
        items = torch.stack([VECTORS[index]["x"] for index in range(4)])
        rows = replayer.run((items,), {}, num_samples=4)
        assert torch.equal(run(whole), model(BATCH))
    for name in LAYERS:
        np.testing.assert_array_equal(rows[name].numpy(), reference[name][:4])
    assert torch.equal(run(whole), model(BATCH))


def test_h4_a_model_compiled_ahead_of_time_is_captured_from_its_code() -> None:
    from torch._dynamo.aot_compile import ModelInput

    plain = MLP().eval()
    reference = R(plain, VECTORS, LAYERS)
    with torch._dynamo.config.patch(enable_aot_compile=True):
        model = compiled(plain, "wrapper", fullgraph=True)
        model._aot_compile([ModelInput((BATCH,), {}, [torch.no_grad()])])
    before = run(model)
    OK(E(model, VECTORS, LAYERS), reference)
    assert torch.equal(run(model), before)


class AheadOfTime(nn.Module):
    """Calls compiled code that has the weights but never runs the modules."""

    def __init__(self) -> None:
        super().__init__()
        self.body = MLP().eval()
        whole = torch.compile(self.body.forward, backend="eager", fullgraph=True)
        with torch.no_grad():
            self.code = whole.aot_compile(((BATCH,), {}))
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.code(self.body, x))


def test_h4_layers_inside_code_compiled_ahead_of_time_are_an_error() -> None:
    with pytest.raises(tl.TorchLensError):
        E(AheadOfTime(), VECTORS, ["body.act"])


def test_h4_a_graph_of_fx_is_captured_like_the_module() -> None:
    model = MLP().eval()
    OK(E(torch.fx.symbolic_trace(model), VECTORS, LAYERS), R(model, VECTORS, LAYERS))


def test_h4_an_exported_program_gives_its_ops() -> None:
    model = MLP().eval()
    reference = R(model, VECTORS, ["first", "act"])
    batch = torch.export.Dim("batch")
    program = torch.export.export(model, (BATCH,), dynamic_shapes=({0: batch},))
    layers = {"first": "linear_1", "act": "relu_1"}
    OK(E(program.module(), VECTORS, layers, inputs=("x",)), reference)
    with pytest.raises(tl.ModelError, match="A torch.nn.Module was wanted"):
        E(program, VECTORS, layers)

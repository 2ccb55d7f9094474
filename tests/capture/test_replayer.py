"""Replay of module sites: values against plain hooks, guards, policies, restoration."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from torchlens.errors import (
    CaptureError,
    InputError,
    PathDivergenceError,
    PlanError,
    ReplayError,
    TorchLensWarning,
)
from torchlens.planner import plan
from torchlens.replayer import Replayer


def hooked(
    model: nn.Module, x: Any, names: Sequence[str], path: Callable[[Any], Tensor]
) -> dict[str, Tensor]:
    """Return clones of what plain forward hooks see, in eval mode."""
    found: dict[str, Tensor] = {}
    handles = [
        model.get_submodule(name).register_forward_hook(
            lambda module, args, output, name=name: found.__setitem__(
                name, path(output).detach().clone()
            )
        )
        for name in names
    ]
    was = model.training
    with torch.no_grad():
        model.eval()(x)
    model.train(was)
    for handle in handles:
        handle.remove()
    return found


def convnet() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Flatten(),
        nn.Linear(4 * 36, 5),
    )


def assert_untouched(model: nn.Module) -> None:
    for module in model.modules():
        assert "forward" not in vars(module)
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.parametrize("count", [1, 5])
def test_rows_equal_plain_hooks(with_out: bool, count: int) -> None:
    model = convnet().train()
    names = ["0", "1", "2", "5"]
    made = plan(model, torch.randn(4, 3, 8, 8), names)
    x = torch.randn(count, 3, 8, 8)
    expected = hooked(model, x, names, lambda output: output)
    out = {s.name: torch.empty(count, *s.row_shape) for s in made.sites}
    with Replayer(model, made) as replayer:
        rows = replayer.run((x,), {}, num_samples=count, out=out if with_out else None)
    assert list(rows) == names
    for name in names:
        assert torch.equal(rows[name], expected[name])
    assert (expected["0"] < 0).any()
    assert model.training
    assert_untouched(model)


def test_kept_rows_stay_right_while_later_batches_run() -> None:
    model = convnet()
    names = ["0", "1", "2"]
    made = plan(model, torch.randn(4, 3, 8, 8), names)
    batches = [torch.randn(3, 3, 8, 8) for _ in range(3)]
    with Replayer(model, made) as replayer:
        kept = [replayer.run((x,), {}, num_samples=3) for x in batches]
    for x, rows in zip(batches, kept, strict=True):
        expected = hooked(model, x, names, lambda output: output)
        for name in names:
            assert torch.equal(rows[name], expected[name])


def test_copies_are_made_only_where_something_writes_later() -> None:
    made = plan(convnet(), torch.randn(4, 3, 8, 8), ["0", "1", "2", "4", "5"])
    copied = {site.name: site.copy for site in made.sites}
    # Flatten shares the memory of ReLU, but nothing writes to it after that.
    assert copied == {"0": False, "1": True, "2": False, "4": False, "5": False}


def test_rows_can_be_trained_on() -> None:
    model = convnet()
    made = plan(model, torch.randn(4, 3, 8, 8), ["5"])
    with Replayer(model, made) as replayer:
        rows = replayer.run((torch.randn(4, 3, 8, 8),), {}, num_samples=4)["5"]
    head = nn.Linear(5, 1)
    head(rows).sum().backward()
    assert head.weight.grad is not None
    assert not rows.is_inference()


def test_part_of_a_tensor_owns_its_memory() -> None:
    class Token(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, 0]

    model = nn.Sequential(nn.Linear(8, 8), Token(), nn.Linear(8, 2))
    x = torch.randn(4, 50, 8)
    made = plan(model, x, "1")
    with Replayer(model, made) as replayer:
        rows = replayer.run((x,), {}, num_samples=4)["1"]
    assert rows.untyped_storage().nbytes() == 4 * 8 * 4
    assert torch.equal(rows, model[0](x)[:, 0])


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass
class Result:
    value: Tensor
    extra: dict[str, Tensor]


class Structured(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner = _Inner(kind)

    def forward(self, x: Tensor) -> Tensor:
        self.inner(x)
        return x.sum(dim=1)


class _Inner(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        one, two = x + 1, x * 2
        return {
            "tuple": (one, {"a": two}, None),
            "list": [one, [two]],
            "dict": {"one": one, "two": {"a": two}},
            "namedtuple": Pair(one, two),
            "dataclass": Result(one, {"a": two}),
        }[self.kind]


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("tuple", ["inner[0]", 'inner[1]["a"]']),
        ("list", ["inner[0]", "inner[1][0]"]),
        ("dict", ['inner["one"]', 'inner["two"]["a"]']),
        ("namedtuple", ["inner.first", "inner.second"]),
        ("dataclass", ["inner.value", 'inner.extra["a"]']),
    ],
)
def test_structured_outputs_give_one_array_per_tensor(
    kind: str, names: list[str]
) -> None:
    model = Structured(kind)
    x = torch.randn(4, 3)
    made = plan(model, x, "inner")
    assert list(made.names) == names
    with Replayer(model, made) as replayer:
        rows = replayer.run((x,), {}, num_samples=4)
    assert torch.equal(rows[names[0]], x + 1)
    assert torch.equal(rows[names[1]], x * 2)
    single = plan(model, x, names[1])
    with Replayer(model, single) as replayer:
        assert torch.equal(replayer.run((x,), {}, num_samples=4)[names[1]], x * 2)


def test_shared_module_gives_one_site_per_call() -> None:
    act = nn.ReLU()
    model = nn.Sequential(nn.Linear(3, 3), act, nn.Linear(3, 3), act)
    x = torch.randn(4, 3)
    made = plan(model, x, "1")
    assert made.names == ("1:1", "1:2")
    with Replayer(model, made) as replayer, torch.no_grad():
        rows = replayer.run((x,), {}, num_samples=4)
        first = act(model[0](x))
        assert torch.equal(rows["1:1"], first)
        assert torch.equal(rows["1:2"], act(model[2](first)))


class Direct(nn.Module):
    """Calls a submodule's forward directly, where no hook fires."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner.forward(x).relu()


def test_direct_call_of_forward_is_caught_and_left_as_found() -> None:
    model = Direct()
    x = torch.randn(4, 3)
    made = plan(model, x, "inner")
    with Replayer(model, made) as replayer:
        rows = replayer.run((x,), {}, num_samples=4)["inner"]
    assert torch.equal(rows, model.inner(x))
    assert_untouched(model)

    def own(x: Tensor) -> Tensor:
        return x * 3

    model.inner.forward = own  # type: ignore[method-assign]  # as users patch
    made = plan(model, x, "inner")
    with Replayer(model, made) as replayer:
        assert torch.equal(replayer.run((x,), {}, num_samples=4)["inner"], x * 3)
    assert vars(model.inner)["forward"] is own


def test_module_that_calls_itself_keeps_its_call_numbers() -> None:
    class Nested(nn.Module):
        def forward(self, x: Tensor, depth: int = 2) -> Tensor:
            if depth:
                x = self(x, depth - 1)
            return x + depth

    model = nn.Sequential(Nested())
    x = torch.randn(4, 3)
    made = plan(model, x, ["0:1", "0:3"])
    with Replayer(model, made) as replayer:
        rows = replayer.run((x,), {}, num_samples=4)
    assert torch.equal(rows["0:3"], x)
    assert torch.equal(rows["0:1"], x + 1 + 2)


def test_module_inputs_are_caught_before_they_are_overwritten() -> None:
    import torchlens as tl

    class Over(nn.Module):
        def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
            return x.relu_() * scale

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.over = Over()

        def forward(self, x: Tensor) -> Tensor:
            return self.over(x - 1, scale=x + 2) + 0

    model, x = Model(), torch.randn(4, 3)
    made = plan(model, x, tl.module_input("over"))
    with Replayer(model, made) as replayer:
        rows = replayer.run((x,), {}, num_samples=4)
    value, scale = rows["over.input[0]"], rows['over.input["scale"]']
    assert torch.equal(value, x - 1)
    assert torch.equal(scale, x + 2)
    assert (value < 0).any()


def test_users_hooks_come_first_and_stay() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    handle = model[0].register_forward_hook(lambda module, args, output: output * 2)
    x = torch.randn(4, 3)
    made = plan(model, x, "0")
    with Replayer(model, made) as replayer:
        rows = replayer.run((x,), {}, num_samples=4)["0"]
    handle.remove()
    assert torch.equal(rows, model[0](x) * 2)
    assert_untouched(model)


def test_entering_again_leaves_nothing_behind() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    x = torch.randn(4, 3)
    replayer = Replayer(model, plan(model, x, ["0", "relu_1"]))
    with replayer:
        replayer.run((x,), {}, num_samples=4)
        first = len(replayer._interception.relay.counters)
    for _ in range(3):
        with replayer:
            rows = replayer.run((x,), {}, num_samples=4)
    assert len(replayer._interception.relay.counters) == first
    assert torch.equal(rows["0"], model[0](x))
    assert_untouched(model)


def test_hook_added_while_replaying_is_seen_from_then_on() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    x = torch.randn(4, 3)
    made = plan(model, x, "0")
    with Replayer(model, made) as replayer:
        plain = replayer.run((x,), {}, num_samples=4)["0"]
        handle = model[0].register_forward_hook(lambda module, args, output: -output)
        turned = replayer.run((x,), {}, num_samples=4)["0"]
        handle.remove()
        again = replayer.run((x,), {}, num_samples=4)["0"]
    assert torch.equal(turned, -plain)
    assert torch.equal(again, plain)
    assert_untouched(model)


def test_forward_ends_after_the_last_site() -> None:
    counts: dict[int, int] = {}

    class Counted(nn.Module):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index

        def forward(self, x: Tensor) -> Tensor:
            counts[self.index] = counts.get(self.index, 0) + 1
            return x + self.index

    model = nn.Sequential(*map(Counted, range(12)))
    made = plan(model, torch.randn(4, 3), "2")
    counts.clear()
    x = torch.randn(4, 3)
    with Replayer(model, made) as replayer:
        rows = replayer.run((x,), {}, num_samples=4)["2"]
    assert counts == {0: 1, 1: 1, 2: 1}
    assert torch.equal(rows, x + 0 + 1 + 2)


class Swallowing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.ran = 0

    def forward(self, x: Tensor) -> Tensor:
        try:
            x = self.inner(x)
        except:  # noqa: E722  the point of the test
            pass
        self.ran += 1
        return x


def test_swallowed_halt_is_reported_once() -> None:
    model, x = Swallowing(), torch.randn(4, 3)
    made = plan(model, x, "inner")
    with Replayer(model, made) as replayer:
        with pytest.warns(TorchLensWarning, match="swallowed the signal"):
            first = replayer.run((x,), {}, num_samples=4)["inner"]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            second = replayer.run((x,), {}, num_samples=4)["inner"]
    expected = model.inner(x)
    assert torch.equal(first, expected)
    assert torch.equal(second, expected)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 3)
        self.left = nn.Linear(3, 3)
        self.right = nn.Linear(3, 3)
        self.last = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = self.left(x) if x.mean() > 0 else self.right(x)
        return self.last(x)


def both_sides(model: Branching) -> tuple[Tensor, Tensor]:
    """Return a batch for the left branch and one for the right."""
    with torch.no_grad():
        model.stem.weight.copy_(torch.eye(3))
        model.stem.bias.zero_()
    return torch.rand(4, 3), -torch.rand(4, 3)


def test_changed_branch_is_refused_with_site_batch_and_ids() -> None:
    model = Branching()
    left, right = both_sides(model)
    made = plan(model, left, ["stem", "left", "last"])
    ids = [f"s{i}" for i in range(8)]
    with Replayer(model, made) as replayer:
        replayer.run((left,), {}, num_samples=4)
        with pytest.raises(PathDivergenceError) as caught:
            replayer.run((right,), {}, num_samples=4, sample_ids=ids)
        replayer.run((left,), {}, num_samples=4)
    message = str(caught.value)
    assert "Batch 2 (samples 's0', 's1', 's2', 's3', 's4' and 3 more)" in message
    assert "'last'" in message and "'left'" in message
    assert 'on_divergence="retrace"' in message
    assert_untouched(model)


@pytest.mark.parametrize("with_out", [False, True])
def test_retrace_keeps_the_sites_that_still_exist(with_out: bool) -> None:
    model = Branching()
    left, right = both_sides(model)
    made = plan(model, left, ["stem", "left", "last"])
    out = {site.name: torch.ones(4, 3) for site in made.sites} if with_out else None
    with Replayer(model, made, on_divergence="retrace") as replayer:
        rows = replayer.run((right,), {}, num_samples=4, out=out)
        assert replayer.missing == ("left",)
        assert replayer.diverged == 1
        assert "left" not in rows
        expected = hooked(model, right, ["stem", "last"], lambda output: output)
        for name, value in expected.items():
            assert torch.equal(rows[name], value)
        if out is not None:
            assert out["left"].isnan().all()
        replayer.run((left,), {}, num_samples=4)
        assert replayer.missing == ()


def test_retrace_refuses_inputs_that_the_forward_has_changed() -> None:
    class Changing(Branching):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(2))

    model = Changing()
    left, right = both_sides(model)
    made = plan(model, left, ["left"])
    with Replayer(model, made, on_divergence="retrace") as replayer:
        with pytest.raises(ReplayError, match="has written to its inputs"):
            replayer.run((right,), {}, num_samples=4)


class Looped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(3, 3)
        self.last = nn.Linear(3, 3)
        self.times = 2

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.cell(x)
        return self.last(x)


@pytest.mark.parametrize(
    ("times", "message"),
    [
        (3, r"the module 'cell' was called 3 times, where .* calls it 2 times"),
        (
            1,
            r"the output of call 1 of 'last' appeared when .* call 2 of 'cell' was due",
        ),
    ],
)
def test_another_number_of_calls_is_refused(times: int, message: str) -> None:
    model = Looped()
    x = torch.randn(4, 3)
    made = plan(model, x, ["cell:2", "last"])
    model.times = times
    with Replayer(model, made) as replayer:
        with pytest.raises(PathDivergenceError, match=message):
            replayer.run((x,), {}, num_samples=4)


def test_site_that_never_appears_is_named() -> None:
    model = Looped()
    x = torch.randn(4, 3)
    made = plan(model, x, "cell:2")
    model.times = 1
    with Replayer(model, made) as replayer:
        with pytest.raises(PathDivergenceError, match=r"call 2 of 'cell' never appear"):
            replayer.run((x,), {}, num_samples=4)


def test_other_shapes_and_dtypes_are_refused() -> None:
    model = nn.Sequential(nn.ReLU())
    made = plan(model, torch.randn(4, 3), "0")
    with Replayer(model, made) as replayer:
        with pytest.raises(PathDivergenceError, match=r"float32 \[4, 5\], where .*\[4"):
            replayer.run((torch.randn(4, 5),), {}, num_samples=4)
        with pytest.raises(PathDivergenceError, match=r"float64 \[4, 3\], where float"):
            replayer.run((torch.randn(4, 3).double(),), {}, num_samples=4)
        with pytest.raises(PathDivergenceError, match=r"\[5, 3\], where .*\[4, 3\]"):
            replayer.run((torch.randn(5, 3),), {}, num_samples=4)


def test_divergence_is_seen_through_a_swallowing_model() -> None:
    model = Swallowing()
    x = torch.randn(4, 3)
    made = plan(model, x, "inner")
    model.inner = nn.Linear(3, 2)
    with Replayer(model, made, check_model=False) as replayer:
        with pytest.raises(PathDivergenceError, match=r"\[4, 2\], where"):
            replayer.run((x,), {}, num_samples=4)


def test_models_own_error_passes_with_a_note_and_leaves_no_hooks() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    made = plan(model, torch.randn(4, 3), "1")
    with pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
        with Replayer(model, made) as replayer:
            replayer.run((torch.randn(4, 2),), {}, num_samples=4, sample_ids=["a"])
    assert caught.value.__notes__ == ["While replaying Batch 1 (samples 'a')."]
    assert_untouched(model)


def test_another_models_weights_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    made = plan(model, torch.randn(4, 3), "1")
    with torch.no_grad():
        model[0].weight[0, 0] += 1
    with pytest.raises(PlanError, match=r"does not fit this Sequential: weights: plan"):
        Replayer(model, made)
    Replayer(model, made, check_model=False)
    with pytest.raises(PlanError, match="class: planned .*Sequential, came .*Linear"):
        Replayer(nn.Linear(3, 3), made, check_model=False)
    other = nn.Sequential(nn.Linear(3, 3), nn.LeakyReLU(0.3))
    with pytest.raises(PlanError, match="config: planned"):
        Replayer(other, made)


def test_plan_for_a_module_that_is_gone_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    made = plan(model, torch.randn(4, 3), ["0", "1"])
    del model[1]
    with pytest.raises(PlanError, match="'1', but Sequential has no such module"):
        with Replayer(model, made, check_model=False):
            pass
    assert_untouched(model)


def test_unknown_policy_is_refused() -> None:
    model = nn.Linear(3, 3)
    made = plan(model, torch.randn(4, 3), "self")
    with pytest.raises(PlanError, match="on_divergence was wanted as"):
        Replayer(model, made, on_divergence="skip")  # type: ignore[arg-type]  # tested


def test_out_that_does_not_fit_is_refused() -> None:
    model = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    made = plan(model, x, "self")
    with Replayer(model, made) as replayer:
        with pytest.raises(InputError, match="out has no tensor for the site 'self'"):
            replayer.run((x,), {}, num_samples=4, out={})
        wrong = {"self": torch.empty(4, 3)}
        with pytest.raises(InputError, match=r"wanted as float32 \[4, 2\], but is"):
            replayer.run((x,), {}, num_samples=4, out=wrong)


def test_stored_dtype_is_cast_in_both_ways_of_delivery() -> None:
    model = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    made = plan(model, x, "self", dtype=torch.float16)
    out = {"self": torch.empty(4, 2, dtype=torch.float16)}
    with Replayer(model, made) as replayer:
        kept = replayer.run((x,), {}, num_samples=4)["self"]
        replayer.run((x,), {}, num_samples=4, out=out)
    assert torch.equal(kept, model(x).half())
    assert torch.equal(out["self"], kept)


def test_run_inside_a_run_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    x = torch.randn(4, 3)
    made = plan(model, x, "1")
    replayer = Replayer(model, made)

    def again(module: nn.Module, args: Any, output: Any) -> None:
        replayer.run((x,), {}, num_samples=4)

    with replayer:
        handle = model[0].register_forward_hook(again)
        with pytest.raises(CaptureError, match="cannot run inside another"):
            replayer.run((x,), {}, num_samples=4)
        handle.remove()
    assert_untouched(model)


def test_model_can_be_used_by_hand_between_batches() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    x = torch.randn(4, 3)
    made = plan(model, x, "0")
    with Replayer(model, made) as replayer:
        assert model(x).shape == (4, 3)
        rows = replayer.run((x,), {}, num_samples=4)["0"]
        assert torch.is_grad_enabled()
    assert torch.equal(rows, model[0](x))


def test_autocast_of_the_plan_holds_in_every_run() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    x = torch.randn(4, 3)
    plain = plan(model, x, "1")
    with torch.autocast("cpu", torch.bfloat16):
        mixed = plan(model, x, "1")
        with Replayer(model, plain) as replayer:
            assert replayer.run((x,), {}, num_samples=4)["1"].dtype is torch.float32
    assert mixed.sites[0].dtype == "bfloat16"
    assert mixed.digest != plain.digest
    with Replayer(model, mixed) as replayer:
        assert replayer.run((x,), {}, num_samples=4)["1"].dtype is torch.bfloat16


def test_compiled_parts_are_captured_from_their_original_code() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    x = torch.randn(4, 3)
    whole = torch.compile(model, backend="eager")
    whole(x)
    model[1].compile(backend="eager")
    made = plan(whole, x, ["0", "1", "2"])
    expected = hooked(model, x, ["0", "2"], lambda output: output)
    with Replayer(whole, made) as replayer:
        rows = replayer.run((x,), {}, num_samples=4)
    assert torch.equal(rows["0"], expected["0"])
    assert torch.equal(rows["1"], expected["0"].relu())
    assert torch.equal(rows["2"], expected["2"])


def test_fused_encoder_path_is_off_and_restored() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(4, 5, 8)
    made = plan(layer, x, ["self_attn", "self"])
    assert torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            expected = layer(x)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    with Replayer(layer, made) as replayer:
        rows = replayer.run((x,), {}, num_samples=4)
    assert torch.equal(rows["self"], expected)
    assert rows["self_attn"].shape == (4, 5, 8)


def test_train_mode_restores_running_statistics() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    x = torch.randn(6, 3)
    made = plan(model, x, "1", training=True, allow=("mixing",))
    before = model[1].running_mean.clone()
    model.eval()
    with Replayer(model, made) as replayer:
        assert model.training
        rows = replayer.run((x,), {}, num_samples=6)["1"]
    assert not model.training
    assert torch.equal(model[1].running_mean, before)
    assert torch.allclose(rows.mean(dim=0), torch.zeros(3), atol=1e-6)


def test_write_that_the_trace_could_not_see_is_repaired() -> None:
    class Late(nn.Module):
        """Overwrites what it was given, but only in the replayed batches."""

        def __init__(self) -> None:
            super().__init__()
            self.on = False

        def forward(self, x: Tensor) -> Tensor:
            return x.zero_() if self.on else x.clone()

    model = nn.Sequential(nn.Linear(3, 3), Late(), nn.Linear(3, 3))
    x = torch.randn(4, 3)
    made = plan(model, x, ["0", "2"])
    assert not made.sites[0].copy
    model[1].on = True
    with Replayer(model, made) as replayer:
        rows = replayer.run((x,), {}, num_samples=4)
    with torch.no_grad():
        assert torch.equal(rows["0"], model[0](x))


def test_constant_that_changes_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    table = nn.Embedding(2, 3)

    class With(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = table
            self.which = 0

        def forward(self, x: Tensor) -> Tensor:
            return x + self.table(torch.tensor([self.which]))

    model = With()
    x = torch.randn(4, 3)
    made = plan(model, x, "table", allow=("constants",))
    with Replayer(model, made) as replayer:
        rows = replayer.run((x,), {}, num_samples=4)["table"]
        assert torch.equal(rows, table.weight[:1].expand(4, 1, 3))
        model.which = 1
        with pytest.raises(PathDivergenceError, match="planned as a constant"):
            replayer.run((x,), {}, num_samples=4)


def test_offloaded_model_is_run_to_its_end() -> None:
    model = nn.Sequential(nn.Linear(3, 3), _Counting())
    x = torch.randn(4, 3)
    made = plan(model, x, "0")
    model[0]._hf_hook = object()  # what accelerate leaves on an offloaded module
    counting = model[1]
    before = counting.ran
    with Replayer(model, made) as replayer:
        replayer.run((x,), {}, num_samples=4)
    assert counting.ran == before + 1


class _Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ran = 0

    def forward(self, x: Tensor) -> Tensor:
        self.ran += 1
        return x


def test_same_site_under_two_names_gives_both() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    x = torch.randn(4, 3)
    made = plan(model, x, {"a": "0", "b": "0"})
    with Replayer(model, made) as replayer:
        rows = replayer.run((x,), {}, num_samples=4)
    assert torch.equal(rows["a"], rows["b"])
    renamed = replace(made, sites=made.sites[:1])
    assert renamed.digest != made.digest

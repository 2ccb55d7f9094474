"""Op sites: values against arithmetic by hand, composites, and what is left behind."""

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

import torchlens as tl
from torchlens.errors import PathDivergenceError, PlanError
from torchlens.planner import plan
from torchlens.plans import CapturePlan
from torchlens.replayer import Replayer
from torchlens.selector_algebra import Selector

Rows = dict[str, Tensor]


def replay(
    model: nn.Module, example: Tensor, layers: Any, x: Tensor, **options: Any
) -> Rows:
    """Return the rows of `layers` for `x` by a plan made on `example`."""
    made = plan(model, example, layers, **options)
    with Replayer(model, made) as replayer:
        return replayer.run((x,), {}, num_samples=len(x))


class Block(nn.Module):
    """Ops of its own around two children, as in a transformer's block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.mlp(self.norm(x))
        return y * 2


class Stack(nn.Module):
    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) - 1
        return x


def test_ops_of_blocks_and_of_the_root_are_caught() -> None:
    model, x = Stack(), torch.randn(5, 4)
    rows = replay(
        model,
        torch.randn(4, 4),
        {
            "second add": "add_2",
            "gelu": tl.func("gelu") & tl.in_module("blocks.2"),
            "root": "sub_1:2",
            "block": "blocks.1",
        },
        x,
    )
    with torch.no_grad():
        first = model.blocks[0](x) - 1
        block = model.blocks[1]
        added = first + block.mlp(block.norm(first))
        assert torch.equal(rows["second add"], added)
        assert torch.equal(rows["block"], added * 2)
        assert torch.equal(rows["root"], added * 2 - 1)
        last = model.blocks[2]
        gelu = last.mlp[1](last.mlp[0](last.norm(added * 2 - 1)))
        assert torch.equal(rows["gelu"], gelu)


def test_mode_is_off_inside_children_and_gone_after() -> None:
    seen: list[int] = []

    class Looking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(len(_get_current_function_mode_stack()))
            return x.tanh()

    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = Looking()

        def forward(self, x: Tensor) -> Tensor:
            y = self.child(x) + 1
            seen.append(len(_get_current_function_mode_stack()))
            return y * 3

    model, x = Parent(), torch.randn(4, 3)
    made = plan(model, x, "mul_1")
    seen.clear()
    with Replayer(model, made) as replayer:
        rows = replayer.run((x,), {}, num_samples=4)
        assert _get_current_function_mode_stack() == []
    assert seen == [0, 1]
    assert torch.equal(rows["mul_1"], (x.tanh() + 1) * 3)


@pytest.mark.parametrize("kind", ["halt", "error", "divergence"])
def test_mode_stack_and_forwards_are_restored(kind: str) -> None:
    model = Stack(2)
    x = torch.randn(4, 4)
    made = plan(model, x, {"halt": ["add_1"]}.get(kind, ["add_1", "add_2"]))
    fail = _Fail(kind)
    handle = model.blocks[0].mlp.register_forward_hook(fail)
    expectation: Any = {
        "halt": contextlib.nullcontext(),
        "error": pytest.raises(ZeroDivisionError),
        "divergence": pytest.raises(PathDivergenceError),
    }[kind]
    with Replayer(model, made) as replayer, expectation:
        replayer.run((x,), {}, num_samples=4)
    handle.remove()
    assert _get_current_function_mode_stack() == []
    for module in model.modules():
        assert "forward" not in vars(module)


class _Fail:
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if self.kind == "error":
            raise ZeroDivisionError
        return output.double() if self.kind == "divergence" else output


@pytest.mark.parametrize(
    ("layer", "by_hand"),
    [
        ("linalgvectornorm_1", lambda x: x.norm(dim=1, keepdim=True)),
        ("relu_1", lambda x: F.normalize(x).relu()),
        ("truediv_1", lambda x: F.normalize(x)),
    ],
)
def test_parts_of_composites_are_caught(layer: str, by_hand: Any) -> None:
    class Composite(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.relu(F.normalize(x)) + 1

    x = torch.randn(5, 3)
    layer = {"truediv_1": "div_1"}.get(layer, layer)
    rows = replay(Composite(), torch.randn(4, 3), layer, x)
    assert torch.allclose(rows[layer], by_hand(x))
    guards = [F.has_torch_function, F.has_torch_function_unary]
    assert guards == [torch.overrides.has_torch_function, guards[1]]
    assert not guards[1](x)


def test_functional_projection_of_attention_is_caught() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(5, 6, 8)
    rows = replay(model, torch.randn(4, 6, 8), "self_attn.out_proj", x)
    attention = model.self_attn
    with torch.no_grad():
        expected, _ = attention(x, x, x, need_weights=False)
    [value] = rows.values()
    value = value.reshape(value.shape[0], -1)
    assert sorted(value.shape) == [5, 48]
    assert torch.allclose(
        value.sort(dim=1).values,
        expected.reshape(5, -1).sort(dim=1).values,
        atol=1e-5,
    )


class InPlace(nn.Module):
    """The ops of labels whose tensor is written to later."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        z = torch.relu_(y)
        y.add_(1)
        y += 2
        y[:, 0] = 5
        return y + z


def test_values_are_those_before_later_writes() -> None:
    model, x = InPlace(), torch.randn(5, 3)
    layers = ["fc", "relu_1", "add_1", "iadd_1", "setitem_1", "add_2"]
    rows = replay(model, torch.randn(4, 3), layers, x)
    with torch.no_grad():
        y = model.fc(x)
        expected = {"fc": y, "relu_1": y.relu(), "add_1": y.relu() + 1}
        expected["iadd_1"] = y.relu() + 3
        last = expected["iadd_1"].clone()
        last[:, 0] = 5
        expected |= {"setitem_1": last, "add_2": last + last}
    for name in layers:
        assert torch.equal(rows[name], expected[name]), name


def test_outputs_of_one_call_are_told_apart() -> None:
    class Top(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            values, indices = x.topk(2)
            return values + indices

    x = torch.randn(5, 4)
    rows = replay(Top(), torch.randn(4, 4), {"v": "topk_1", "i": "topk_2"}, x)
    assert torch.equal(rows["v"], x.topk(2).values)
    assert torch.equal(rows["i"], x.topk(2).indices)


def test_the_right_execution_of_a_loop_is_caught() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.times = 3

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(self.times):
                x = torch.tanh(x) + 1
            return x.exp()

    model, x = Loop(), torch.randn(5, 4)
    made = plan(model, torch.randn(4, 4), ["tanh_1:2", "tanh_1:3", "exp_1"])
    with Replayer(model, made) as replayer:
        rows = replayer.run((x,), {}, num_samples=5)
        second = (x.tanh() + 1).tanh()
        assert torch.equal(rows["tanh_1:2"], second)
        assert torch.equal(rows["tanh_1:3"], (second + 1).tanh())
        model.times = 4
        with pytest.raises(PathDivergenceError, match="ran 4 times, where .* 3 times"):
            replayer.run((x,), {}, num_samples=5)
        model.times = 2
        with pytest.raises(
            PathDivergenceError, match=r"exp .* appeared when tanh \(ex"
        ):
            replayer.run((x,), {}, num_samples=5)


def test_same_shape_at_another_instruction_is_no_match() -> None:
    class Either(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.mean() > 0:
                return x.relu() + 1
            return x.abs().relu() + 2

    model = Either()
    made = plan(model, torch.rand(4, 3), "relu_1")
    with Replayer(model, made) as replayer:
        replayer.run((torch.rand(4, 3),), {}, num_samples=4)
        with pytest.raises(
            PathDivergenceError, match=r"relu \(execution 1\) in call 1"
        ):
            replayer.run((-torch.rand(4, 3),), {}, num_samples=4)


def test_module_called_twice_gives_the_ops_of_the_call_that_was_asked_for() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            return self.block(self.block(x))

    model, x = Twice(), torch.randn(5, 4)
    rows = replay(model, torch.randn(4, 4), "add_2", x)
    with torch.no_grad():
        first = model.block(x)
        expected = first + model.block.mlp(model.block.norm(first))
    assert torch.equal(rows["add_2"], expected)


def test_directly_called_module_is_armed_too() -> None:
    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            return self.block.forward(x)

    model, x = Caller(), torch.randn(5, 4)
    rows = replay(model, torch.randn(4, 4), "add_1", x)
    with torch.no_grad():
        assert torch.equal(rows["add_1"], x + model.block.mlp(model.block.norm(x)))


def test_armed_parent_and_armed_child_do_not_disturb_each_other() -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin() * 2

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.cos()).exp()

    model, x = Outer(), torch.randn(5, 4)
    rows = replay(model, torch.randn(4, 4), ["cos_1", "sin_1", "mul_1", "exp_1"], x)
    assert torch.equal(rows["cos_1"], x.cos())
    assert torch.equal(rows["sin_1"], x.cos().sin())
    assert torch.equal(rows["mul_1"], x.cos().sin() * 2)
    assert torch.equal(rows["exp_1"], (x.cos().sin() * 2).exp())


def test_checkpointed_ops_and_autograd_functions_are_caught_once() -> None:
    from torch.utils.checkpoint import checkpoint

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

    class Model(nn.Module):
        def body(self, x: Tensor) -> Tensor:
            return Double.apply(x.tanh())  # type: ignore[no-untyped-call]  # torch's

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.body, x, use_reentrant=False) + 1

    x = torch.randn(5, 4)
    rows = replay(Model(), torch.randn(4, 4), ["tanh_1", "mul_1"], x)
    assert torch.equal(rows["tanh_1"], x.tanh())
    assert torch.equal(rows["mul_1"], x.tanh() * 2)


def test_plan_from_json_catches_the_same_ops() -> None:
    model, x = Stack(), torch.randn(5, 4)
    made = plan(model, torch.randn(4, 4), ["add_2", "sub_1:1"])
    again = CapturePlan.from_json(made.to_json())
    with Replayer(model, made) as replayer:
        expected = replayer.run((x,), {}, num_samples=5)
    with Replayer(model, again) as replayer:
        rows = replayer.run((x,), {}, num_samples=5)
    assert list(rows) == list(expected)
    for name in rows:
        assert torch.equal(rows[name], expected[name])


def test_tensor_that_no_torch_call_made_is_refused_with_a_way_out() -> None:
    class Numpy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = _ThroughNumpy()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + 1

    layers: Selector = tl.func("unknown")
    with pytest.raises(PlanError, match=r"cannot be caught: no torch call .*'inner'"):
        plan(Numpy(), torch.randn(4, 3), layers)


class _ThroughNumpy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        import ctypes

        # Memory that torch is handed from outside, in a way that no mode sees.
        data = bytes(x.contiguous().untyped_storage())
        buffer = (ctypes.c_char * len(data)).from_buffer_copy(data)
        with torch._C.DisableTorchFunction():
            made = torch.frombuffer(bytearray(buffer), dtype=torch.float32)
            return made.clone().reshape(x.shape)


def test_op_of_a_users_hook_is_refused_with_a_way_out() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].register_forward_hook(lambda module, args, output: output.tanh())
    x = torch.randn(4, 3)
    with pytest.raises(PlanError, match="a hook on '0' made it.*Choose the module's"):
        plan(model, x, "tanh_1")
    rows = replay(model, x, "0", x)
    assert torch.equal(
        rows["0"], nn.functional.linear(x, *model[0].parameters()).tanh()
    )

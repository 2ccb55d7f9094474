"""User needs D: what is stored is what was there before anybody wrote over it."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchlens as tl
from torchlens.recording import record

from .recipes import CNN, MLP, OK, WIDTH, At, D, E, R, num_hooks

IMAGES = D(7, (3, 8, 8))
VECTORS = D(7)
MODES = [torch.enable_grad, torch.no_grad]


def first_rows(data: D) -> Tensor:
    return torch.stack([data[index]["x"] for index in range(4)])


def check_all_faces(
    model: nn.Module,
    data: D,
    layers: Any,
    reference: dict[str, np.ndarray[Any, Any]],
) -> None:
    """Compare every face that hands on tensors with the hooks' clones.

    The engine copies inside the hook, a replay without `out` keeps tensors as they are
    where that is safe, and a recording clones: three ways to get aliasing wrong.
    """
    for mode in MODES:
        with mode():
            OK(E(model, data, layers), reference)
            batch = first_rows(data)
            with tl.Replayer(model, tl.plan(model, batch.clone(), layers)) as replayer:
                kept = replayer.run((batch.clone(),), {}, num_samples=4)
                replayer.run((batch.clone() * 2,), {}, num_samples=4)
            recorded = record(model, batch.clone(), layers=layers)
        for name, rows in reference.items():
            np.testing.assert_array_equal(kept[name].numpy(), rows[:4])
            np.testing.assert_array_equal(recorded[name].numpy(), rows[:4])


def test_d1_a_convolution_is_stored_as_before_the_relu_in_place() -> None:
    model = CNN()
    layers = ["first", "act", "last"]
    reference = R(model, IMAGES, layers)
    assert (reference["first"] < 0).any()

    check_all_faces(model, IMAGES, layers, reference)

    assert model.act.inplace and type(model.act) is nn.ReLU
    assert num_hooks(model) == 0


def test_d1_only_the_overwritten_site_is_copied() -> None:
    plan = tl.plan(CNN(), first_rows(IMAGES), ["first", "act", "last"])
    assert {site.name: site.copy for site in plan.sites} == {
        "first": True,
        "act": False,
        "last": False,
    }


class WritesThroughView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        view = y.view(-1, 2, WIDTH // 2)
        view[:, 0] = 0
        y.mul_(2)
        return self.last(y)


def test_d1_a_write_through_a_view_does_not_reach_the_store() -> None:
    model = WritesThroughView()
    layers = ["first", "last", "view_1_2"]
    reference = R(model, VECTORS, ["first", "last"])
    reference["view_1_2"] = reference["first"].reshape(-1, 2, WIDTH // 2)
    check_all_faces(model, VECTORS, layers, reference)


def test_d1_an_in_place_op_is_stored_as_it_left_the_tensor() -> None:
    model = WritesThroughView()
    rows = R(model, VECTORS, ["first"])["first"]
    rows[:, : WIDTH // 2] = 0
    expected = {"setitem_1_3": rows.reshape(-1, 2, WIDTH // 2), "mul_1_4": rows * 2}
    check_all_faces(model, VECTORS, ["setitem_1_3", "mul_1_4"], expected)


class WritesUnseen(nn.Module):
    """Writes where neither a function mode nor a version counter sees it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 4)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.how == "numpy":
            y.detach().numpy()[:] = 7
        elif self.how == "data":
            y.data.mul_(3)
        else:
            with torch.no_grad():
                torch.exp(y, out=y)
        return self.last(y)


@pytest.mark.parametrize("how", ["numpy", "data", "out"])
def test_d1_hidden_writes_do_not_reach_the_store(how: str) -> None:
    model = WritesUnseen(how)
    layers = ["first", "last"]
    check_all_faces(model, VECTORS, layers, R(model, VECTORS, layers))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.act = nn.ReLU(inplace=True)
        self.last = nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        y += x
        return self.last(self.act(y))


def test_d1_a_residual_added_in_place_leaves_the_norm_as_it_was() -> None:
    model = Residual()
    layers = ["conv", "norm", "act", "last"]
    check_all_faces(model, IMAGES, layers, R(model, IMAGES, layers))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return y, y[:, : WIDTH // 2]


class WritesReturned(nn.Module):
    """Overwrites both tensors of a module's output after the module returned them."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair()
        self.same = nn.Identity()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        whole, part = self.pair(x)
        part.zero_()
        return self.act(self.same(whole))


def test_d1_outputs_overwritten_after_their_module_returned_are_kept() -> None:
    model = WritesReturned()
    reference = R(
        model,
        VECTORS,
        {
            "pair[0]": At("pair", lambda output: output[0]),
            "pair[1]": At("pair", lambda output: output[1]),
            "pair.linear": "pair.linear",
            "same": "same",
            "act": "act",
        },
    )
    assert (reference["pair[1]"] != 0).any() and (reference["same"] < 0).any()
    check_all_faces(model, VECTORS, ["pair", "pair.linear", "same", "act"], reference)


class ReusesBuffer(nn.Module):
    """Returns the same memory in every forward, written anew."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.cache: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.cache is None or self.cache.shape != x.shape:
            self.cache = torch.zeros_like(x)
        return self.cache.copy_(self.linear(x).detach())


def test_d1_memory_that_the_model_uses_again_is_copied() -> None:
    model = nn.Sequential(ReusesBuffer(), nn.Linear(WIDTH, 2))
    layers = ["0", "1"]
    check_all_faces(model, VECTORS, layers, R(model, VECTORS, layers))


def test_d2_the_input_of_a_relu_in_place_is_stored_unmodified() -> None:
    model = CNN()
    reference = R(
        model,
        IMAGES,
        {
            "act.input[0]": At("act", lambda given: given[0], of_input=True),
            "last.input[0]": At("last", lambda given: given[0], of_input=True),
        },
    )
    assert (reference["act.input[0]"] < 0).any()
    layers = [tl.module_input("act"), tl.module_input("last")]
    check_all_faces(model, IMAGES, layers, reference)


class WritesOwnInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x.relu_()
        return self.last(x)


def test_d2_the_models_own_input_is_stored_unmodified() -> None:
    model = WritesOwnInput()
    reference = {
        "given": torch.stack([VECTORS[i]["x"] for i in range(7)]).numpy(),
        **R(model, VECTORS, ["last"]),
    }
    layers = {"given": tl.module_input("self"), "last": "last"}
    check_all_faces(model, VECTORS, layers, reference)


@pytest.mark.parametrize("batch_size", [4, 7])
def test_d2_a_tensor_dataset_is_not_modified(batch_size: int) -> None:
    data = torch.randn(7, WIDTH)
    before = data.clone()
    store = E(WritesOwnInput(), data, ["last"], batch_size=batch_size)
    assert store["last"].shape == (7, 2)
    assert torch.equal(data, before)


def test_d2_a_pre_hook_that_writes_is_seen_as_the_module_sees_it() -> None:
    model = MLP()
    model.act.register_forward_pre_hook(lambda _, given: (given[0].mul_(3),))
    reference = R(
        model,
        VECTORS,
        {
            "first": "first",
            "act": "act",
            "act.input[0]": At("act", lambda given: given[0], of_input=True),
        },
    )
    np.testing.assert_array_equal(reference["act.input[0]"], reference["first"] * 3)
    layers = ["first", "act", tl.module_input("act")]
    check_all_faces(model, VECTORS, layers, reference)


class Doubles(nn.Module):
    def forward(self, *, x: Tensor) -> Tensor:
        return x.mul_(2)


class CallsByKeyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.twice = Doubles()

    def forward(self, x: Tensor) -> Tensor:
        return self.twice(x=self.linear(x))


def test_d2_a_keyword_input_written_by_hook_and_module_is_stored_between() -> None:
    model = CallsByKeyword()
    model.twice.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {"x": kwargs["x"].add_(3)}), with_kwargs=True
    )
    reference = R(
        model,
        VECTORS,
        {
            "linear": "linear",
            'twice.input["x"]': At("twice", lambda given: given[0], of_input=True),
            "twice": "twice",
        },
    )
    layers = ["linear", tl.module_input("twice"), "twice"]
    check_all_faces(model, VECTORS, layers, reference)


def test_d1_hooks_of_the_caller_run_before_ours_and_stay() -> None:
    model = MLP()
    model.first.register_forward_hook(lambda *given: given[-1] * 2)
    model.act.register_forward_hook(lambda *given: given[-1].add_(1))
    layers = ["first", "act", "last"]
    before = num_hooks(model)
    check_all_faces(model, VECTORS, layers, R(model, VECTORS, layers))
    assert num_hooks(model) == before == 2

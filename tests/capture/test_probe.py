"""The proof of the batch axis, and the self-checks that a plan makes."""

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from torchlens.axis_proof import PROBE_SAMPLES, prove_axis
from torchlens.errors import InputError, PlanError, TorchLensWarning
from torchlens.planner import plan
from torchlens.replayer import Replayer
from torchlens.row_layout import RowLayout


class Applied(nn.Module):
    """Calls a function in a submodule, so that its result is a site."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.inner = _Function(function)

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        value = self.inner(x, *more)
        total: Tensor = x.sum(dim=tuple(range(1, x.ndim)))
        return total + 0 * value.sum()


class _Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def rows_of(function: Callable[..., Any], x: Tensor, **options: Any) -> Tensor:
    """Return the rows that a plan made from other samples gives for `x`."""
    model = Applied(function)
    made = plan(model, torch.randn_like(x[:3]) if len(x) > 2 else x, "inner", **options)
    with Replayer(model, made) as replayer:
        return replayer.run((x,), {}, num_samples=len(x))["inner"]


@given(
    st.integers(0, 2),
    st.sampled_from(["", "batch_major", "batch_minor"]),
    st.integers(2, 3),
    st.integers(1, 3),
)
@settings(deadline=None, max_examples=60)
def test_axis_proof_finds_every_layout(
    axis: int, merged: str, group: int, size: int
) -> None:
    generator = torch.Generator().manual_seed(axis + group)
    rows = torch.randn(3, *([size] * 2), group, generator=generator)

    def arrange(part: Tensor) -> Tensor:
        """Put samples and group at `axis`, as the layout says."""
        if not merged:
            return part.movedim(0, axis)
        pair = (0, 3) if merged == "batch_major" else (3, 0)
        moved = part.movedim(pair, (axis, axis + 1))
        return moved.flatten(axis, axis + 1)

    values = [arrange(rows[list(samples)]) for samples in PROBE_SAMPLES]
    proof = prove_axis(values)
    assert proof.kind == "rows"
    assert proof.layout is not None
    assert (proof.layout.batch_axis, proof.layout.merged) == (axis, merged)
    assert proof.layout.caught_shape(3) == values[0].shape
    assert proof.layout.caught_shape(2) == values[1].shape
    back = proof.layout.rows(values[0], 3)
    assert back.shape == (3, *proof.layout.row_shape)
    expected = rows if not merged else rows.movedim(3, axis + 1)
    assert torch.equal(back, expected)


def test_rows_of_one_fixed_size_axis_are_never_guessed() -> None:
    """A constant size of 3, equal to the probe's batch, is no sample axis."""
    x = torch.randn(5, 4)
    rows = rows_of(lambda x: torch.stack([x, x + 1, x + 2]), x)
    assert torch.equal(rows, torch.stack([x, x + 1, x + 2], dim=1))


def test_heads_merged_with_the_batch_are_taken_apart() -> None:
    x = torch.randn(5, 6)
    major = rows_of(lambda x: x.reshape(-1, 2), x)
    assert torch.equal(major, x.reshape(5, 3, 2))
    minor = rows_of(lambda x: x.reshape(-1, 3, 2).transpose(0, 1).reshape(-1, 2), x)
    assert torch.equal(minor, x.reshape(5, 3, 2))


def test_other_input_axis_holds_the_samples() -> None:
    x = torch.randn(7, 5)
    model = Applied(lambda x: x * 2)
    made = plan(model, x, "inner", batch_axis=1)
    with Replayer(model, made) as replayer:
        rows = replayer.run((x,), {}, num_samples=5)["inner"]
    assert torch.equal(rows, (x * 2).T)


def test_constant_is_refused_and_stored_when_permitted() -> None:
    table = torch.arange(4.0)
    with pytest.raises(PlanError, match=r"'inner' has no batch axis.*constants"):
        rows_of(lambda x: table * 2, torch.randn(5, 4))
    rows = rows_of(lambda x: table * 2, torch.randn(5, 4), allow=("constants",))
    assert torch.equal(rows, (table * 2).expand(5, 4))


def test_sizes_that_do_not_change_are_no_constant_if_values_do() -> None:
    with pytest.raises(PlanError, match=r"mixes samples.*its values differ.*'mean_"):
        rows_of(lambda x: x.mean(dim=0), torch.randn(5, 4))


def test_pairs_of_samples_have_no_rows() -> None:
    with pytest.raises(PlanError, match="more than one axis follows the batch"):
        rows_of(lambda x: x @ x.T, torch.randn(5, 4))


def test_size_that_grows_out_of_proportion_is_refused() -> None:
    with pytest.raises(PlanError, match="no axis grows in proportion"):
        rows_of(lambda x: torch.cat([x, x[:1]]), torch.randn(5, 4))


def test_equal_values_leave_a_merged_axis_ambiguous() -> None:
    with pytest.raises(PlanError, match="cannot be told apart"):
        rows_of(lambda x: x.reshape(-1, 2) * 0, torch.randn(5, 4))


def test_mixing_names_the_op_and_can_be_permitted() -> None:
    def centred(x: Tensor) -> Tensor:
        return (x - x.mean(dim=0)).relu()

    x = torch.randn(5, 4)
    with pytest.raises(PlanError, match=r"First op that differs: 'mean_.*test_probe"):
        rows_of(centred, x)
    model = Applied(centred)
    made = plan(model, x, "inner", allow=("mixing",))
    assert any("mixes samples" in note for note in made.notes)
    assert not next(c for c in made.checks if "alone" in c.name).passed
    with Replayer(model, made) as replayer:
        rows = replayer.run((x,), {}, num_samples=5)["inner"]
    assert torch.equal(rows, centred(x))


def test_batch_norm_in_train_mode_is_named() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with pytest.raises(PlanError, match="batch norm in train mode computes statistics"):
        plan(model, torch.randn(4, 3), "1", training=True)
    made = plan(model, torch.randn(4, 3), "1", training=True, allow=("mixing",))
    assert made.sites[0].row_shape == (3,)
    assert "does not run on 1 sample" in " ".join(made.notes)
    assert plan(model, torch.randn(4, 3), "1").training is False
    assert model.training


def test_missing_attention_mask_is_hinted_at() -> None:
    class Padded(nn.Module):
        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return x - x.mean()

    with pytest.raises(PlanError, match="takes an attention_mask and none was given"):
        plan(Padded(), torch.randn(4, 3), "self")


def test_functional_dropout_warns_with_op_and_line() -> None:
    def dropped(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5)

    model = Applied(dropped)
    with pytest.warns(TorchLensWarning, match=r"dropout.*test_probe\.py:\d+"):
        made = plan(model, torch.randn(4, 30), "inner")
    check = next(c for c in made.checks if "twice" in c.name)
    assert not check.passed
    assert made.sites[0].layout == RowLayout(0, "", 1, (30,))


def test_dropout_module_in_eval_mode_is_silent() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout()).train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = plan(model, torch.randn(4, 3), "1")
    assert all(check.passed for check in made.checks)


def test_fixed_batch_size_is_refused_then_padded_and_cut() -> None:
    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(4, 3, 2).transpose(0, 1) * 2

    model = Fixed()
    x = torch.randn(4, 6)
    with pytest.raises(PlanError, match=r"runs on the example's 4 samples, but not on"):
        plan(model, x, "self")
    made = plan(model, x, "self", allow=("fixed_batch",))
    assert made.fixed_batch == 4
    with Replayer(model, made) as replayer:
        short = replayer.run((x[:3],), {}, num_samples=3)["self"]
        whole = replayer.run((x,), {}, num_samples=4)["self"]
        with pytest.raises(InputError, match="A batch of 1 to 4 samples was wanted"):
            replayer.run((x,), {}, num_samples=5)
    assert torch.equal(whole, x.view(4, 3, 2) * 2)
    assert torch.equal(short, whole[:3])


def test_batch_of_three_only_names_the_other_sizes() -> None:
    model = Applied(lambda x: x.view(3, 4) + 1)
    with pytest.raises(PlanError, match=r"runs on a batch of 3 samples, but not on 2"):
        plan(model, torch.randn(3, 4), "inner")


def test_path_that_depends_on_the_batch_size_is_refused() -> None:
    class Summed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return sum([v.relu() + 1 for v in x.split(1)])  # type: ignore[return-value]

    with pytest.raises(PlanError, match="takes another path for"):
        plan(Summed(), torch.randn(3, 4), {"third": "add_1:3"})


def test_example_with_one_sample_is_enough() -> None:
    model = nn.Linear(3, 2)
    made = plan(model, torch.zeros(1, 3), "self")
    assert made.sites[0].row_shape == (2,)


def test_inputs_that_do_not_fit_the_signature_are_refused() -> None:
    with pytest.raises(InputError, match=r"Linear.forward cannot be called.*'input'"):
        plan(nn.Linear(3, 2), {"x": torch.zeros(2, 3)}, "self")
    with pytest.raises(InputError, match="The forward of Linear failed"):
        plan(nn.Linear(3, 2), torch.zeros(2, 4), "self")


def test_sparse_site_is_refused() -> None:
    with pytest.raises(PlanError, match="'inner' is a sparse_coo tensor"):
        plan(_Sparse(), torch.randn(4, 3), "inner")


class _Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _Function(lambda x: x.to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        dense: Tensor = self.inner(x).to_dense()
        return dense


def test_forward_that_leaves_tensors_on_the_model_runs_without_inference_mode() -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)
            self.cache: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.cache is None:
                self.cache = torch.arange(3.0)
            out: Tensor = self.inner(x) + self.cache
            return out

    model = Cached()
    made = plan(model, torch.randn(4, 3), "inner")
    assert made.inference is False
    assert plan(nn.Linear(3, 2), torch.randn(4, 3), "self").inference is True


def test_model_and_generators_are_left_as_found() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout()).train()
    model[1].eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    plan(model, torch.randn(4, 3, generator=torch.Generator()), ["0", "batchnorm_1"])
    assert torch.equal(torch.get_rng_state(), state)
    assert (model.training, model[1].training) == (True, False)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
    for module in model.modules():
        assert "forward" not in vars(module)
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_model_that_sorts_its_batch_is_refused(order: tuple[int, ...]) -> None:
    class Sorting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[x[:, 0].argsort()]

    x = torch.tensor([[0.0, 5.0], [1.0, 4.0], [2.0, 3.0]])[list(order)]
    with pytest.raises(PlanError, match="mixes samples"):
        plan(Sorting(), x, "self")

"""The plan as data: JSON, digest, dtypes, forecast, table, refusals."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchlens.errors import InputError, ModelError, PlanError, SelectorError
from torchlens.forecast import Forecast, format_bytes, shard_rows
from torchlens.identity import identify
from torchlens.planner import plan
from torchlens.plans import CapturePlan


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))


@pytest.fixture
def made() -> CapturePlan:
    return plan(model_of(), torch.randn(4, 6), ["0", "relu_1", "2"], dtype="float16")


def test_json_gives_the_same_plan_without_code(made: CapturePlan) -> None:
    text = made.to_json()
    again = CapturePlan.from_json(text)
    assert again == made
    assert again.digest == made.digest
    assert json.loads(text)["sites"][0]["name"] == "0"
    assert json.loads(text)["python_version"].startswith("3.")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: "{", "The plan is not JSON"),
        (lambda body: "[]", "is no capture plan"),
        (lambda body: json.dumps(body | {"format": "x"}), "is no capture plan"),
        (lambda body: json.dumps(body | {"version": 99}), "has version 99, but this"),
        (lambda body: json.dumps(body | {"sites": [{}]}), "JSON is damaged: KeyError"),
        (lambda body: json.dumps(body | {"sites": []}), "at least one site"),
        (lambda body: json.dumps(body | {"training": True}), "was changed after"),
    ],
)
def test_json_that_is_no_plan_is_refused(
    made: CapturePlan, change: Any, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        CapturePlan.from_json(change(json.loads(made.to_json())))


def test_digest_tells_what_determines_values() -> None:
    x = torch.randn(4, 6)
    base = plan(model_of(), x, "0")
    assert plan(model_of(), torch.randn(4, 6), "0").digest == base.digest
    assert plan(model_of(1), x, "0").digest != base.digest
    assert plan(model_of(), x, "2").digest != base.digest
    assert plan(model_of(), x, "0", dtype="float16").digest != base.digest
    assert plan(model_of(), x, "0", training=True).digest != base.digest
    for other in (
        replace(base, torch_version="0"),
        replace(base, notes=("a",)),
        replace(base, inference=False),
    ):
        assert other.digest == base.digest


def test_changed_code_changes_the_digest() -> None:
    class Scaled(nn.Module):
        def __init__(self, twice: bool) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 4)
            self.twice = twice

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x.relu() if self.twice else x.tanh())

    torch.manual_seed(0)
    one = Scaled(True)
    other = Scaled(False)
    other.load_state_dict(one.state_dict())
    x = torch.randn(4, 6)
    assert plan(one, x, "fc").digest != plan(other, x, "fc").digest


def test_identity_covers_weights_buffers_and_settings() -> None:
    base = identify(nn.Sequential(nn.BatchNorm1d(3), nn.LeakyReLU(0.1)))
    settings = identify(nn.Sequential(nn.BatchNorm1d(3), nn.LeakyReLU(0.2)))
    assert (settings.weights, settings.config == base.config) == (base.weights, False)
    changed = nn.Sequential(nn.BatchNorm1d(3), nn.LeakyReLU(0.1))
    changed[0].running_mean[1] = 1
    assert identify(changed).weights != base.weights
    assert identify(changed).config == base.config
    hidden = nn.Sequential(nn.BatchNorm1d(3), nn.LeakyReLU(0.1))
    hidden[0].register_buffer("extra", torch.ones(1), persistent=False)
    assert identify(hidden).weights != base.weights
    half = nn.Linear(2, 2, bias=False).to(torch.bfloat16)
    assert identify(half).weights != identify(nn.Linear(2, 2, bias=False)).weights


def test_plan_lists_sites_in_the_order_in_which_they_come() -> None:
    made = plan(model_of(), torch.randn(4, 6), ["2", "relu_1", "0"])
    assert made.names == ("0", "relu_1", "2")
    assert made.halt_after == 2
    assert made.model_name == "Sequential"


def test_dtype_for_all_leaves_integers_alone() -> None:
    class Top(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.topk(2).indices + 1

    made = plan(Top(), torch.randn(4, 6), ["topk_1", "topk_2"], dtype=torch.bfloat16)
    stored = {site.name: (site.dtype, site.stored_dtype) for site in made.sites}
    assert stored == {"topk_1": ("float32", "bfloat16"), "topk_2": ("int64", "int64")}
    made = plan(
        Top(), torch.randn(4, 6), ["topk_1", "topk_2"], dtype={"topk_2": "int8"}
    )
    assert [site.stored_dtype for site in made.sites] == ["float32", "int8"]


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        ("float12", r"dtype='float12' is not known. Use one of float64, float32"),
        (3, "dtype=3 is not known"),
        ("int8", "only floating-point dtypes can be"),
        ({"0": "int8"}, "'0' is float32 and cannot be kept as int8"),
        ({"x": "float16"}, "dtype names the site 'x', which the plan does not have"),
    ],
)
def test_dtypes_that_do_not_fit_are_refused(dtype: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan(model_of(), torch.randn(4, 6), ["0"], dtype=dtype)


def test_layers_and_models_that_do_not_fit_are_refused() -> None:
    x = torch.randn(4, 6)
    with pytest.raises(ModelError, match="nn.Module was wanted"):
        plan(lambda x: x, x, "0")  # type: ignore[arg-type]  # the point of the test
    with pytest.raises(SelectorError, match="no layer 'conv1'"):
        plan(model_of(), x, "conv1")
    with pytest.raises(SelectorError, match="empty"):
        plan(model_of(), x, [])
    with pytest.raises(InputError, match="A list of 1 items"):
        plan(model_of(), [x], "0")
    with pytest.raises(
        PlanError, match="allow was wanted as a collection of constants"
    ):
        plan(model_of(), x, "0", allow=("anything",))
    with pytest.raises(PlanError, match="but 'mixing' came"):
        plan(model_of(), x, "0", allow="mixing")


def test_two_sites_of_one_name_are_refused(made: CapturePlan) -> None:
    with pytest.raises(PlanError, match="Two sites of the plan are called '0'"):
        replace(made, sites=(made.sites[0], made.sites[0]))


def test_summary_is_a_table_of_sites_and_checks(made: CapturePlan) -> None:
    text = made.summary()
    assert (
        "Sequential: 3 sites, eval mode, autocast off, forward ends after '2'" in text
    )
    row = next(line for line in text.splitlines() if line.startswith("relu_1"))
    assert row.split() == "relu_1 relu_1_2 [4] axis 0 float32 -> float16 8 B".split()
    assert "check same batch twice is identical: passed" in text
    assert made.digest in text


def test_forecast_counts_rows_bytes_and_files(made: CapturePlan) -> None:
    forecast = made.forecast(1000)
    assert forecast.num_rows == 1000
    assert forecast.num_bytes == 1000 * (4 + 4 + 2) * 2
    assert [site.row_bytes for site in forecast.sites] == [8, 8, 4]
    assert forecast.device_bytes > made.weight_bytes == (6 * 4 + 4 + 4 * 2 + 2) * 4
    assert isinstance(forecast, Forecast)
    assert str(forecast).startswith("1000 rows, 19.5 KiB in")


def test_shards_are_powers_of_two_within_64_mib() -> None:
    assert shard_rows(1 << 20, 1_000_000) == 64
    assert shard_rows((1 << 20) + 1, 1_000_000) == 32
    assert shard_rows(1 << 40, 10) == 1
    assert shard_rows(4, 5) == 4
    assert [format_bytes(n) for n in (3, 2048, 5 << 30)] == [
        "3 B",
        "2.0 KiB",
        "5.0 GiB",
    ]

"""Rows E6 to E9 and E11: dtypes as they are, numbers that do not fit, autocast."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchlens as tl

from .recipes import MLP, OK, WIDTH, D, E, R, language_model

LARGEST_HALF = 65504.0


def hooked(model: nn.Module, data: Any, layer: str, autocast: Any = None) -> Tensor:
    """Return the rows of a layer in the dtype that a plain hook sees."""
    seen: list[Tensor] = []
    model.eval()
    handle = model.get_submodule(layer).register_forward_hook(
        lambda module, args, output: seen.append(output.detach().clone())
    )
    with torch.no_grad(), torch.autocast("cpu", autocast, enabled=bool(autocast)):
        for start in range(0, len(data), 4):
            rows = range(start, min(start + 4, len(data)))
            model(torch.stack([data[row]["x"] for row in rows]))
    handle.remove()
    return torch.cat(seen)


def bits(rows: Tensor) -> np.ndarray[Any, Any]:
    return rows.view(torch.int16).numpy().view(np.uint16)


class Items(list[dict[str, Any]]):
    """Items s0, s1 ... of the given rows."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__({"id": f"s{i}", "x": row} for i, row in enumerate(rows))


class Gives(nn.Module):
    """A parameterless layer that maps its input by a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.layer = nn.Identity()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.function(x))


def counters(store: tl.Store, layer: str) -> dict[str, Any]:
    """Return what the commit records count of a layer; nothing if it is sound."""
    return store.counters.get(layer, {})


# E6: bfloat16 and every other dtype reach the reader as they were.


def test_e6_bfloat16_is_stored_bit_for_bit(tmp_path: Path) -> None:
    model = MLP().bfloat16()
    data = Items(torch.randn(10, WIDTH).bfloat16())
    expected = hooked(model, data, "first")
    E(model, data, "first", tmp_path / "store")
    reader = tl.open_store(tmp_path / "store")["first"]
    assert reader.dtype_name == "bfloat16"
    found = reader[:]
    assert found.dtype.name == "bfloat16"
    np.testing.assert_array_equal(found.view(np.uint16), bits(expected))
    np.testing.assert_array_equal(found.astype(np.float32), expected.float().numpy())


def test_e6_a_bfloat16_language_model_is_stored_bit_for_bit() -> None:
    model = language_model().bfloat16()
    tokens = torch.randint(3, 50, (6, 5), generator=torch.Generator().manual_seed(0))
    seen: list[Tensor] = []
    layer = model.get_submodule("h.1.mlp")
    handle = layer.register_forward_hook(lambda m, a, o: seen.append(o.clone()))
    with torch.no_grad():
        for part in tokens.split(4):
            model(part)
    handle.remove()
    store = E(model, tokens, "h.1.mlp")
    assert store["h.1.mlp"].dtype_name == "bfloat16"
    np.testing.assert_array_equal(
        store["h.1.mlp"][:].view(np.uint16), bits(torch.cat(seen))
    )


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (lambda x: x.double() / 3, np.float64),
        (lambda x: x.half(), np.float16),
        (lambda x: (x * 1000).long(), np.int64),
        (lambda x: (x * 1000).int(), np.int32),
        (lambda x: (x * 100).short(), np.int16),
        (lambda x: (x * 10).to(torch.int8), np.int8),
        (lambda x: (x.abs() * 10).to(torch.uint8), np.uint8),
        (lambda x: x > 0, np.bool_),
        (lambda x: torch.fft.fft(x), np.complex64),
        (lambda x: torch.fft.fft(x.double()), np.complex128),
    ],
)
def test_e6_every_dtype_comes_back_as_it_was(
    function: Any, dtype: Any, tmp_path: Path
) -> None:
    model, data = Gives(function), D(9)
    expected = hooked(model, data, "layer").numpy()
    E(model, data, "layer", tmp_path / "store")
    found = tl.open_store(tmp_path / "store")["layer"][:]
    assert found.dtype == expected.dtype == dtype
    np.testing.assert_array_equal(found, expected)


def test_e6_a_dtype_by_layer_casts_that_layer_alone(tmp_path: Path) -> None:
    model, data = MLP(), D(10)
    reference = R(model, data, ["first", "act", "last"])
    store = E(
        model,
        data,
        ["first", "act", "last"],
        tmp_path / "store",
        dtype={"first": "float16", "act": torch.bfloat16},
    )
    names = {name: store[name].dtype_name for name in store.layers}
    assert names == {"first": "float16", "act": "bfloat16", "last": "float32"}
    half = reference["first"].astype(np.float16)
    np.testing.assert_array_equal(store["first"][:], half)
    brain = torch.from_numpy(reference["act"]).bfloat16()
    np.testing.assert_array_equal(store["act"][:].view(np.uint16), bits(brain))
    np.testing.assert_array_equal(store["last"][:], reference["last"])


def test_e6_a_dtype_that_would_lose_values_is_refused() -> None:
    with pytest.raises(tl.PlanError, match="is int64 and cannot be kept as float16"):
        E(Gives(lambda x: x.long()), D(8), "layer", dtype={"layer": "float16"})
    with pytest.raises(tl.PlanError, match="dtype names the site 'lost'"):
        E(MLP(), D(8), "first", dtype={"lost": "float16"})
    with pytest.raises(tl.InputError, match="no torch dtype"):
        E(MLP(), D(8), "first", dtype={"first": "half8"})


def test_e6_dtype_beside_a_finished_plan_is_refused() -> None:
    model = MLP()
    plan = tl.plan(model, torch.randn(4, WIDTH), "first")
    with pytest.raises(tl.InputError, match="Give dtype= and allow= to tl.plan"):
        E(model, D(8), plan, dtype="float16")


def test_e6_one_dtype_for_all_leaves_integers_alone() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.values, self.picks = nn.Identity(), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return self.picks(self.values(x).argmax(1))

    store = E(Both(), D(8), ["values", "picks"], dtype="float16")
    assert store["values"].dtype == np.float16
    assert store["picks"].dtype == np.int64


# E7: a cast that overflows is counted, refused or cut, and never silent.


def wide(layer_value: float = 7e4) -> tuple[nn.Module, Items]:
    """Return a layer whose sample s5 alone passes what float16 holds."""
    rows = torch.ones(10, WIDTH)
    rows[5, 2] = layer_value
    rows[5, 3] = -layer_value
    return Gives(lambda x: x * 1.0), Items(rows)


def test_e7_overflow_is_kept_counted_and_its_ids_listed(tmp_path: Path) -> None:
    model, data = wide()
    E(model, data, "layer", tmp_path / "store", dtype="float16")
    store = tl.open_store(tmp_path / "store")
    found = store["layer"][:]
    assert np.isposinf(found[5, 2]) and np.isneginf(found[5, 3])
    assert np.isfinite(np.delete(found, 5, axis=0)).all()
    total = counters(store, "layer")
    assert total["overflowed_values"] == 2
    assert total["overflowed_rows"] == 1
    assert total["overflowed_ids"] == ["s5"]


def test_e7_overflow_is_refused_with_ids_when_asked() -> None:
    model, data = wide()
    with pytest.raises(tl.NonFiniteError) as caught:
        E(model, data, "layer", dtype="float16", nonfinite="raise")
    text = str(caught.value)
    assert "2 values too large for the dtype" in text and "'s5'" in text
    assert 'nonfinite="saturate"' in text and "wider dtype" in text


def test_e7_overflow_is_cut_to_the_largest_value_when_asked() -> None:
    model, data = wide()
    store = E(model, data, "layer", dtype="float16", nonfinite="saturate")
    found = store["layer"][:]
    assert found[5, 2] == LARGEST_HALF and found[5, 3] == -LARGEST_HALF
    assert counters(store, "layer")["overflowed_ids"] == ["s5"]


def test_e7_values_that_fit_are_cast_as_numpy_casts_them() -> None:
    rows = torch.linspace(-LARGEST_HALF, LARGEST_HALF, 80).reshape(10, WIDTH)
    store = E(Gives(lambda x: x * 1.0), Items(rows), "layer", dtype="float16")
    np.testing.assert_array_equal(store["layer"][:], rows.numpy().astype(np.float16))
    assert counters(store, "layer") == {}


@pytest.mark.parametrize("policy", ["keep", "saturate"])
def test_e7_overflow_beside_nan_and_infinity_is_told_apart(policy: str) -> None:
    rows = torch.ones(8, WIDTH)
    rows[1, 0], rows[2, 0], rows[3, 0] = 7e4, float("inf"), float("nan")
    store = E(
        Gives(lambda x: x * 1.0),
        Items(rows),
        "layer",
        dtype="float16",
        nonfinite=policy,
    )
    found, total = store["layer"][:], counters(store, "layer")
    assert total["overflowed_values"] == 1 and total["overflowed_ids"] == ["s1"]
    assert np.isnan(found[3, 0])
    assert found[1, 0] == (np.inf if policy == "keep" else LARGEST_HALF)


@pytest.mark.parametrize(
    ("function", "dtype", "largest"),
    [
        (lambda x: x.double() * 1e300, "float32", np.finfo(np.float32).max),
        (lambda x: torch.complex(x, x).cdouble() * 1e300, "complex64", None),
    ],
    ids=["float64 to float32", "complex128 to complex64"],
)
def test_e7_every_narrowing_cast_is_watched(
    function: Any, dtype: str, largest: float | None
) -> None:
    data = Items(torch.ones(8, WIDTH))
    store = E(Gives(function), data, "layer", dtype={"layer": dtype})
    assert counters(store, "layer")["overflowed_rows"] == 8
    with pytest.raises(tl.NonFiniteError, match="too large for the dtype"):
        E(Gives(function), data, "layer", dtype={"layer": dtype}, nonfinite="raise")
    if largest is not None:
        store = E(
            Gives(function), data, "layer", dtype={"layer": dtype}, nonfinite="saturate"
        )
        assert (store["layer"][:] == largest).all()


def test_e7_integers_that_do_not_fit_are_watched_too() -> None:
    rows = torch.ones(8, WIDTH)
    rows[6, 1] = 300
    model = Gives(lambda x: x.long())
    # 300 would wrap to 44, a number like any other, so even "keep" refuses it.
    for policy in ("keep", "raise"):
        with pytest.raises(tl.NonFiniteError, match="'s6'") as caught:
            E(model, Items(rows), "layer", dtype={"layer": "int8"}, nonfinite=policy)
        assert 'nonfinite="keep"' not in str(caught.value)
    store = E(
        model, Items(rows), "layer", dtype={"layer": "int8"}, nonfinite="saturate"
    )
    assert store["layer"][6, 1] == 127
    assert counters(store, "layer")["overflowed_ids"] == ["s6"]
    rows[6, 1] = -100
    store = E(model, Items(rows), "layer", dtype={"layer": "int8"})
    assert store["layer"][6, 1] == -100 and store["layer"].dtype == np.int8


# E8: values that are not finite are found, listed and kept or refused.


class Breaks(nn.Module):
    """Gives NaN for rows that begin with 7, and infinity for those with 9."""

    def __init__(self) -> None:
        super().__init__()
        self.body = MLP()
        self.end = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        bad = torch.where(x[:, :1] == 7, torch.nan, 0.0)
        bad = bad + torch.where(x[:, :1] == 9, torch.inf, 0.0)
        return self.end(y + bad)


def broken(*, nan: int | None = None, inf: int | None = None) -> Items:
    rows = torch.stack([D(12)[i]["x"] for i in range(12)])
    if nan is not None:
        rows[nan, 0] = 7
    if inf is not None:
        rows[inf, 0] = 9
    return Items(rows)


def test_e8_a_nan_row_is_kept_and_listed(tmp_path: Path) -> None:
    data = broken(nan=7)
    layers = {"out": "end", "body": "body"}
    E(Breaks(), data, layers, tmp_path / "store")
    store = tl.open_store(tmp_path / "store")
    assert np.isnan(store["out"].rows(ids=["s7"])).all()
    good = [row for row in range(12) if row != 7]
    assert np.isfinite(store["out"][good]).all()
    assert np.isfinite(store["body"][:]).all()
    total = counters(store, "out")
    assert total["nonfinite_ids"] == ["s7"]
    assert total["nonfinite_values"] == WIDTH and total["nonfinite_rows"] == 1
    assert list(store.counters) == ["out"]


def test_e8_the_manifest_on_disk_lists_the_sample(tmp_path: Path) -> None:
    E(Breaks(), broken(nan=7, inf=2), {"out": "end"}, tmp_path / "store")
    (manifest,) = (tmp_path / "store" / "_run").glob("*/manifest.json")
    text = json.dumps(json.loads(manifest.read_text()))
    assert '"s7"' in text and '"s2"' in text and '"s3"' not in text


def test_e8_nan_is_refused_with_its_id_and_nothing_is_published(tmp_path: Path) -> None:
    with pytest.raises(tl.NonFiniteError, match="NaN or infinite, in the samples 's7'"):
        E(
            Breaks(),
            broken(nan=7),
            {"out": "end"},
            tmp_path / "store",
            nonfinite="raise",
            block_rows=4,
        )
    partial = tl.open_store(tmp_path / "store", allow_partial=True)
    assert not partial.complete
    assert np.isfinite(partial["out"][:]).all()
    assert "s7" not in partial["out"].ids


def test_e8_infinity_counts_as_much_as_nan() -> None:
    with pytest.raises(tl.NonFiniteError, match="'s2', 's7'"):
        E(
            Breaks(),
            broken(nan=7, inf=2),
            {"out": "end"},
            nonfinite="raise",
            batch_size=16,
        )


def test_e8_the_summary_names_layer_and_sample(
    capfd: pytest.CaptureFixture[str],
) -> None:
    E(Breaks(), broken(nan=7), {"out": "end"}, progress=True)
    err = capfd.readouterr().err
    assert f"out: {WIDTH} values in 1 rows are NaN or infinite: s7" in err


def test_e8_a_complex_nan_is_found() -> None:
    rows = torch.ones(8, WIDTH)
    rows[3, 3] = float("nan")
    store = E(Gives(torch.fft.fft), Items(rows), "layer")
    assert counters(store, "layer")["nonfinite_ids"] == ["s3"]


# E9: what a quantised layer emits is what is recorded.


def quantised(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        # torch announces that its quantisation is moving out.
        warnings.simplefilter("ignore")
        model: nn.Module = torch.ao.quantization.quantize_dynamic(
            MLP(), {nn.Linear}, dtype=torch.qint8
        )
    return model


def test_e9_a_dynamic_int8_model_is_recorded_as_float32(tmp_path: Path) -> None:
    model, data = quantised(), D(12)
    layers = ["first", "last"]
    E(model, data, layers, tmp_path / "store", allow=["mixing"])
    store = tl.open_store(tmp_path / "store")
    for layer in layers:
        expected = hooked(model, data, layer)
        assert expected.dtype is torch.float32
        assert store[layer].dtype_name == "float32"
        np.testing.assert_array_equal(store[layer][:], expected.numpy())
        assert store.info()["layers"][layer]["identity"]["dtype"] == "float32"


def test_e9_dynamic_scales_depend_on_the_batch_and_are_refused_by_name() -> None:
    with pytest.raises(tl.PlanError, match="mixes samples") as caught:
        E(quantised(), D(12), "first")
    text = str(caught.value)
    assert "(linear_dynamic) in module 'first'" in text
    assert "dynamic quantisation takes its scale from the whole batch" in text
    assert 'allow=("mixing",)' in text


def test_e9_other_int8_weights_are_another_model(tmp_path: Path) -> None:
    E(quantised(0), D(12), "first", tmp_path / "store", allow=["mixing"])
    with pytest.raises(tl.ResumeError, match="weights"):
        E(quantised(1), D(12), "first", tmp_path / "store", allow=["mixing"])


# E11: autocast decides the dtype, and belongs to the identity of a run.


def test_e11_autocast_stores_bfloat16_bit_for_bit() -> None:
    model, data = MLP(), D(10)
    expected = hooked(model, data, "first", torch.bfloat16)
    assert expected.dtype is torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        store = E(model, data, "first")
    assert next(model.parameters()).dtype is torch.float32
    assert store["first"].dtype_name == "bfloat16"
    np.testing.assert_array_equal(store["first"][:].view(np.uint16), bits(expected))
    assert not torch.is_autocast_enabled("cpu")


def test_e11_autocast_on_and_off_are_two_identities(tmp_path: Path) -> None:
    model, data, out = MLP(), D(10), tmp_path / "store"
    example = torch.stack([data[i]["x"] for i in range(4)])
    plain = tl.plan(model, example, "first")
    with torch.autocast("cpu", torch.bfloat16):
        cast = tl.plan(model, example, "first")
    assert plain.digest != cast.digest
    assert plain.identity()["autocast"] != cast.identity()["autocast"]
    E(model, data, "first", out)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(tl.ResumeError, match="autocast"):
            E(model, data, "first", out)
        with pytest.raises(tl.ResumeError, match="autocast"):
            E(model, data, "last", out)
    OK(tl.open_store(out), R(model, data, ["first"]))


def test_e11_a_plan_made_under_autocast_runs_so_outside_of_it() -> None:
    model, data = MLP(), D(10)
    with torch.autocast("cpu", torch.bfloat16):
        plan = tl.plan(model, torch.randn(4, WIDTH), "last")
    store = E(model, data, tl.CapturePlan.from_json(plan.to_json()))
    expected = hooked(model, data, "last", torch.bfloat16)
    np.testing.assert_array_equal(store["last"][:].view(np.uint16), bits(expected))


def test_e11_a_plan_made_without_autocast_runs_without_it_inside() -> None:
    model, data = MLP(), D(10)
    plan = tl.plan(model, torch.randn(4, WIDTH), "first")
    with torch.autocast("cpu", torch.bfloat16):
        store = E(model, data, plan)
    OK(store, R(model, data, ["first"]))


def test_e11_autocast_float16_and_bfloat16_differ_in_identity() -> None:
    model, example = MLP(), torch.randn(4, WIDTH)
    digests = set()
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            digests.add(tl.plan(model, example, "first").digest)
    assert len(digests) == 2


def test_e11_autocast_inside_the_model_is_seen_as_it_is() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = MLP()

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.body(x)

    model, data = Inner(), D(8)
    store = E(model, data, "body.first")
    expected = hooked(model, data, "body.first")
    assert store["body.first"].dtype_name == "bfloat16"
    np.testing.assert_array_equal(
        store["body.first"][:].view(np.uint16), bits(expected)
    )

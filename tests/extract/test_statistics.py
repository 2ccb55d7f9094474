"""Non-finite values are counted per row, exactly, for every dtype."""

import pytest
import torch

from torchlens.extract.statistics import LayerCounts, count_nonfinite


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64],
)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_counts_are_per_row(dtype: torch.dtype, bad: float) -> None:
    rows = torch.zeros(5, 3, 7, dtype=dtype)
    assert count_nonfinite(rows) is None
    rows[1, 2, 3] = rows[4, 0, 0] = rows[4, 2, 6] = bad
    counts = count_nonfinite(rows)
    assert counts is not None and counts.tolist() == [0, 1, 0, 0, 2]


def test_large_finite_values_are_finite() -> None:
    rows = torch.full((4, 1000), torch.finfo(torch.float16).max, dtype=torch.float16)
    assert count_nonfinite(rows) is None


def test_integers_and_empty_rows_have_nothing_to_count() -> None:
    assert count_nonfinite(torch.ones(3, 2, dtype=torch.int64)) is None
    assert count_nonfinite(torch.ones(0, 2)) is None


def test_counts_list_ids_and_merge() -> None:
    ids = [f"s{n}" for n in range(4)]
    counts = LayerCounts()
    assert not counts
    counts.add_nonfinite(torch.tensor([0, 2, 0, 1]), ids)
    other = LayerCounts()
    other.add_overflowed(torch.tensor([5, 0, 0, 0]), ids)
    counts.merge(other)
    assert counts and counts.to_json() == {
        "nonfinite_values": 3,
        "nonfinite_rows": 2,
        "nonfinite_ids": ["s1", "s3"],
        "overflowed_values": 5,
        "overflowed_rows": 1,
        "overflowed_ids": ["s0"],
    }


def test_listed_ids_are_bounded_and_counts_are_not() -> None:
    counts = LayerCounts()
    for _ in range(3):
        counts.add_nonfinite(torch.ones(90, dtype=torch.int64), ["s"] * 90)
    assert len(counts.nonfinite_ids) == 100 and counts.nonfinite_rows == 270

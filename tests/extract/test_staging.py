"""Casts count what does not fit; a copy may be late, a buffer handed over may not."""

import pytest
import torch

from torchlens.extract.staging import CudaStaging, DirectStaging, cast_rows

INF, NAN = float("inf"), float("nan")


def test_cast_counts_finite_values_that_do_not_fit() -> None:
    values = torch.tensor([[1.0, 7e4, -7e4], [INF, NAN, 2.0], [65504.0, 0.0, 65510.0]])
    cast = cast_rows(values, torch.float16, saturate=False)
    assert cast.overflowed is not None and cast.overflowed.tolist() == [2, 0, 0]
    assert cast.rows.tolist()[0] == [1.0, INF, -INF]


def test_cast_without_overflow_counts_nothing() -> None:
    values = torch.randn(4, 5)
    cast = cast_rows(values, torch.float16, saturate=False)
    assert cast.overflowed is None
    assert torch.equal(cast.rows.to(torch.float16), values.to(torch.float16))


def test_cast_saturates_to_the_largest_value_and_keeps_nan() -> None:
    values = torch.tensor([[7e4, -INF, 3.0], [NAN, INF, -7e4]])
    cast = cast_rows(values, torch.float16, saturate=True)
    assert cast.overflowed is not None and cast.overflowed.tolist() == [1, 1]
    assert cast.rows[0].tolist() == [65504.0, -65504.0, 3.0]
    assert cast.rows[1].isnan().tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("wide", "narrow"),
    [(torch.float64, torch.float32), (torch.float32, torch.bfloat16)],
)
def test_cast_between_any_floats_counts(wide: torch.dtype, narrow: torch.dtype) -> None:
    largest = torch.finfo(wide).max
    cast = cast_rows(torch.tensor([largest, 1.0], dtype=wide), narrow, saturate=False)
    assert cast.overflowed is not None and cast.overflowed.tolist() == [1, 0]


def test_direct_copy_is_done_at_once() -> None:
    staging = DirectStaging()
    target = staging.empty((2, 3), torch.float16)
    staging.copy(torch.ones(2, 3), target)
    assert target.dtype is torch.float16 and bool((target == 1).all())
    staging.settle()


@pytest.mark.gpu
def test_cuda_copy_is_complete_after_settling() -> None:
    device = torch.device("cuda")
    staging = CudaStaging(device)
    for number in range(50):
        big = torch.full((2048, 2048), 0.001, device=device)
        for _ in range(3):
            big = big @ big
        values = torch.full((64, 1024), float(number), device=device) + 0 * big[0, 0]
        target = staging.empty((64, 1024), torch.float32)
        staging.copy(values, target)
        del values
        staging.settle()
        assert bool((target == number).all())

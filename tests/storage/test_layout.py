"""Sizes of chunks, shards and blocks keep their promises for any row."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchlens.errors import DataError
from torchlens.storage import ArraySpec, plan_layout

MIB = 1 << 20
SHAPES = st.lists(st.integers(1, 4096), min_size=0, max_size=2).map(tuple)
ARRAYS = st.dictionaries(
    st.sampled_from(["a", "b", "c", "d"]),
    st.builds(ArraySpec, SHAPES, st.sampled_from(["float32", "float16", "uint8"])),
    min_size=1,
)


def is_power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


@given(
    num_rows=st.integers(1, 10**10),
    arrays=ARRAYS,
    batch_size=st.integers(1, 5000),
    world_size=st.integers(1, 64),
    max_block_bytes=st.none() | st.integers(1, 1 << 34),
)
@settings(deadline=None)
def test_layout_is_powers_of_two_that_divide_each_other(
    num_rows: int,
    arrays: dict[str, ArraySpec],
    batch_size: int,
    world_size: int,
    max_block_bytes: int | None,
) -> None:
    layout = plan_layout(
        num_rows,
        arrays,
        batch_size,
        world_size=world_size,
        max_block_bytes=max_block_bytes,
    )
    assert is_power_of_two(layout.block_rows)
    assert layout.block_rows >= batch_size
    assert layout.num_blocks <= 20_000
    assert set(layout.arrays) == set(arrays)
    for chunk_rows, shard_rows in layout.arrays.values():
        assert is_power_of_two(chunk_rows) and is_power_of_two(shard_rows)
        assert shard_rows % chunk_rows == 0
        assert layout.block_rows % shard_rows == 0


@given(num_rows=st.integers(1, 10_000), block_exponent=st.integers(0, 12))
@settings(deadline=None)
def test_blocks_tile_the_rows(num_rows: int, block_exponent: int) -> None:
    arrays = {"a": ArraySpec((3,), "float32")}
    layout = plan_layout(num_rows, arrays, block_rows=1 << block_exponent)
    spans = [layout.span(block) for block in range(layout.num_blocks)]
    assert spans[0][0] == 0 and spans[-1][1] == num_rows
    assert all(
        left[1] == right[0] for left, right in zip(spans, spans[1:], strict=False)
    )
    assert all(0 < stop - start <= layout.block_rows for start, stop in spans)


@pytest.mark.parametrize(
    ("row_shape", "dtype", "chunk_rows", "shard_rows"),
    [
        ((768,), "float16", 512, 32768),
        ((4096,), "float16", 128, 8192),
        ((197, 768), "float16", 2, 128),
        ((512, 28, 28), "float16", 1, 64),
        ((256, 56, 56), "float32", 1, 16),
    ],
)
def test_sizes_of_known_rows(
    row_shape: tuple[int, ...], dtype: str, chunk_rows: int, shard_rows: int
) -> None:
    layout = plan_layout(300_000, {"a": ArraySpec(row_shape, dtype)})
    assert layout.arrays["a"] == (chunk_rows, shard_rows)


def test_a_small_dataset_on_many_workers_is_cut_finer() -> None:
    arrays = {"a": ArraySpec((768,), "float16")}
    layout = plan_layout(50_000, arrays, 64, world_size=8)
    assert layout.block_rows == 512
    assert layout.arrays["a"] == (512, 512)


def test_a_huge_layer_gets_bigger_shards_and_few_objects() -> None:
    arrays = {"a": ArraySpec((4096,), "float16")}
    layout = plan_layout(10**9, arrays)
    assert layout.arrays["a"] == (128, 65536)
    assert layout.num_objects == 15_259


def test_narrow_rows_make_few_objects() -> None:
    layout = plan_layout(10**6, {"a": ArraySpec((8,), "float32")}, 256)
    assert layout.num_objects < 100


def test_a_block_limit_is_kept_down_to_the_batch() -> None:
    arrays = {"a": ArraySpec((8,), "float32"), "b": ArraySpec((1 << 18,), "float32")}
    layout = plan_layout(10**6, arrays, 16, max_block_bytes=256 * MIB)
    assert layout.block_rows * (32 + MIB) <= 256 * MIB
    tight = plan_layout(10_000, arrays, 16, max_block_bytes=1)
    assert tight.block_rows == 16


@pytest.mark.parametrize("block_rows", [0, 3, 48, -8])
def test_block_rows_that_are_no_power_of_two_are_refused(block_rows: int) -> None:
    with pytest.raises(DataError, match=f"power of two; it is {block_rows}"):
        plan_layout(10, {"a": ArraySpec((), "bool")}, block_rows=block_rows)


def test_block_rows_below_the_batch_are_refused() -> None:
    with pytest.raises(DataError, match="too small for batches of 33.*at least 64"):
        plan_layout(10, {"a": ArraySpec((), "bool")}, 33, block_rows=32)


def test_impossible_numbers_are_refused() -> None:
    with pytest.raises(DataError, match="must be at least 1"):
        plan_layout(0, {"a": ArraySpec((), "bool")})


def test_an_unknown_block_is_refused() -> None:
    layout = plan_layout(10, {"a": ArraySpec((), "bool")}, block_rows=8)
    with pytest.raises(DataError, match="no block 2.*2 blocks"):
        layout.span(2)


def test_array_specs_are_checked() -> None:
    with pytest.raises(DataError, match="dtype 'float8' cannot be stored"):
        ArraySpec((3,), "float8")
    with pytest.raises(DataError, match="must be at least 1"):
        ArraySpec((3, 0), "float32")

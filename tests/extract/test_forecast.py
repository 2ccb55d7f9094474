"""A run that cannot fit is refused with the numbers; one that can is cut to fit."""

import dataclasses
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchlens.errors import BudgetError
from torchlens.extract.forecast import (
    RunForecast,
    choose_layout,
    forecast_run,
    format_bytes,
    free_disk,
    plan_pieces,
)
from torchlens.extract.memory_limits import MemoryRoom
from torchlens.storage import ArraySpec

ARRAYS = {"wide": ArraySpec((1024, 256), "float32"), "narrow": ArraySpec((8,), "uint8")}
ROW_BYTES = 1024 * 256 * 4 + 8


def forecast(
    num_rows: int = 1000,
    room: MemoryRoom | None = None,
    output_dir: str | None = "s3://bucket/x",
) -> RunForecast:
    layout = choose_layout(num_rows, ARRAYS, batch_size=16, block_rows=None, room=room)
    return forecast_run(
        ARRAYS,
        layout,
        plan_pieces(ARRAYS, layout, 16, room),
        batch_size=16,
        rows_left=num_rows,
        output_dir=output_dir,
        room=room,
    )


def test_bytes_follow_from_the_planned_shapes() -> None:
    found = forecast()
    assert found.num_bytes == 1000 * ROW_BYTES
    assert found.layers == {"wide": 1000 * (ROW_BYTES - 8), "narrow": 8000}
    assert found.free_disk_bytes is None


def test_store_larger_than_permitted_is_refused_with_both_numbers() -> None:
    with pytest.raises(BudgetError, match=f"needs {1000 * ROW_BYTES} bytes.*1000000"):
        forecast().check(max_bytes=1_000_000)
    forecast().check(max_bytes=1000 * ROW_BYTES)


def test_store_larger_than_the_disk_is_refused() -> None:
    small = dataclasses.replace(forecast(), free_disk_bytes=50_000_000)
    with pytest.raises(BudgetError, match="the disk has 50000000 free.*'wide'"):
        small.check(None)
    # Only what is still to be written has to fit.
    dataclasses.replace(small, bytes_left=49_000_000).check(None)


def test_buffers_larger_than_the_memory_are_refused() -> None:
    tight = MemoryRoom(30_000_000, "the cgroup limit")
    with pytest.raises(BudgetError, match="the cgroup limit leaves 30000000"):
        forecast(room=tight).check(None)


def test_store_in_memory_needs_memory() -> None:
    room = MemoryRoom(700_000_000, "ulimit")
    forecast(room=room).check(None)
    with pytest.raises(BudgetError, match="an output_dir instead of memory"):
        forecast(room=room, output_dir=None).check(None)


def test_blocks_shrink_where_memory_is_short() -> None:
    large, small = (
        choose_layout(100_000, ARRAYS, batch_size=16, block_rows=None, room=room)
        for room in (None, MemoryRoom(100_000_000, "ulimit"))
    )
    assert small.block_rows < large.block_rows
    pieces = plan_pieces(ARRAYS, small, 16, MemoryRoom(100_000_000, "ulimit"))
    assert pieces.least_bytes <= 50_000_000
    assert small.block_rows >= 16


@pytest.mark.parametrize("batch_size", [1, 7, 16, 48])
@pytest.mark.parametrize("num_rows", [3, 100, 5000])
def test_pieces_are_whole_batches_within_a_block(
    num_rows: int, batch_size: int
) -> None:
    layout = choose_layout(
        num_rows, ARRAYS, batch_size=batch_size, block_rows=None, room=None
    )
    pieces = plan_pieces(ARRAYS, layout, batch_size, None)
    for name, rows in pieces.rows.items():
        whole = rows % batch_size == 0
        assert whole or rows in (layout.block_rows, num_rows), name
        assert rows <= layout.block_rows
    assert pieces.budget_bytes == 2 * pieces.least_bytes


def test_budget_follows_the_memory_that_is_there() -> None:
    room = MemoryRoom(300_000_000, "ulimit")
    layout = choose_layout(5000, ARRAYS, batch_size=16, block_rows=128, room=room)
    pieces = plan_pieces(ARRAYS, layout, 16, room)
    assert pieces.least_bytes <= pieces.budget_bytes <= 150_000_000


def test_disk_of_a_place_that_is_not_there_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def usage(place: Path) -> Any:
        asked.append(place)
        return SimpleNamespace(free=77)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    assert free_disk(str(tmp_path / "a/b/c")) == free_disk(f"file://{tmp_path}") == 77
    assert asked == [tmp_path, tmp_path]
    assert free_disk("memory://x") is None and free_disk(None) is None


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(999, "999 B"), (1500, "1.5 kB"), (2_000_000, "2.0 MB"), (3 * 10**15, "3.0 PB")],
)
def test_bytes_are_printed_for_people(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


def test_forecast_is_one_line_for_people() -> None:
    room = MemoryRoom(10**9, "ulimit")
    text = str(dataclasses.replace(forecast(room=room), free_disk_bytes=10**10))
    assert "1000 rows x 2 layers, 1.0 GB in" in text
    assert "of 1.0 GB, free disk 10.0 GB" in text

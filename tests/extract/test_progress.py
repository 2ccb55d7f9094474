"""The summary says what was done, where the time went, and what was wrong."""

import dataclasses

import pytest

from torchlens.extract.progress import Progress, RunSummary, StageClock

DONE = RunSummary(
    rows=100,
    rows_done=60,
    blocks=10,
    blocks_done=6,
    bytes_done=3_000_000,
    stage_seconds={
        "prepare": 2.0,
        "load": 1.0,
        "forward": 5.0,
        "copy": 0.5,
        "write": 1.5,
        "other": 0.0,
    },
    writer_seconds=3.0,
    wall_seconds=10.0,
    skipped_ids=(),
    missing_rows={},
    counts={},
    place="out/data.zarr",
)


def test_summary_gives_rates_and_the_bottleneck() -> None:
    text = str(DONE)
    assert "60 of 100 rows computed, 6 of 10 blocks, 3.0 MB in 10.0 s" in text
    assert "(7.5 rows/s, 0.4 MB/s)" in text
    assert "most time went into forward" in text and "out/data.zarr" in text


def test_summary_of_a_finished_store_says_nothing_to_do() -> None:
    idle = dataclasses.replace(DONE, rows_done=0, blocks_done=0)
    assert str(idle).startswith("nothing to do: 10 of 10 blocks committed")


def test_summary_lists_what_was_wrong() -> None:
    counts = {
        "nonfinite_values": 3,
        "nonfinite_rows": 2,
        "nonfinite_ids": ["s1", "s2"],
        "overflowed_values": 1,
        "overflowed_rows": 1,
        "overflowed_ids": ["s9"],
    }
    text = str(
        dataclasses.replace(
            DONE, skipped_ids=("s7",), missing_rows={"fc": 4}, counts={"fc": counts}
        )
    )
    assert "fc: 4 rows took a path without it and are empty" in text
    assert "skipped, unreadable: s7" in text
    assert "fc: 3 values in 2 rows are NaN or infinite: s1, s2" in text
    assert "fc: 1 values in 1 rows did not fit the dtype: s9" in text


def test_clock_splits_time_into_stages() -> None:
    clock = StageClock()
    for _ in range(3):
        with clock.stage("forward"):
            sum(range(100_000))
    assert clock.bottleneck == "forward"
    assert 0 < clock.seconds["forward"] <= clock.wall_seconds
    assert clock.seconds["write"] == 0


def test_time_inside_another_stage_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 3.0, 7.0, 15.0, 31.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    clock = StageClock()
    with clock.stage("write"):
        with clock.stage("copy"):
            pass
    assert clock.seconds["write"] == 2 + 8 and clock.seconds["copy"] == 4
    assert clock.seconds["other"] == 1 and clock.wall_seconds == 31


def test_bar_is_drawn_only_when_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    for wanted in (False, True):
        bar = Progress(wanted, total_rows=10, done_rows=4)
        bar.advance(6, 100, StageClock())
        bar.close()
        err = capsys.readouterr().err
        assert ("10/10" in err) is wanted

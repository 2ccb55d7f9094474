"""When a run goes on, finishes its block, or drops it."""

import os
import signal
import threading
import time

import pytest

from torchlens.extract.interrupts import REQUEUE_CODE, RequeueExit, StopWatch


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    return clock


def test_without_limit_nothing_stops(now: list[float]) -> None:
    watch = StopWatch()
    now[0] += 1e6
    assert watch.may_begin(1e9) and not watch.must_stop(1e9)


def test_time_limit_stops_what_does_not_fit(now: list[float]) -> None:
    watch = StopWatch(60)
    now[0] += 50
    assert watch.may_begin(9) and not watch.may_begin(11)
    assert not watch.must_stop(9) and watch.must_stop(11)
    assert "time limit of 60 s" in watch.reason


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_lets_a_short_rest_finish_and_begins_nothing(
    now: list[float], number: signal.Signals
) -> None:
    before = signal.getsignal(number)
    with StopWatch() as watch:
        os.kill(os.getpid(), number)
        assert not watch.may_begin(0)
        assert not watch.must_stop(5) and watch.must_stop(100)
        assert f"{number.name} was received" == watch.reason
    assert signal.getsignal(number) is before


def test_other_threads_leave_signals_alone() -> None:
    before, seen = signal.getsignal(signal.SIGTERM), []

    def enter() -> None:
        with StopWatch():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [before]


def test_requeue_is_an_exit_with_its_own_code_and_message() -> None:
    with pytest.raises(SystemExit) as caught:
        raise RequeueExit("3 of 9 blocks are committed")
    assert caught.value.code == REQUEUE_CODE == 75
    assert str(caught.value) == "3 of 9 blocks are committed"

"""Kill -9 at random moments: what is committed stays, and a rerun completes it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

NUM_BLOCKS = 24


@pytest.mark.slow
@pytest.mark.multiprocess
def test_killed_runs_finish_byte_identical(tmp_path: Path) -> None:
    script = Path(__file__).with_name("crash_trials.py")
    root = Path(__file__).resolve().parents[2]
    result = subprocess.run(
        [sys.executable, str(script), str(tmp_path), "20", "1"],
        cwd=root,
        env={"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert result.returncode == 0, result.stderr
    trials = [json.loads(line) for line in result.stdout.splitlines()]
    kills = [kill for trial in trials for kill in trial["kills"]]
    print("commits at each kill:", [kill["commits"] for kill in kills])
    assert len(trials) == 20 and not result.stderr, result.stderr
    for trial in trials:
        assert trial["code"] == 0 and trial["differing"] == [] and trial["verified"]
    inside = [k for k in kills if k["killed"] and 0 < k["commits"] < NUM_BLOCKS]
    assert len(inside) >= 15
    # The moments are spread over the run, or it would prove little.
    assert len({kill["commits"] for kill in inside}) >= 8

"""In CI a skip without the mark "gpu" fails the session; elsewhere it does not."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SKIPPING = """
import pytest

def test_runs():
    pass

@pytest.mark.{mark}
def test_skips():
    pytest.skip("because of the moon")

@pytest.mark.xfail(reason="expected")
def test_expected_failure():
    assert False
"""


def run_pytest(folder: Path, root: Path, ci: str) -> subprocess.CompletedProcess[str]:
    """Run pytest on `folder` with a copy of this suite's conftest, in a new process."""
    shutil.copy(root / "tests" / "conftest.py", folder / "conftest.py")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: x\n    slow: x\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."]
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "CI": ci},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("mark", "ci", "passes"),
    [("slow", "true", False), ("slow", "", True), ("gpu", "", True)],
)
def test_skip_fails_the_session_in_ci_only(
    tmp_path: Path, project_root: Path, mark: str, ci: str, passes: bool
) -> None:
    (tmp_path / "test_it.py").write_text(SKIPPING.format(mark=mark))
    result = run_pytest(tmp_path, project_root, ci)
    assert (result.returncode == 0) is passes, result.stdout
    listed = "test_it.py::test_skips: Skipped: because of the moon" in result.stdout
    assert listed is not passes
    assert "test_expected_failure" not in result.stdout


def test_skip_with_mark_gpu_is_allowed_in_ci(
    tmp_path: Path, project_root: Path
) -> None:
    (tmp_path / "test_it.py").write_text(SKIPPING.format(mark="gpu"))
    assert run_pytest(tmp_path, project_root, "true").returncode == 0


def test_skip_of_a_whole_module_fails_the_session_in_ci(
    tmp_path: Path, project_root: Path
) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\npytest.importorskip('no_such_package')\n"
    )
    (tmp_path / "test_other.py").write_text("def test_runs(): pass\n")
    result = run_pytest(tmp_path, project_root, "true")
    assert result.returncode == 1
    assert "could not import 'no_such_package'" in result.stdout


def test_modes_left_changed_fail_the_test(tmp_path: Path, project_root: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import torch\ndef test_leaks(): torch.set_grad_enabled(False)\n"
    )
    result = run_pytest(tmp_path, project_root, "")
    assert result.returncode == 1
    assert "left torch changed" in result.stdout and "'grad'" in result.stdout

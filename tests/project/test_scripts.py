"""The shell scripts: what they install and when, tried with a pretended Python."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# Answers what scripts/_environment.sh asks of an interpreter and logs the rest.
PRETENDED = """#!/usr/bin/env bash
case "$*" in
"-m venv --clear "*)
    rm -rf "$4" && mkdir -p "$4/bin"
    cp "$0" "$4/bin/python"
    echo "$4" >"$4/bin/pip"
    ;;
"-m pip "*"$FAIL_ON"*) exit 7 ;;
"- "*) exec {real} "$@" ;;
"-c "*) ;;
"--version") echo "Python 3.99" ;;
esac
echo "$*" >>"$CALLS"
"""


class Sandbox:
    """A checkout of the scripts alone, in a folder whose name has a space."""

    def __init__(self, folder: Path, project_root: Path) -> None:
        self.root = folder / "check out"
        (self.root / "scripts").mkdir(parents=True)
        for name in ("_environment.sh", "demo", "test"):
            shutil.copy(project_root / "scripts" / name, self.root / "scripts" / name)
        shutil.copy(project_root / "pyproject.toml", self.root / "pyproject.toml")
        self.python = folder / "pretended-python"
        self.python.write_text(PRETENDED.replace("{real}", sys.executable))
        self.python.chmod(0o755)
        self.calls = folder / "calls"
        self.elsewhere = folder

    def run(
        self, script: str, *args: str, fail_on: str = "nothing at all"
    ) -> subprocess.CompletedProcess[str]:
        """Run a script from another working directory."""
        self.calls.write_text("")
        return subprocess.run(
            ["bash", str(self.root / "scripts" / script), *args],
            cwd=self.elsewhere,
            env={
                **os.environ,
                "PYTHON": str(self.python),
                "CALLS": str(self.calls),
                "FAIL_ON": fail_on,
            },
            capture_output=True,
            text=True,
            timeout=60,
        )

    def installs(self) -> list[str]:
        """Return the pip calls of the last run."""
        lines = self.calls.read_text().splitlines()
        return [line for line in lines if line.startswith("-m pip")]


@pytest.fixture
def sandbox(tmp_path: Path, project_root: Path) -> Sandbox:
    return Sandbox(tmp_path, project_root)


def test_demo_installs_once_and_passes_its_arguments(sandbox: Sandbox) -> None:
    first = sandbox.run("demo", "--untrained")
    assert first.returncode == 0, first.stderr
    assert len(sandbox.installs()) == 2
    assert sandbox.installs()[1].endswith(f"--editable {sandbox.root}[demo]")
    last = sandbox.calls.read_text().splitlines()[-1]
    assert last == f"{sandbox.root}/scripts/brain_rsa.py --untrained"

    again = sandbox.run("demo")
    assert again.returncode == 0, again.stderr
    assert sandbox.installs() == []


def test_environment_is_installed_again_when_requirements_change(
    sandbox: Sandbox,
) -> None:
    sandbox.run("demo")
    with (sandbox.root / "pyproject.toml").open("a") as file:
        file.write("\n# changed\n")
    sandbox.run("demo")
    assert len(sandbox.installs()) == 2


def test_environment_is_made_again_after_a_move(sandbox: Sandbox) -> None:
    sandbox.run("demo")
    sandbox.root = sandbox.root.rename(sandbox.root.with_name("moved"))
    result = sandbox.run("demo")
    assert "making" in result.stdout
    assert len(sandbox.installs()) == 2


def test_interrupted_install_is_not_taken_for_a_finished_one(
    sandbox: Sandbox,
) -> None:
    failed = sandbox.run("demo", fail_on="--editable")
    assert failed.returncode == 7
    assert "brain_rsa" not in sandbox.calls.read_text()
    assert sandbox.run("demo").returncode == 0
    assert len(sandbox.installs()) == 2


def test_demo_uses_the_environment_of_the_tests(sandbox: Sandbox) -> None:
    # The pretended environment has no ruff, so the test script stops after installing.
    assert sandbox.run("test").returncode != 0
    assert sandbox.installs()[1].endswith("[dev]")
    assert sandbox.run("demo").returncode == 0
    assert sandbox.installs() == []


def test_unsuitable_python_is_refused_with_what_is_needed(sandbox: Sandbox) -> None:
    sandbox.python.write_text("#!/bin/sh\nexit 1\n")
    tools = sandbox.elsewhere / "tools"
    tools.mkdir()
    for name in ("bash", "cat", "dirname", "grep"):
        found = shutil.which(name)
        assert found is not None
        (tools / name).symlink_to(found)
    for name in ("python3", "python3.11", "python3.12", "python3.13"):
        (tools / name).symlink_to(sandbox.python)
    script = (sandbox.root / "scripts" / "_environment.sh").read_text()
    # The system's own interpreter is the last candidate and may be a good one.
    (sandbox.root / "scripts" / "_environment.sh").write_text(
        script.replace("/usr/bin/python3", "")
    )
    result = subprocess.run(
        [str(tools / "bash"), str(sandbox.root / "scripts" / "demo")],
        env={"PATH": str(tools), "PYTHON": str(sandbox.python)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode != 0
    assert "Needed: Python 3.11 or newer" in result.stderr


def test_test_script_explains_itself_and_refuses_unknown_arguments(
    sandbox: Sandbox,
) -> None:
    shown = sandbox.run("test", "--help")
    assert shown.returncode == 0
    assert "scripts/test --fast" in shown.stdout and "set -e" not in shown.stdout
    refused = sandbox.run("test", "--quick")
    assert refused.returncode == 2
    assert "unknown argument '--quick'" in refused.stderr

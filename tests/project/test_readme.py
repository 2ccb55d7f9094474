"""The README is true: its Python runs, its commands run, its first screen is short."""

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, the line it starts on."""

    language: str
    text: str
    line: int

    def commands(self) -> list[list[str]]:
        """Return the commands of a shell block as words, comments left out."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [words for line in lines if (words := shlex.split(line, comments=True))]


@pytest.fixture
def readme(project_root: Path) -> str:
    return (project_root / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def blocks(readme: str) -> list[Block]:
    return [
        Block(found[1], found[2], readme[: found.start()].count("\n") + 2)
        for found in BLOCK.finditer(readme)
    ]


def test_first_screen_shows_exactly_the_two_commands(
    blocks: list[Block], project_root: Path
) -> None:
    first = blocks[0]
    assert first.commands() == [["scripts/demo"], ["scripts/test"]]
    assert first.line < 15
    for (command,) in first.commands():
        assert os.access(project_root / command, os.X_OK)


def test_quickstart_has_at_most_15_lines(blocks: list[Block]) -> None:
    quickstart = next(block for block in blocks if block.language == "python")
    assert len([line for line in quickstart.text.splitlines() if line]) <= 15


def test_no_line_is_a_machine_path(readme: str) -> None:
    assert not re.search(r"(?<![\w.])/(home|root|work|tmp|Users)/", readme)


def test_names_of_the_face_exist(readme: str) -> None:
    import torchlens

    named = set(re.findall(r"\btl\.(\w+)", readme))
    assert len(named) >= 8
    assert named <= set(torchlens.__all__)


def test_exit_codes_are_those_of_the_command(readme: str) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "torchlens", "--help"],
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout
    codes = re.findall(r"^ +(\d+)  ", shown.partition("exit codes:")[2], re.MULTILINE)
    assert len(codes) >= 5
    assert re.findall(r"^\| (\d+) \|", readme, re.MULTILINE) == codes


def test_links_lead_to_files(readme: str, project_root: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)", readme)
    assert targets
    assert [name for name in targets if not (project_root / name).is_file()] == []


def test_blocks_run_in_order(
    blocks: list[Block],
    project_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    path = [str(project_root), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    namespace: dict[str, object] = {"__name__": "readme"}
    ran = 0
    for block in blocks:
        where = f"README.md, block at line {block.line}"
        if block.language == "python":
            # A block that begins with a file name is a file the later blocks use.
            named = re.match(r"# (\w+\.py)\n", block.text)
            if named:
                Path(named[1]).write_text(block.text)
            exec(compile(block.text, where, "exec"), namespace)
            ran += 1
        elif block.language == "bash":
            for words in block.commands():
                if words[0] == "torchlens":
                    run_command(words[1:], where)
                    ran += 1
    assert ran >= 7


def run_command(words: list[str], where: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "torchlens", *words],
        capture_output=True,
        text=True,
        timeout=300,
    )
    shown = f"{where}: torchlens {shlex.join(words)}\n{result.stdout}\n{result.stderr}"
    assert result.returncode == 0, shown
    assert result.stdout.strip(), f"{shown}\nprinted nothing"

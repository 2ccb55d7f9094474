"""The checker of the user-needs map: a row without a test is found."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run_check(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "check_needs.py"), str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def needs_folder(tmp_path: Path) -> Path:
    (tmp_path / "rows.toml").write_text('["First"]\na = ["B1", "C10"]\n')
    (tmp_path / "test_b.py").write_text("def test_B1_stops_early(): pass\n")
    (tmp_path / "test_c.py").write_text("def test_c10_is_addressable(): pass\n")
    return tmp_path


def test_checker_accepts_a_complete_map(needs_folder: Path) -> None:
    result = run_check(needs_folder)
    assert result.returncode == 0, result.stderr
    assert "All 2 promised rows" in result.stdout


def test_checker_names_the_planted_missing_row(needs_folder: Path) -> None:
    (needs_folder / "rows.toml").write_text('["First"]\na = ["B1", "C1", "C10"]\n')
    result = run_check(needs_folder)
    assert result.returncode == 1
    assert "no function test_C1_<what_holds>" in result.stderr
    assert 'promised by "First"' in result.stderr
    assert "test_B1_" not in result.stderr and "test_C10_" not in result.stderr


@pytest.mark.parametrize(
    "text",
    [
        "# def test_C10_is_addressable(): pass\n",
        "def helper_test_C10_is_addressable(): pass\n",
        "def test_C10(): pass\n",
    ],
)
def test_checker_counts_functions_only(needs_folder: Path, text: str) -> None:
    (needs_folder / "test_c.py").write_text(text)
    assert run_check(needs_folder).returncode == 1


def test_checker_refuses_a_row_promised_twice(needs_folder: Path) -> None:
    (needs_folder / "rows.toml").write_text(
        '["First"]\na = ["B1"]\n["Second"]\na = ["B1"]\n'
    )
    result = run_check(needs_folder)
    assert result.returncode == 1
    assert "row B1 stands under 'First' and 'Second'" in result.stderr


def test_checker_refuses_a_malformed_id(needs_folder: Path) -> None:
    (needs_folder / "rows.toml").write_text('["First"]\na = ["B-1"]\n')
    result = run_check(needs_folder)
    assert result.returncode == 1
    assert "'B-1' under 'First' is not a row id" in result.stderr


def test_map_names_rows_the_specification_has(shared_dir: Path) -> None:
    import re
    import tomllib

    text = (shared_dir / "spec" / "user_needs.md").read_text(encoding="utf-8")
    known = set(re.findall(r"^\| \**([A-Z][0-9]+[a-z]?)\** \|", text, re.MULTILINE))
    table = tomllib.loads((ROOT / "tests" / "needs" / "rows.toml").read_text())
    promised = {
        row for groups in table.values() for ids in groups.values() for row in ids
    }
    assert promised <= known

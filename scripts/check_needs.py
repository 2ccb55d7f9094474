"""Check that every promised row of the user needs has a test named after it.

`tests/needs/rows.toml` maps finished issues to row ids.  A row counts as tested when a
`test_*.py` file in that folder defines a function `test_<id>_<what_holds>`.  The check
reads names only; whether the tests pass or were skipped is pytest's to say.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

DEFAULT_FOLDER = Path(__file__).resolve().parent.parent / "tests" / "needs"
ROW_ID = re.compile(r"[A-Z][0-9]+[a-z]?")
TEST_NAME = re.compile(r"test_([A-Za-z][0-9]+[a-z]?)_\w+")


def read_rows(path: Path) -> dict[str, tuple[str, ...]]:
    """Return the row ids of each finished issue.

    Raises:
        ValueError: If an id is malformed or promised twice; the message names it.
    """
    rows: dict[str, tuple[str, ...]] = {}
    seen: dict[str, str] = {}
    for issue, groups in tomllib.loads(path.read_text(encoding="utf-8")).items():
        ids = tuple(row for group in groups.values() for row in group)
        for row in ids:
            if not ROW_ID.fullmatch(row):
                raise ValueError(
                    f"{path}: {row!r} under {issue!r} is not a row id such as 'C10'."
                )
            if row in seen:
                raise ValueError(
                    f"{path}: row {row} stands under {seen[row]!r} and {issue!r}; "
                    "keep one of the two."
                )
            seen[row] = issue
        rows[issue] = ids
    return rows


def tested_rows(folder: Path) -> frozenset[str]:
    """Return the upper-case ids of the rows that tests in `folder` are named after."""
    return frozenset(_ids_in(folder))


def _ids_in(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
            if isinstance(node, ast.FunctionDef):
                match = TEST_NAME.fullmatch(node.name)
                if match:
                    yield match.group(1).upper()


def untested_rows(
    rows: Mapping[str, tuple[str, ...]], folder: Path
) -> dict[str, tuple[str, ...]]:
    """Return the promised rows without a test, for each issue that has any."""
    tested = tested_rows(folder)
    missing = {
        issue: tuple(row for row in ids if row.upper() not in tested)
        for issue, ids in rows.items()
    }
    return {issue: ids for issue, ids in missing.items() if ids}


def main(folder: Path = DEFAULT_FOLDER) -> int:
    """Print what is missing; return 0 when nothing is, 1 otherwise."""
    try:
        rows = read_rows(folder / "rows.toml")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    missing = untested_rows(rows, folder)
    for issue, ids in missing.items():
        for row in ids:
            print(
                f"{folder}: no function test_{row}_<what_holds> in any test_*.py; "
                f'promised by "{issue}".',
                file=sys.stderr,
            )
    if missing:
        return 1
    count = sum(len(ids) for ids in rows.values())
    print(f"All {count} promised rows of the user needs have a test.")
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:2])))

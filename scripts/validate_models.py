"""Validates the trace of every architecture of the registry, and writes a table.

Each result is appended to a file of JSON lines as soon as it is known; running the same
command again continues with what is missing.

    python scripts/validate_models.py                       all, to benchmarks/reports
    python scripts/validate_models.py --only timm --limit 3
"""

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from time import process_time

import torch
from architectures import Architecture, architectures

from torchlens.tracer import run_capture
from torchlens.validation import validate_capture

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "benchmarks" / "reports"


@dataclass(frozen=True, slots=True)
class Result:
    """What validating one architecture found.

    Attributes:
        name: Name in the registry.
        num_ops: Ops of the trace.
        num_calls: Module calls of the trace.
        complete: Whether every tensor's origin was seen.
        num_checked: Ops executed again.
        verdict: "passed", or what failed first.
        cpu_seconds: Of trace and validation together.
    """

    name: str
    num_ops: int
    num_calls: int
    complete: bool
    num_checked: int
    verdict: str
    cpu_seconds: float


def validate_one(architecture: Architecture) -> Result:
    """Build, trace and validate one architecture; an error is a verdict."""
    torch.manual_seed(0)
    start = process_time()
    try:
        example = architecture.build()
        start = process_time()
        with torch.no_grad():
            capture = run_capture(
                example.model, example.args, example.kwargs, wanted=None
            )
        report = validate_capture(capture)
    except Exception as error:
        seconds = process_time() - start
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        return Result(architecture.name, 0, 0, False, 0, text, seconds)
    graph = capture.graph
    return Result(
        architecture.name,
        len(graph.ops),
        len(graph.module_calls),
        graph.complete,
        report.num_checked,
        "passed" if report else report.failures[0],
        process_time() - start,
    )


def read_results(path: Path) -> dict[str, Result]:
    """Return the results of earlier runs; a line cut short is done again."""
    results: dict[str, Result] = {}
    if path.is_file():
        for line in path.read_text().splitlines():
            try:
                result = Result(**json.loads(line))
            except (json.JSONDecodeError, TypeError):
                continue
            results[result.name] = result
    return results


def table(results: Sequence[Result]) -> str:
    """Return the results as a page of Markdown."""
    passed = sum(result.verdict == "passed" for result in results)
    complete = sum(result.complete for result in results)
    lines = [
        "# Validated models",
        "",
        f"Written by `scripts/validate_models.py` on {date.today()}: random weights, "
        f"small inputs, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.machine()}, one thread.",
        "Every op is executed again from the saved outputs of its parents and compared "
        "with its own.",
        "",
        f"{passed} of {len(results)} passed, {complete} traces are complete.",
        "",
        "| architecture | ops | module calls | complete | checked | verdict | CPU s |",
        "| --- | ---: | ---: | --- | ---: | --- | ---: |",
    ]
    lines += [
        f"| {r.name} | {r.num_ops} | {r.num_calls} | {'yes' if r.complete else 'no'} | "
        f"{r.num_checked} | {r.verdict} | {r.cpu_seconds:.2f} |"
        for r in results
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing; return 1 if any architecture failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="part of the architecture's name")
    parser.add_argument("--limit", type=int, help="how many to run now, at most")
    parser.add_argument(
        "--results", type=Path, default=ROOT / "output" / "validated_models.jsonl"
    )
    parser.add_argument("--table", type=Path, default=REPORTS / "validated_models.md")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    chosen = [one for one in architectures() if options.only in one.name]
    if not chosen:
        parser.error(f"no architecture has {options.only!r} in its name")
    options.results.parent.mkdir(parents=True, exist_ok=True)
    results = read_results(options.results)
    missing = [one for one in chosen if one.name not in results]
    for architecture in missing[: options.limit]:
        result = validate_one(architecture)
        results[result.name] = result
        with options.results.open("a") as lines:
            lines.write(json.dumps(asdict(result)) + "\n")
        print(f"{result.name}: {result.verdict}", flush=True)
    found = [results[one.name] for one in chosen if one.name in results]
    options.table.parent.mkdir(parents=True, exist_ok=True)
    options.table.write_text(table(found))
    print(f"{len(found)} of {len(chosen)} done, table in {options.table}")
    return int(any(result.verdict != "passed" for result in found))


if __name__ == "__main__":
    sys.exit(main())

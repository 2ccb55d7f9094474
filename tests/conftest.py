"""What every test relies on: marks that skip with a reason, and a clean torch after it.

With CI=true a test may be skipped only when it carries the mark "gpu"; any other skip
fails the session, so that a missing package or folder is never mistaken for a pass.
"""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from shutil import which

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"
IN_CI = os.environ.get("CI") == "true"
UNWANTED_SKIPS = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Return the data folder beside the checkout; skip the test where there is none."""
    if not SHARED.is_dir():
        pytest.skip(f"the data folder {SHARED} is not there")
    return SHARED


@pytest.fixture(scope="session")
def project_root() -> Path:
    """Return the root of the checkout."""
    return ROOT


@pytest.fixture(autouse=True)
def torch_left_as_found() -> Iterator[None]:
    """Seed torch, and fail a test that leaves any of torch's global modes changed."""
    import torch

    torch.manual_seed(0)
    before = _torch_modes()
    yield
    after = _torch_modes()
    if after != before:
        changed = {k: (before[k], after[k]) for k in before if before[k] != after[k]}
        pytest.fail(f"the test left torch changed, before and after: {changed}")


def _torch_modes() -> dict[str, object]:
    import torch
    from torch.overrides import _get_current_function_mode_stack

    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "fastpath": torch.backends.mha.get_fastpath_enabled(),
        "default dtype": torch.get_default_dtype(),
        "function modes": len(_get_current_function_mode_stack()),
        "F.linear": torch.nn.functional.linear,
        "Module.__call__": torch.nn.Module.__call__,
    }


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what this machine cannot run, and say why."""
    if item.get_closest_marker("shared_data") and not SHARED.is_dir():
        pytest.skip(f"the data folder {SHARED} is not there")
    if item.get_closest_marker("slurm") and which("sbatch") is None:
        pytest.skip("sbatch is not on the path")
    if item.get_closest_marker("s3") and find_spec("s3fs") is None:
        pytest.skip("s3fs is not installed; install the extra [s3]")
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("torch sees no accelerator")


def pytest_configure(config: pytest.Config) -> None:
    """Start the list of skips that CI does not allow."""
    config.stash[UNWANTED_SKIPS] = []
    config.pluginmanager.register(_SkipWatch(config.stash[UNWANTED_SKIPS]))


class _SkipWatch:
    """Collects skips of tests without the mark "gpu"."""

    def __init__(self, found: list[str]) -> None:
        self.found = found

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # An expected failure is reported as skipped too, but it did run.
        if report.skipped and not hasattr(report, "wasxfail"):
            if "gpu" not in report.keywords:
                self.found.append(f"{report.nodeid}: {_reason(report)}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.found.append(f"{report.nodeid}: {_reason(report)}")


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    where = report.longrepr
    return str(where[2]) if isinstance(where, tuple) else str(where)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI, fail the session for each skip without the mark "gpu"."""
    if IN_CI and session.config.stash[UNWANTED_SKIPS] and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the skips that made a CI run fail."""
    found = terminalreporter.config.stash[UNWANTED_SKIPS]
    if IN_CI and found:
        terminalreporter.section("skipped without the mark gpu: not allowed in CI")
        for line in found:
            terminalreporter.write_line(line)

"""What an install of the built package contains."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

FILES = ("pyproject.toml", "README.md", "LICENSE")
FOLDERS = ("torchlens", "extract", "storage", "scripts", "tests")
BUILD = "import sys; from setuptools.build_meta import {} as f; f(sys.argv[1])"


def build(kind: str, source: Path, target: Path) -> Path:
    """Run the build back end in `source`; return the one file it made."""
    target.mkdir()
    result = subprocess.run(
        [sys.executable, "-c", BUILD.format(f"build_{kind}"), str(target)],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    (built,) = target.iterdir()
    return built


@pytest.fixture(scope="module")
def sources(
    project_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """Return a copy of the checkout, and the same after a trip through an sdist."""
    checkout = tmp_path_factory.mktemp("checkout")
    for name in FILES:
        shutil.copy(project_root / name, checkout / name)
    ignore = shutil.ignore_patterns("__pycache__", "demo_data")
    for name in FOLDERS:
        shutil.copytree(
            project_root / name, checkout / name, symlinks=True, ignore=ignore
        )
    archive = build("sdist", checkout, checkout.parent / "sdist")
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(archive) as tar:
        tar.extractall(unpacked, filter="data")
    (inner,) = unpacked.iterdir()
    return checkout, inner


@pytest.mark.parametrize("origin", [0, 1], ids=["checkout", "sdist"])
def test_wheel_holds_the_package_and_nothing_else(
    sources: tuple[Path, Path], origin: int, project_root: Path, tmp_path: Path
) -> None:
    wheel = build("wheel", sources[origin], tmp_path / "wheel")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    tops = {name.split("/")[0] for name in names}
    assert tops == {"torchlens", f"{wheel.name.split('-py3')[0]}.dist-info"}

    packed = {n for n in names if n.startswith("torchlens/") and n.endswith(".py")}
    expected = {
        f"torchlens/{p.name}" for p in (project_root / "torchlens").glob("*.py")
    }
    for folder in ("extract", "storage"):
        found = (project_root / folder).glob("*.py")
        expected |= {f"torchlens/{folder}/{path.name}" for path in found}
    assert packed == expected
    assert "torchlens/py.typed" in names

    code = "import torchlens.extract as e, torchlens.storage as s; print(e.__file__)"
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, 'site'); {code}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()).is_relative_to(tmp_path / "site")

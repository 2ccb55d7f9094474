"""The public names, what importing them costs, and the rules of the folders."""

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

FACES = ("torchlens", "torchlens.extract", "torchlens.storage")
HEAVY = {
    "accelerate",
    "dask",
    "distributed",
    "fsspec",
    "google_crc32c",
    "h5py",
    "matplotlib",
    "numcodecs",
    "pandas",
    "PIL",
    "pyarrow",
    "s3fs",
    "scipy",
    "tqdm",
    "torchvision",
    "transformers",
    "xarray",
    "zarr",
}
FOLDERS = ("torchlens", "extract", "storage", "scripts", "benchmarks")
REFUSED_NAMES = {"utils", "helpers", "common", "base", "misc"}


def run_python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )


def modules(root: Path) -> list[Path]:
    """Return the source files, each once: the links lead to folders listed anyway."""
    return sorted(
        path
        for folder in FOLDERS
        for path in (root / folder).rglob("*.py")
        if not any(parent.is_symlink() for parent in path.parents)
    )


@pytest.mark.parametrize("face", FACES)
def test_face_lists_sorted_names_that_exist(face: str) -> None:
    module = importlib.import_module(face)
    names = module.__all__
    assert list(names) == sorted(set(names))
    assert [name for name in names if not hasattr(module, name)] == []


@pytest.mark.parametrize("face", FACES)
def test_face_has_no_name_that_a_submodule_would_replace(face: str) -> None:
    module = importlib.import_module(face)
    submodules = {found.name for found in pkgutil.iter_modules(module.__path__)}
    assert submodules
    assert set(module.__all__) & submodules == set()


@pytest.mark.parametrize("face", FACES)
def test_face_says_what_each_name_is_for(face: str) -> None:
    module = importlib.import_module(face)
    silent = [
        name
        for name in module.__all__
        if callable(getattr(module, name)) and not getattr(module, name).__doc__
    ]
    assert silent == []


def test_import_of_torchlens_pulls_no_heavy_package(project_root: Path) -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import torchlens\n"
        "print(*sorted({m.partition('.')[0] for m in set(sys.modules) - before}))\n"
        "print(*[m for m in sys.modules if m.startswith('torchlens.')])"
    )
    result = run_python(code, project_root)
    assert result.returncode == 0, result.stderr
    packages, ours = result.stdout.splitlines()
    assert "torchlens" in packages.split()
    assert set(packages.split()) & HEAVY == set()
    assert not {"torchlens.extract", "torchlens.storage"} & set(ours.split())


@pytest.mark.parametrize("folder", ["extract", "storage"])
def test_bare_import_of_a_folder_says_its_real_name(
    project_root: Path, folder: str
) -> None:
    result = run_python(f"import {folder}", project_root)
    assert result.returncode == 1
    assert (
        f"ImportError: This folder is imported as torchlens.{folder}." in result.stderr
    )


def test_links_are_relative_and_reach_the_folders(project_root: Path) -> None:
    for name in ("extract", "storage"):
        link = project_root / "torchlens" / name
        assert link.is_symlink() and link.readlink() == Path("..") / name


def test_no_module_passes_500_lines(project_root: Path) -> None:
    sizes = {
        str(path.relative_to(project_root)): len(path.read_text().splitlines())
        for path in modules(project_root)
    }
    assert len(sizes) > 20
    assert {name: size for name, size in sizes.items() if size > 500} == {}


def test_no_module_has_a_name_that_says_nothing(project_root: Path) -> None:
    stems = {path.stem for path in modules(project_root)}
    assert stems & REFUSED_NAMES == set()


def test_test_files_have_unique_names(project_root: Path) -> None:
    names = [path.name for path in (project_root / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))

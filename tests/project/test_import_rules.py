"""Which folder may import what, beyond the layers that the import linter checks."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDERS = ("torchlens", "extract", "storage")
# What storage may know of the core: it holds arrays and names, never models.
STORAGE_MAY_USE = {"errors", "labels", "records"}
# The modules in which a package may be named at all, as file name patterns.
HOMES = {
    "PIL": ["extract/image_folder.py"],
    "accelerate": ["extract/ranks.py"],
    "fsspec": ["storage/fsspec_*.py"],
    "google_crc32c": ["storage/checksums.py"],
    "pyarrow": ["storage/sample_table.py", "storage/parquet_*.py"],
    "torch.distributed": ["extract/ranks.py"],
    "tqdm": ["extract/progress.py"],
    "xarray": ["storage/read_xarray.py", "storage/store.py"],
    "zarr": ["storage/zarr_*.py"],
}
NEVER = ("matplotlib", "scipy", "timm", "tests", "scripts")


def imports_of(path: Path) -> Iterator[tuple[str, int]]:
    """Return each module that is imported anywhere in a file, with its line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert node.module is not None
            yield from (
                (f"{node.module}.{alias.name}", node.lineno) for alias in node.names
            )


@pytest.fixture(scope="module")
def imports(project_root: Path) -> list[tuple[Path, str, int]]:
    """Return (file from the root, module, line) for every import of the package."""
    found = [
        (path.relative_to(project_root), name, line)
        for folder in FOLDERS
        for path in sorted((project_root / folder).glob("*.py"))
        for name, line in imports_of(path)
    ]
    assert len(found) > 100
    return found


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def test_storage_uses_only_errors_labels_and_records_of_the_core(
    imports: list[tuple[Path, str, int]],
) -> None:
    above = [
        (str(path), name, line)
        for path, name, line in imports
        if path.parts[0] == "storage"
        and is_within(name, "torchlens")
        and name.split(".")[1] not in STORAGE_MAY_USE | {"storage"}
    ]
    assert above == []


def test_storage_knows_no_torch(imports: list[tuple[Path, str, int]]) -> None:
    used = [
        (str(path), name, line)
        for path, name, line in imports
        if path.parts[0] == "storage" and is_within(name, "torch")
    ]
    assert used == []


@pytest.mark.parametrize("package", HOMES)
def test_package_is_named_only_in_its_home(
    imports: list[tuple[Path, str, int]], package: str
) -> None:
    strays = [
        (str(path), name, line)
        for path, name, line in imports
        if is_within(name, package)
        and not any(path.match(home) for home in HOMES[package])
    ]
    assert strays == []


@pytest.mark.parametrize("package", NEVER)
def test_package_is_never_imported(
    imports: list[tuple[Path, str, int]], package: str
) -> None:
    assert [i for i in imports if is_within(i[1], package)] == []


def test_links_do_not_make_second_names(
    imports: list[tuple[Path, str, int]],
) -> None:
    bare = [i for i in imports if i[1].split(".")[0] in ("extract", "storage")]
    assert bare == []

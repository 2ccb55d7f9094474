"""Places to write to, and the small extraction that most tests here share."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from uuid import uuid4

import pytest

from torchlens.storage import MemoryObjects, ObjectStore

SCRIPT = Path(__file__).with_name("write_store.py")


@pytest.fixture(scope="session")
def sample() -> ModuleType:
    """Return `write_store.py` as a module: its spec, its rows, its loop."""
    spec = importlib.util.spec_from_file_location("storage_write_store", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def sample_script() -> Path:
    """Return the path of `write_store.py`, to run it in another process."""
    return SCRIPT


@pytest.fixture(params=["local", "in-memory", "fsspec"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str | ObjectStore:
    """Return a fresh place of each kind; all must behave the same."""
    if request.param == "local":
        return str(tmp_path / "store")
    if request.param == "in-memory":
        return MemoryObjects()
    return f"memory://{uuid4().hex}/store"


@pytest.fixture
def finished(tmp_path: Path, sample: ModuleType) -> Path:
    """Return the folder of a finished local store."""
    from torchlens.storage import open_run

    folder = tmp_path / "finished"
    with open_run(folder, sample.make_spec()) as writer:
        sample.write_all(writer)
    return folder

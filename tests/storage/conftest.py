"""Places to write to, S3 servers, and the small extraction that most tests share."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

import pytest

from torchlens.storage import MemoryObjects, ObjectStore

SCRIPT = Path(__file__).with_name("write_store.py")


@pytest.fixture(scope="session")
def sample() -> ModuleType:
    """Return `write_store.py` as a module: its spec, its rows, its loop."""
    return load_beside("write_store")


def load_beside(name: str) -> ModuleType:
    """Return a file of this folder as a module; tests here are no package."""
    path = Path(__file__).with_name(f"{name}.py")
    full_name = f"storage_{name}"
    if full_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(full_name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[full_name] = module
        spec.loader.exec_module(module)
    return sys.modules[full_name]


@pytest.fixture(scope="session")
def s3() -> ModuleType:
    """Return `s3_server.py` as a module: its keys and servers."""
    return load_beside("s3_server")


@pytest.fixture(scope="session")
def seaweed_proxy(
    s3: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """Run SeaweedFS behind the proxy for the whole session."""
    with s3.seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as server:
        with load_beside("flaky_proxy").flaky_proxy(server.host, server.port) as proxy:
            yield proxy


@pytest.fixture(scope="session")
def moto_proxy(
    s3: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """Run moto behind the proxy for the whole session."""
    with s3.moto(tmp_path_factory.mktemp("moto")) as server:
        with load_beside("flaky_proxy").flaky_proxy(server.host, server.port) as proxy:
            yield proxy


@pytest.fixture(params=["seaweedfs", "moto"])
def proxy(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Return the proxy before each server in turn, without faults."""
    name = "seaweed_proxy" if request.param == "seaweedfs" else "moto_proxy"
    running = request.getfixturevalue(name)
    running.heal()
    yield running
    running.heal()


@pytest.fixture
def seaweed(seaweed_proxy: Any) -> Iterator[Any]:
    """Return the proxy before SeaweedFS, without faults."""
    seaweed_proxy.heal()
    yield seaweed_proxy
    seaweed_proxy.heal()


@pytest.fixture
def s3_options(s3: ModuleType) -> Callable[..., dict[str, Any]]:
    """Return a function from a proxy and a client to storage options."""

    def options(proxy: Any, client: str = "s3fs") -> dict[str, Any]:
        return {
            "key": s3.KEY,
            "secret": s3.SECRET,
            "endpoint_url": proxy.url,
            "client": client,
        }

    return options


@pytest.fixture
def s3_url() -> str:
    """Return a fresh place in the bucket that every server has."""
    return f"s3://ready/{uuid4().hex}/store"


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

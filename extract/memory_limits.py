"""How much more host memory this process may take, by whoever limits it.

A container or a batch job is killed at its own limit, long before the machine's memory
is full; so every limit that can be read is, and the smallest room counts.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MemoryRoom", "host_memory_room"]

_KIB = 1024
_MIB = 1 << 20
# Version 1 of cgroups says "no limit" with a number near 2**63.
_UNLIMITED = 1 << 60


@dataclass(frozen=True, slots=True)
class MemoryRoom:
    """Bytes that are left, and which limit says so."""

    available_bytes: int
    limited_by: str


def host_memory_room(
    root: Path = Path("/"), environ: Mapping[str, str] = os.environ
) -> MemoryRoom | None:
    """Return the smallest room of all limits that apply, or `None` if none is known.

    Args:
        root: Where `proc` and `sys` are found.
        environ: Environment variables; a SLURM job's limits are there.
    """
    rooms = [
        *_machine(root),
        *_cgroup_2(root),
        *_cgroup_1(root),
        *_slurm(root, environ),
        *_address_space(root),
    ]
    return min(rooms, key=lambda room: room.available_bytes, default=None)


def _machine(root: Path) -> Iterator[MemoryRoom]:
    available = _fields(root / "proc/meminfo").get("MemAvailable")
    if available is not None:
        yield MemoryRoom(available * _KIB, "the machine's free memory")


def _cgroup_2(root: Path) -> Iterator[MemoryRoom]:
    for path in _cgroup_paths(root, ""):
        # A limit of any group above counts too; within a container the path that the
        # kernel names may not exist, and the mount itself is the group.
        for folder in _upwards(root / "sys/fs/cgroup", path):
            limit = _number(folder / "memory.max")
            used = _number(folder / "memory.current")
            if limit is not None and used is not None:
                cache = _cache_bytes(folder / "memory.stat", "inactive_file")
                name = f"the cgroup limit in {folder / 'memory.max'}"
                yield MemoryRoom(max(0, limit - used + cache), name)


def _cgroup_1(root: Path) -> Iterator[MemoryRoom]:
    for path in _cgroup_paths(root, "memory"):
        for folder in _upwards(root / "sys/fs/cgroup/memory", path):
            limit = _number(folder / "memory.limit_in_bytes")
            used = _number(folder / "memory.usage_in_bytes")
            if limit is not None and used is not None and limit < _UNLIMITED:
                cache = _cache_bytes(folder / "memory.stat", "total_inactive_file")
                name = f"the cgroup limit in {folder / 'memory.limit_in_bytes'}"
                yield MemoryRoom(max(0, limit - used + cache), name)


def _slurm(root: Path, environ: Mapping[str, str]) -> Iterator[MemoryRoom]:
    resident = _fields(root / "proc/self/status").get("VmRSS", 0) * _KIB
    node = _integer(environ.get("SLURM_MEM_PER_NODE"))
    # 0 asks SLURM for all memory of the node.
    if node:
        yield MemoryRoom(max(0, node * _MIB - resident), "SLURM_MEM_PER_NODE")
    per_cpu = _integer(environ.get("SLURM_MEM_PER_CPU"))
    cpus = _integer(environ.get("SLURM_CPUS_ON_NODE")) or 1
    if per_cpu:
        room = max(0, per_cpu * cpus * _MIB - resident)
        yield MemoryRoom(room, "SLURM_MEM_PER_CPU")


def _address_space(root: Path) -> Iterator[MemoryRoom]:
    try:
        import resource
    except ImportError:
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return
    used = _fields(root / "proc/self/status").get("VmSize", 0) * _KIB
    yield MemoryRoom(max(0, limit - used), "the address space limit (ulimit -v)")


def _cgroup_paths(root: Path, controller: str) -> Iterator[str]:
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(",") and path:
            yield path
            return


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    folder = mount / path.strip("/")
    while True:
        yield folder
        if folder == mount or mount not in folder.parents:
            return
        folder = folder.parent


def _fields(path: Path) -> dict[str, int]:
    """Read lines such as "VmRSS:  1234 kB"."""
    found = {}
    for line in _text(path).splitlines():
        name, _, value = line.partition(":")
        number = _integer(value.split()[0] if value.split() else None)
        if number is not None:
            found[name] = number
    return found


def _cache_bytes(path: Path, field: str) -> int:
    for line in _text(path).splitlines():
        name, _, value = line.partition(" ")
        if name == field:
            return _integer(value) or 0
    return 0


def _number(path: Path) -> int | None:
    return _integer(_text(path))


def _integer(text: str | None) -> int | None:
    try:
        return int(text) if text is not None else None
    except ValueError:
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""

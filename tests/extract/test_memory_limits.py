"""The tightest limit counts, whoever sets it."""

from pathlib import Path

import pytest

from torchlens.extract.memory_limits import MemoryRoom, host_memory_room

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A root folder of a machine with 16 GiB free and a process of 1 GiB."""
    write(tmp_path / "proc/meminfo", f"MemTotal: 1 kB\nMemAvailable: {16 << 20} kB\n")
    write(
        tmp_path / "proc/self/status", f"VmSize:\t{2 << 20} kB\nVmRSS:\t{1 << 20} kB\n"
    )
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def room(root: Path, **environ: str) -> MemoryRoom:
    found = host_memory_room(root, environ)
    assert found is not None
    return found


def test_free_memory_of_the_machine_counts(machine: Path) -> None:
    assert room(machine) == MemoryRoom(16 * GIB, "the machine's free memory")


def test_cgroup_2_limit_counts_without_its_cache(machine: Path) -> None:
    write(machine / "proc/self/cgroup", "0::/job/step\n")
    group = machine / "sys/fs/cgroup/job/step"
    write(group / "memory.max", f"{4 * GIB}\n")
    write(group / "memory.current", f"{3 * GIB}\n")
    write(group / "memory.stat", f"anon 5\ninactive_file {GIB}\n")
    found = room(machine)
    assert found.available_bytes == 2 * GIB and "memory.max" in found.limited_by


def test_cgroup_2_limit_of_a_parent_counts(machine: Path) -> None:
    write(machine / "proc/self/cgroup", "0::/job/step\n")
    write(machine / "sys/fs/cgroup/job/step/memory.max", "max\n")
    write(machine / "sys/fs/cgroup/job/step/memory.current", "0\n")
    write(machine / "sys/fs/cgroup/job/memory.max", f"{2 * GIB}\n")
    write(machine / "sys/fs/cgroup/job/memory.current", "0\n")
    assert room(machine).available_bytes == 2 * GIB


def test_cgroup_limit_of_a_container_is_found_at_the_mount(machine: Path) -> None:
    write(machine / "proc/self/cgroup", "0::/outside/not/mounted\n")
    write(machine / "sys/fs/cgroup/memory.max", f"{3 * GIB}\n")
    write(machine / "sys/fs/cgroup/memory.current", f"{GIB}\n")
    assert room(machine).available_bytes == 2 * GIB


def test_cgroup_1_limit_counts_and_unlimited_does_not(machine: Path) -> None:
    write(machine / "proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/slurm/job\n")
    group = machine / "sys/fs/cgroup/memory"
    write(group / "memory.limit_in_bytes", "9223372036854771712\n")
    write(group / "memory.usage_in_bytes", "0\n")
    write(group / "slurm/job/memory.limit_in_bytes", f"{2 * GIB}\n")
    write(group / "slurm/job/memory.usage_in_bytes", f"{GIB}\n")
    found = room(machine)
    assert found.available_bytes == GIB and "memory.limit_in_bytes" in found.limited_by


def test_slurm_limits_count_less_what_is_in_use(machine: Path) -> None:
    assert room(machine, SLURM_MEM_PER_NODE="4096").available_bytes == 3 * GIB
    per_cpu = room(machine, SLURM_MEM_PER_CPU="1024", SLURM_CPUS_ON_NODE="3")
    assert per_cpu == MemoryRoom(2 * GIB, "SLURM_MEM_PER_CPU")
    # 0 means all of the node.
    assert room(machine, SLURM_MEM_PER_NODE="0").available_bytes == 16 * GIB


def test_address_space_limit_counts(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (5 * GIB, 5 * GIB))
    found = room(machine)
    assert found.available_bytes == 3 * GIB and "ulimit -v" in found.limited_by


def test_nothing_known_is_no_limit(tmp_path: Path) -> None:
    assert host_memory_room(tmp_path, {}) is None


def test_this_machine_has_room() -> None:
    found = host_memory_room()
    assert found is None or found.available_bytes > 0

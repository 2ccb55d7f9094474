"""`import torchlens` against `import torch`, in fresh processes that take turns.

CPU seconds of the child, least of `--repeats`.  Bar: 1.05.

    python benchmarks/import_time.py [--repeats N]
"""

import argparse
import platform
import resource
import subprocess
import sys
import time

BAR = 1.05
MODULES = ("torch", "torchlens")


def main() -> None:
    """Print both times and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    seconds = dict.fromkeys(MODULES, float("inf"))
    for name in MODULES:
        _import(name)
    for _ in range(repeats):
        for name in MODULES:
            seconds[name] = min(seconds[name], _import(name))
    print(f"{platform.machine()}, {time.strftime('%Y-%m-%d')}")
    for name in MODULES:
        print(f"import {name:12}{seconds[name]:7.3f} CPU s")
    print(f"ratio {seconds['torchlens'] / seconds['torch']:.3f}, bar {BAR}")


def _import(name: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", f"import {name}"], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    user = after.ru_utime - before.ru_utime
    return user + after.ru_stime - before.ru_stime


if __name__ == "__main__":
    main()

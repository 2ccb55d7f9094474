"""`import torchlens` beside `import torch`, in fresh processes that take turns.

CPU seconds of the child, least of `--repeats`.  The bar of 1.05 is on importing both;
the last line adds the modules that a first trace loads.

    python benchmarks/import_time.py [--repeats N]
"""

import argparse
import platform
import resource
import subprocess
import sys
import time

BAR = 1.05
CASES = {
    "torch": "import torch",
    "torch, torchlens": "import torch, torchlens",
    "and tl.trace": "import torch, torchlens; torchlens.trace",
}


def main() -> None:
    """Print both times and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    seconds = dict.fromkeys(CASES, float("inf"))
    for code in CASES.values():
        _run(code)
    for _ in range(repeats):
        for name, code in CASES.items():
            seconds[name] = min(seconds[name], _run(code))
    print(f"{platform.machine()}, {time.strftime('%Y-%m-%d')}, bar {BAR}")
    for name, spent in seconds.items():
        print(f"import {name:18}{spent:7.3f} CPU s  {spent / seconds['torch']:6.3f}")


def _run(code: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    user = after.ru_utime - before.ru_utime
    return user + after.ru_stime - before.ru_stime


if __name__ == "__main__":
    main()

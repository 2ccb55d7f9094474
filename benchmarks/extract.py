"""Extract to disk against the same loop with hand-written hooks into a memmap.

ResNet-18 at 224 px in batches of 16, the outputs of its four stages, one torch thread,
CPU seconds of the whole process with all its threads, alternating, best of `--repeats`.
The baseline writes into memmaps made beforehand, in the same mode, dtype and batches.

    python benchmarks/extract.py [--rows N] [--repeats N] [--folder DIR]
"""

import argparse
import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import torchlens
from torchlens.extract import extract_dataset
from torchlens.planner import plan

LAYERS = ("layer1", "layer2", "layer3", "layer4")
BATCH_SIZE = 16
BAR = 1.05


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    from torchvision.models import resnet18

    model = resnet18(weights=None).eval()
    data = torch.randn(arguments.rows, 3, 224, 224)
    made = plan(model, data[:3], LAYERS)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        ways: dict[str, Callable[[], Any]] = {
            "plain forward, nothing kept": lambda: forward_only(model, data),
            "hand-written hooks, memmap": lambda: hooks_to_memmap(model, data, folder),
            "extract, ready plan": lambda: extract(model, data, made, folder),
            "extract, planning included": lambda: extract(model, data, LAYERS, folder),
        }
        seconds = measure(ways, arguments.repeats)
    base = seconds["hand-written hooks, memmap"]
    megabytes = arguments.rows * sum(site.row_bytes for site in made.sites) / 1e6
    print(
        f"{platform.machine()}, torch {torch.__version__}, "
        f"{arguments.rows} rows, {megabytes:.0f} MB, {time.strftime('%Y-%m-%d')}"
    )
    for way, value in seconds.items():
        print(f"{way:32}{value:8.2f} CPU s  {value / base:5.3f}")
    print(f"bar: a ready plan at most {BAR} of the hooks ({torchlens.__name__})")


def measure(ways: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Return the least CPU seconds of each way; the ways take turns."""
    found = dict.fromkeys(ways, float("inf"))
    for way in ways.values():
        way()
    for _ in range(repeats):
        for name, way in ways.items():
            begun = time.process_time()
            way()
            found[name] = min(found[name], time.process_time() - begun)
    return found


def forward_only(model: nn.Module, data: Tensor) -> None:
    """Run the model over the data."""
    with torch.inference_mode():
        for start in range(0, len(data), BATCH_SIZE):
            model(data[start : start + BATCH_SIZE].clone())


def hooks_to_memmap(model: nn.Module, data: Tensor, folder: Path) -> None:
    """Run the model with hooks that copy each stage's output into a mapped file."""
    shapes = dict(zip(LAYERS, [(64, 56), (128, 28), (256, 14), (512, 7)], strict=True))
    arrays = {
        layer: np.lib.format.open_memmap(
            folder / f"{layer}.npy",
            mode="w+",
            dtype=np.float32,
            shape=(len(data), width, size, size),
        )
        for layer, (width, size) in shapes.items()
    }
    start = 0

    def keep(layer: str) -> Callable[..., None]:
        target = torch.from_numpy(arrays[layer])

        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            target[start : start + len(output)] = output

        return hook

    handles = [
        model.get_submodule(layer).register_forward_hook(keep(layer))
        for layer in LAYERS
    ]
    with torch.inference_mode():
        for start in range(0, len(data), BATCH_SIZE):
            model(data[start : start + BATCH_SIZE].clone())
    for handle in handles:
        handle.remove()
    for array in arrays.values():
        array.flush()
    for layer in LAYERS:
        (folder / f"{layer}.npy").unlink()


def extract(model: nn.Module, data: Tensor, layers: Any, folder: Path) -> None:
    """Extract the same into a store."""
    place = folder / "store"
    extract_dataset(
        model, data, layers, output_dir=place, batch_size=BATCH_SIZE, progress=False
    )
    shutil.rmtree(place)


if __name__ == "__main__":
    main()

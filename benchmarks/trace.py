"""CPU time of a structural trace against the plain forward of the same model.

Bars: 1.25 for ResNet-18 at 224 px batch 8 and for GPT-2 small on 64 tokens; for tiny
models, where the forward is nothing, 0.1 ms per op.  One torch thread, the two ways
interleaved; the verdict is on the median of the ratios (or differences) within a
round.

    python benchmarks/trace.py [--rounds N] [--only TEXT]
"""

import argparse
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from statistics import median
from typing import Any

import torch
from measuring import interleaved
from torch import nn

from torchlens.tracer import run_capture

MAX_RATIO = 1.25
MAX_MS_PER_OP = 0.1


@dataclass(frozen=True)
class Case:
    """A model with its input.

    Attributes:
        name: As printed.
        build: Returns the model and the arguments of its call.
        tiny: Whether time per op is what counts, not the ratio.
    """

    name: str
    build: Callable[[], tuple[nn.Module, tuple[Any, ...]]]
    tiny: bool = False


def _resnet() -> tuple[nn.Module, tuple[Any, ...]]:
    from torchvision.models import resnet18

    return resnet18(), (torch.randn(8, 3, 224, 224),)


def _gpt2(width: int, layers: int, heads: int, tokens: int) -> tuple[nn.Module, Any]:
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(n_embd=width, n_layer=layers, n_head=heads)
    return GPT2Model(config), (torch.randint(0, 50000, (1, tokens)),)


def _perceptron() -> tuple[nn.Module, tuple[Any, ...]]:
    layers = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(20)]
    return nn.Sequential(*layers), (torch.randn(1, 8),)


def _encoder() -> tuple[nn.Module, tuple[Any, ...]]:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return layer, (torch.randn(1, 4, 16),)


class _Arithmetic(nn.Module):
    """150 ops and no submodule."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(50):
            x = (x + 1).relu() * 0.5
        return x


CASES = (
    Case("ResNet-18, 8 x 224 px", _resnet),
    Case("GPT-2 small, 64 tokens", lambda: _gpt2(768, 12, 12, 64)),
    Case("GPT-2 of 2 blocks, width 16", lambda: _gpt2(16, 2, 2, 8), tiny=True),
    Case("transformer encoder layer", _encoder, tiny=True),
    Case("perceptron of 40 layers", _perceptron, tiny=True),
    Case("150 ops, no submodule", lambda: (_Arithmetic(), (torch.randn(1, 8),)), True),
)


def measure(case: Case, rounds: int) -> str:
    """Return the case's row of the table."""
    torch.manual_seed(0)
    model, args = case.build()
    model.eval()
    with torch.no_grad():
        num_ops = len(run_capture(model, args, {}).graph.ops)
        plain, traced = interleaved(
            [lambda: model(*args), lambda: run_capture(model, args, {})], rounds=rounds
        )
    pairs = list(zip(plain, traced, strict=True))
    ratio = median(b / a for a, b in pairs)
    per_op = median(b - a for a, b in pairs) / num_ops * 1e3
    value, bar = (per_op, MAX_MS_PER_OP) if case.tiny else (ratio, MAX_RATIO)
    return (
        f"| {case.name} | {num_ops} | {median(plain) * 1e3:.2f} | "
        f"{median(traced) * 1e3:.2f} | {ratio:.2f} | {per_op:.3f} | "
        f"{'ms per op' if case.tiny else 'ratio'} <= {bar} | "
        f"{'met' if value <= bar else 'missed'} |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="part of a case's name")
    options = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    print(
        f"{date.today()}, {platform.machine()}, {os.cpu_count()} CPUs, "
        f"load {load:.1f}, Python {platform.python_version()}, "
        f"torch {torch.__version__}\n"
    )
    print("| model | ops | plain ms | trace ms | ratio | ms per op | bar | verdict |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | --- | --- |")
    for case in CASES:
        if options.only in case.name:
            print(measure(case, options.rounds), flush=True)


if __name__ == "__main__":
    main()

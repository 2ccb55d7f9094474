"""CPU time of a replay against the plain forward of the same model.

Replays of module sites and of op sites, for a compute-bound model and for tiny batches,
where all that is measured is overhead; and a forward that ends early against a model
cut off by hand.  Rows are copied into tensors allocated before ("out") or handed over
("kept"); nothing is written to disk.  The plain forward runs in the same grad mode on
the same batch; hooks written by hand that copy to the same tensors stand beside it.

CPU seconds of the process with one torch thread, ways interleaved.  The verdict is on
the median of the ratios within a round; the ratio of the fastest rounds stands beside
it, since other work on the machine disturbs single rounds.

Run:  python benchmarks/replay.py [--rounds N] [--only TEXT]
"""

import argparse
import copy
import datetime
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from torchlens import ModelInputs, Replayer, plan

SECONDS_PER_TURN = 0.02
Way = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A model, a batch, sites, and how dear a replay may be."""

    title: str
    model: nn.Module
    inputs: ModelInputs
    layers: Mapping[str, str]
    bar: float
    truncated: nn.Module | None = None
    hooked: bool = False


def resnet() -> nn.Module:
    """Return ResNet-18 with random weights."""
    from torchvision.models import resnet18

    model: nn.Module = resnet18()
    return model.eval()


def gpt2(width: int) -> nn.Module:
    """Return 12 blocks of GPT-2 with random weights."""
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(
        n_layer=12,
        n_embd=width,
        n_head=12 if width % 12 == 0 else 4,
        vocab_size=1000,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=2,
    )
    model: Any = GPT2Model(config)
    model.eval()
    return cast(nn.Module, model)


def cut_resnet(model: nn.Module) -> nn.Module:
    """Return the part of a ResNet up to its first stage."""
    names = ("conv1", "bn1", "relu", "maxpool", "layer1")
    return nn.Sequential(*(model.get_submodule(name) for name in names))


def cut_gpt2(model: nn.Module, blocks: int) -> nn.Module:
    """Return a GPT-2 that has the first `blocks` blocks only, and no final norm."""
    part: Any = copy.copy(model)
    part._modules = dict(model._modules)
    part.h = nn.ModuleList(list(model.get_submodule("h").children())[:blocks])
    part.ln_f = nn.Identity()
    return cast(nn.Module, part)


def cases(only: str) -> Iterator[Case]:
    """Yield every case whose title contains `only`."""
    found: list[Callable[[], Case]] = []

    def add(title: str, make: Callable[[str], Case]) -> None:
        if only in title:
            found.append(lambda: make(title))

    # The model's last module or op is among the sites: nothing is saved by halting.
    stages = {name: name for name in ("layer1", "layer2", "layer3", "layer4", "fc")}
    sums = {f"sum {k}": f"iadd_{k}" for k in (2, 4, 6, 8)} | {"fc": "linear_1"}
    large = ModelInputs((torch.randn(16, 3, 224, 224),))
    small = ModelInputs((torch.randn(1, 3, 64, 64),))
    text = ModelInputs((), {"input_ids": torch.randint(0, 1000, (1, 8))})
    blocks = {f"h.{k}": f"h.{k}" for k in range(12)} | {"ln_f": "ln_f"}
    # GPT-2's activation adds twice in every block, its attention never.
    residuals = {f"h.{k}": f"add_{4 * k + 6}" for k in range(12)}
    residuals["ln_f"] = "layernorm_25"
    some = ("h.2", "h.5", "h.11", "ln_f")
    three = {name: blocks[name] for name in some}
    sparse = {name: residuals[name] for name in some}
    for title, inputs, bars in (
        ("ResNet-18, 224 px, batch 16", large, (1.02, 1.05)),
        ("ResNet-18, 64 px, batch 1", small, (1.05, 1.15)),
    ):
        _add_pair(add, title, resnet, inputs, stages, sums, bars)
    for width in (768, 64):
        title = f"GPT-2, 12 x {width}, 1 x 8 tokens"

        def make(width: int = width) -> nn.Module:
            return gpt2(width)

        _add_pair(add, title, make, text, three, sparse, (1.05, 1.15))
        _add_pair(
            add, f"{title}, every block", make, text, blocks, residuals, (1.05, 1.15)
        )
    add("halt: ResNet-18, 224 px, batch 16, after layer1", _halted_resnet(large))
    add("halt: ResNet-18, 64 px, batch 1, after layer1", _halted_resnet(small))
    add("halt: GPT-2, 12 x 768, 1 x 8 tokens, after block 3", _halted_gpt2(768, text))
    add("halt: GPT-2, 12 x 64, 1 x 8 tokens, after block 3", _halted_gpt2(64, text))
    for make_case in found:
        yield make_case()


def _add_pair(
    add: Callable[[str, Callable[[str], Case]], None],
    title: str,
    make: Callable[[], nn.Module],
    inputs: ModelInputs,
    modules: Mapping[str, str],
    ops: Mapping[str, str],
    bars: tuple[float, float],
) -> None:
    add(
        f"{title}: modules",
        lambda name: Case(name, make(), inputs, modules, bars[0], hooked=True),
    )
    add(f"{title}: ops", lambda name: Case(name, make(), inputs, ops, bars[1]))


def _halted_resnet(inputs: ModelInputs) -> Callable[[str], Case]:
    def make(title: str) -> Case:
        model = resnet()
        layers = {"layer1": "layer1"}
        return Case(title, model, inputs, layers, 1.05, truncated=cut_resnet(model))

    return make


def _halted_gpt2(width: int, inputs: ModelInputs) -> Callable[[str], Case]:
    def make(title: str) -> Case:
        model = gpt2(width)
        cut = cut_gpt2(model, 3)
        return Case(title, model, inputs, {"h.2": "h.2"}, 1.05, truncated=cut)

    return make


def measure(case: Case, rounds: int) -> list[tuple[str, float, float, float]]:
    """Return (way, ms, median ratio, ratio of minima) for all but the plain ways."""
    made = plan(case.model, case.inputs, case.layers)
    replayer = Replayer(case.model, made, check_model=False)
    count = case.inputs.num_samples()
    args, kwargs = case.inputs.args, case.inputs.kwargs
    base = case.model if case.truncated is None else case.truncated
    out = {site.name: torch.empty(count, *site.row_shape) for site in made.sites}

    def plain_inference() -> None:
        with torch.inference_mode():
            base(*args, **kwargs)

    def plain() -> None:
        with torch.no_grad():
            base(*args, **kwargs)

    def replay_out() -> None:
        replayer.run(args, kwargs, num_samples=count, out=out)

    def replay_kept() -> None:
        replayer.run(args, kwargs, num_samples=count)

    none: Any = contextmanager(_nothing)
    ways: dict[str, tuple[Way, Callable[[], Any]]] = {
        "inference": (plain_inference, none),
        "out": (replay_out, lambda: replayer),
        "no_grad": (plain, none),
        "kept": (replay_kept, lambda: replayer),
    }
    if case.hooked:
        hooks = contextmanager(_hooks)
        ways["hooks"] = plain_inference, lambda: hooks(case, out)
    times = _interleave(ways, rounds)
    against = {"out": "inference", "kept": "no_grad", "hooks": "inference"}
    found = []
    for way, plain_way in against.items():
        if way not in times:
            continue
        own, base_times = times[way], times[plain_way]
        ratios = [a / b for a, b in zip(own, base_times, strict=True)]
        least = min(own) / min(base_times)
        found.append((way, min(own) * 1e3, statistics.median(ratios), least))
    return found


def _nothing() -> Iterator[None]:
    yield


def _hooks(case: Case, out: Mapping[str, Tensor]) -> Iterator[None]:
    handles = [
        case.model.get_submodule(address).register_forward_hook(
            lambda module, args, output, target=out[name]: _copy(target, output)
        )
        for name, address in case.layers.items()
    ]
    yield
    for handle in handles:
        handle.remove()


def _copy(target: Tensor, output: Any) -> None:
    target.copy_(output[0] if isinstance(output, tuple) else output)


def _interleave(
    ways: Mapping[str, tuple[Way, Callable[[], Any]]], rounds: int
) -> dict[str, list[float]]:
    """Return CPU seconds of one call of each way in each round."""
    start = time.process_time()
    ways["no_grad"][0]()
    once = time.process_time() - start
    number = max(1, int(SECONDS_PER_TURN / max(once, 1e-6)))
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, (run, context) in ways.items():
            with context():
                run()  # caches are warm, and one-off work is done
                start = time.process_time()
                for _ in range(number):
                    run()
                spent = (time.process_time() - start) / number
            if turn:
                times[name].append(spent)
    return times


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    versions = ", ".join(
        f"{name} {sys.modules[name].__version__}"
        for name in ("torch", "torchvision", "transformers")
        if name in sys.modules
    )
    print(
        f"{versions}, Python {platform.python_version()}, "
        f"{platform.processor() or platform.machine()}, one thread, "
        f"{datetime.date.today()}; medians of {options.rounds} interleaved rounds"
    )
    print("| case | way | ms | ratio, median | of minima | bar | |")
    print("|---|---|---|---|---|---|---|")
    for case in cases(options.only):
        for way, milliseconds, ratio, least in measure(case, options.rounds):
            judged = way != "hooks"
            verdict = ("ok" if ratio <= case.bar else "over") if judged else ""
            bar = f"{case.bar:.2f}" if judged else ""
            print(
                f"| {case.title} | {way} | {milliseconds:.2f} | {ratio:.3f} "
                f"| {least:.3f} | {bar} | {verdict} |",
                flush=True,
            )


if __name__ == "__main__":
    main()

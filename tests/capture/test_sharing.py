"""One model in several hands: other iterators, other threads, `train()` in between."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchlens.errors import TorchLensError
from torchlens.guards import CompositeGuards
from torchlens.planner import plan
from torchlens.recording import pluck
from torchlens.replayer import Replayer
from torchlens.streaming import Batch, stream

DROPPED = 0.5


def model_of() -> nn.Sequential:
    """Return a model whose rows are other ones in train mode."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Dropout(DROPPED), nn.Linear(8, 3))


def expected_of(model: nn.Module, x: Tensor) -> Tensor:
    modes = [module.training for module in model.modules()]
    with torch.no_grad():
        rows = torch.cat([model.eval()(part) for part in x.split(4)])
    for module, mode in zip(model.modules(), modes, strict=True):
        module.training = mode
    return rows


def assert_untouched(model: nn.Module, *, training: bool) -> None:
    for module in model.modules():
        assert module.training is training
        assert "forward" not in vars(module) and not module._forward_hooks


def close(iterator: Iterator[Batch]) -> None:
    iterator.close()  # type: ignore[attr-defined]  # a generator


def test_train_called_between_batches_changes_no_row() -> None:
    model, x = model_of().train(), torch.randn(12, 3)
    expected, rows = expected_of(model, x), []
    for batch in stream(model, x.split(4), "2"):
        rows.append(batch["2"])
        assert model.training  # as the caller left it
        model.train()
    assert torch.equal(torch.cat(rows), expected)
    assert_untouched(model, training=True)


def test_frozen_parts_stay_frozen_in_train_mode() -> None:
    model, x = model_of().train(), torch.randn(8, 3)
    model[1].eval()
    expected = expected_of(model, x)
    batches = stream(model, x.split(4), "2", training=True)
    rows = torch.cat([batch["2"] for batch in batches])
    assert torch.equal(rows, expected)
    assert [module.training for module in model] == [True, False, True]


@pytest.mark.parametrize("first_ends", [True, False])
@pytest.mark.parametrize("layers", [("2", "0"), ("linear_2_3", "linear_1_1")])
def test_iterators_over_one_model_end_in_any_order(
    layers: tuple[str, str], first_ends: bool
) -> None:
    model, x = model_of().train(), torch.randn(12, 3)
    expected = [expected_of(model, x), expected_of(model[:1], x)]
    iterators = [stream(model, x.split(4), layer) for layer in layers]
    rows: list[list[Tensor]] = [[], []]
    for _ in range(2):
        for index, layer in enumerate(layers):
            rows[index].append(next(iterators[index])[layer])
    ends, stays = (0, 1) if first_ends else (1, 0)
    close(iterators[ends])
    rows[stays].append(next(iterators[stays])[layers[stays]])
    close(iterators[stays])
    for found, wanted in zip(rows, expected, strict=True):
        got = torch.cat(found)
        assert torch.equal(got, wanted[: len(got)])
    assert_untouched(model, training=True)


def test_forward_of_another_thread_is_not_ours() -> None:
    """The other thread runs the same shapes in the middle of our forward."""

    class Waiting(nn.Module):
        meanwhile: Callable[[], Any] | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.meanwhile is not None:
                action, self.meanwhile = self.meanwhile, None
                thread = threading.Thread(target=action)
                thread.start()
                thread.join()
            return x

    waiting = Waiting()
    model = nn.Sequential(waiting, nn.Linear(3, 3), nn.ReLU()).eval()
    x, other = torch.randn(4, 3), torch.randn(4, 3)
    seen: list[Tensor] = []
    for layers in (["1"], ["linear_1_2"]):
        made = plan(model, x, layers)
        with Replayer(model, made) as replayer:
            waiting.meanwhile = lambda: seen.append(model(other))
            rows = replayer.run((x,), {}, num_samples=4)
        with torch.no_grad():
            assert torch.equal(rows[layers[0]], model[1](x))
    assert len(seen) == 2
    for value in seen:  # ran to its end, undisturbed
        assert torch.equal(value, model(other))


def test_threads_that_watch_one_model_agree_and_leave_it() -> None:
    model, x = model_of().eval(), torch.randn(40, 3)
    with torch.no_grad():
        expected = torch.cat([model(part) for part in x.split(1)])
    failures: list[BaseException] = []
    wrong: list[str] = []

    def work() -> None:
        try:
            for _ in range(3):
                batches = list(stream(model, x.split(1), "2"))
                if not torch.equal(torch.cat([b["2"] for b in batches]), expected):
                    wrong.append("stream")
                if not torch.equal(pluck(model, x[:1], "linear_2_3"), expected[:1]):
                    wrong.append("pluck")
        except TorchLensError as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and not wrong
    assert_untouched(model, training=False)


def test_guards_stay_open_until_the_last_forward_ends() -> None:
    before = nn.functional.has_torch_function_unary  # type: ignore[attr-defined]
    one, other = CompositeGuards(), CompositeGuards()
    one.open()
    other.open()
    one.close()
    opened = nn.functional.has_torch_function_unary  # type: ignore[attr-defined]
    other.close()
    assert opened is not before
    after = nn.functional.has_torch_function_unary  # type: ignore[attr-defined]
    assert after is before


def test_planning_leaves_no_state_in_the_model() -> None:
    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.calls = 0
            self.seen: list[Tensor] = []
            self.last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen.append(x)
            self.last = self.linear(x)
            return self.last

    model = Remembering()
    assert not plan(model, torch.randn(4, 3), ["linear"]).inference
    assert (model.calls, model.seen, model.last) == (0, [], None)


@pytest.mark.parametrize("watched", ["2", "linear_2_3", "0"])
@pytest.mark.parametrize("plucked", ["2", "linear_2_3", "dropout_1_2"])
def test_a_model_that_is_watched_already_can_be_plucked_and_planned(
    watched: str, plucked: str
) -> None:
    model, x = model_of().eval(), torch.randn(8, 3)
    made = plan(model, x, plucked)
    iterator = stream(model, x.split(4), watched)
    first = next(iterator)[watched]
    expected = expected_of(model[:2] if plucked == "dropout_1_2" else model, x[:4])
    assert torch.equal(pluck(model, x[:4], plucked), expected)
    # A plan made while somebody watches is the one made while nobody does.
    assert plan(model, x, plucked).digest == made.digest
    with Replayer(model, made) as replayer:
        rows = replayer.run((x[:4],), {}, num_samples=4)
    assert torch.equal(rows[plucked], expected)
    wanted = expected_of(model[:1] if watched == "0" else model, x)
    assert torch.equal(torch.cat([first, next(iterator)[watched]]), wanted)
    close(iterator)
    assert_untouched(model, training=False)


class Reusing(nn.Module):
    """Writes into memory that an earlier batch was handed."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.site = nn.Identity()
        self.way = way
        self.kept: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        rows = self.linear(x).detach()
        kept = self.kept.setdefault(len(x), rows)
        if self.way == "zeroed" and kept is not rows:
            kept.zero_()
            self.kept[len(x)] = kept = rows
        elif self.way == "copied" and kept is not rows:
            kept.copy_(rows)
        elif kept is not rows:
            kept.numpy()[:] = rows.numpy()
        return self.site(kept)


@pytest.mark.parametrize("way", ["zeroed", "copied", "numpy"])
def test_rows_stay_when_the_model_reuses_their_memory(way: str) -> None:
    model, x = Reusing(way).eval(), torch.randn(12, 3)
    expected = expected_of(model.linear, x)
    rows = [batch["site"] for batch in stream(model, x.split(4), "site")]
    assert torch.equal(torch.cat(rows), expected)

"""Rows of a loader's batches, with ids, as they are made."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from torchlens.errors import DataError, InputError, PathDivergenceError, PlanError
from torchlens.planner import plan
from torchlens.streaming import stream


def model_of() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def test_every_row_comes_once_with_its_id() -> None:
    model, x = model_of().train(), torch.randn(10, 3)
    batches = list(stream(model, x.split(4), ["0", "2"]))
    assert [batch.ids for batch in batches] == [
        tuple("0123"),
        tuple("4567"),
        tuple("89"),
    ]
    with torch.no_grad():
        for name, expected in (("0", model[0](x)), ("2", model(x))):
            got = torch.cat([batch[name] for batch in batches])
            assert torch.allclose(got, expected, atol=1e-6)
    assert model.training
    assert not model[0]._forward_hooks


def test_loader_of_one_tensor_and_of_pairs() -> None:
    model, x = model_of(), torch.randn(6, 3)
    single = DataLoader(TensorDataset(x), batch_size=4)
    assert sum(len(batch["0"]) for batch in stream(model, single, "0")) == 6
    pairs = DataLoader(TensorDataset(x, torch.arange(6)), batch_size=4)
    with pytest.raises(InputError, match=r"gave a list of 2 items.*Pass inputs="):
        next(stream(model, pairs, "0"))
    found = list(stream(model, pairs, "0", inputs=lambda batch: batch[0]))
    assert [batch.source[1].tolist() for batch in found] == [[0, 1, 2, 3], [4, 5]]


def test_ids_come_from_a_key_or_a_function() -> None:
    class Named(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    batches = [{"x": torch.randn(2, 3), "id": ["a", "b"]}]
    [batch] = stream(Named(), batches, "self", ids="id")
    assert batch.ids == ("a", "b")
    [batch] = stream(
        Named(),
        batches,
        "self",
        ids=lambda batch: torch.tensor([7, 8]),
        inputs=lambda batch: batch["x"],
    )
    assert batch.ids == ("7", "8")
    with pytest.raises(DataError, match="ids='name' was wanted as a key"):
        next(
            stream(
                Named(), batches, "self", ids="name", inputs=lambda batch: batch["x"]
            )
        )
    with pytest.raises(DataError, match="A batch of 2 samples came with 1 ids: a"):
        next(
            stream(
                Named(),
                batches,
                "self",
                ids=lambda batch: ["a"],
                inputs=lambda batch: batch["x"],
            )
        )
    with pytest.raises(InputError, match="ids was wanted as the key"):
        stream(Named(), batches, "self", ids=["a", "b"])  # type: ignore[arg-type]


def test_plan_is_taken_as_it_is() -> None:
    model, x = model_of(), torch.randn(4, 3)
    made = plan(model, x, "0", dtype="float16")
    [batch] = stream(model, [x], made)
    assert batch["0"].dtype is torch.float16
    with pytest.raises(InputError, match="A plan fixes dtype"):
        stream(model, [x], made, dtype="float32")
    with pytest.raises(PlanError, match="weights: planned"):
        stream(model_of(), [x], made)


def test_rows_train_another_model_on_the_fly() -> None:
    model, x = model_of(), torch.randn(8, 3)
    head = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(head.parameters(), 0.1)
    before = head.weight.detach().clone()
    for batch in stream(model, x.split(4), "1"):
        optimizer.zero_grad()
        head(batch["1"]).square().mean().backward()
        optimizer.step()
    assert not torch.equal(head.weight, before)
    assert model[0].weight.grad is None


def test_early_end_of_the_loop_restores_the_model() -> None:
    model = model_of().train()
    iterator = stream(model, torch.randn(8, 3).split(4), "0")
    next(iterator)
    assert "forward" in vars(model[0])
    iterator.close()  # type: ignore[attr-defined]  # a generator
    assert model.training
    assert "forward" not in vars(model[0])


def test_empty_loader_yields_nothing() -> None:
    assert list(stream(model_of(), [], "0")) == []


def test_both_policies_for_another_path() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
            self.stem = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x + 0)
            return self.a(x) if x.mean() > 0 else self.b(x)

    model: Any = Branch()
    batches = [torch.rand(4, 3), -torch.rand(4, 3), torch.rand(2, 3)]
    with pytest.raises(PathDivergenceError, match="Batch 2 .samples '4', '5'"):
        list(stream(model, batches, ["stem", "a"]))
    found = list(stream(model, batches, ["stem", "a"], on_divergence="retrace"))
    assert [batch.missing for batch in found] == [(), ("a",), ()]
    assert list(found[1].rows) == ["stem"]
    assert torch.equal(found[1]["stem"], batches[1])

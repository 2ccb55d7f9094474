"""Which part of a batch is which argument; what would be a guess is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchlens.errors import InputError
from torchlens.extract.model_call import (
    InputRule,
    Signature,
    make_input_rule,
    read_signature,
)


class One(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Masked(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x


class Text(nn.Module):
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        **more: Any,
    ) -> Tensor:
        raise NotImplementedError


class Two(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b


class Any_(nn.Module):
    def forward(self, *args: Any) -> Tensor:
        raise NotImplementedError


X, Y = torch.zeros(2, 3), torch.ones(2)


def rule_for(model: nn.Module, batch: Any, inputs: Any = None) -> InputRule:
    return make_input_rule(batch, read_signature(model), inputs, {"id", "age"})


def test_signature_tells_names_positions_and_what_is_required() -> None:
    assert read_signature(Masked()) == Signature(
        frozenset({"x", "mask"}), ("x", "mask"), ("x",), False
    )
    text = read_signature(Text())
    assert text.names == {"input_ids", "attention_mask", "labels"}
    assert text.positional == ("input_ids", "attention_mask") and not text.required
    assert read_signature(Any_()).takes_more


@pytest.mark.parametrize(
    ("model", "batch", "args", "kwargs"),
    [
        (One(), X, (X,), {}),
        (Two(), X, (X,), {}),  # too few: the plan says so, nothing is guessed here
        (One(), {"x": X}, (), {"x": X}),
        (One(), {"image": X, "id": ["a", "b"]}, (X,), {}),
        (One(), {"image": X, "id": Y, "name": ["a", "b"]}, (X,), {}),
        (One(), {"image": X, "age": Y}, (X,), {}),
        (Two(), {"b": X, "a": Y}, (), {"a": Y, "b": X}),
        (
            Text(),
            {"input_ids": X, "attention_mask": Y, "id": ["a"], "words": ["w"]},
            (),
            {"input_ids": X, "attention_mask": Y},
        ),
        (One(), (X, Y), (X,), {}),
        (One(), [X, Y, Y], (X,), {}),
        (One(), [X], (X,), {}),
        (Masked(), [X], (X,), {}),
        (Text(), (X,), (X,), {}),
        (Any_(), {"image": X}, (X,), {}),
    ],
)
def test_plain_batches_need_no_word(
    model: nn.Module, batch: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    found = rule_for(model, batch).apply(batch)
    assert len(found.args) == len(args) and set(found.kwargs) == set(kwargs)
    assert all(one is two for one, two in zip(found.args, args, strict=True))
    assert all(found.kwargs[name] is kwargs[name] for name in kwargs)


@pytest.mark.parametrize(
    ("model", "batch", "message"),
    [
        (Masked(), (X, Y), "inputs=0 for the first alone, or inputs=\\(0, 1\\)"),
        (Two(), (X, Y), "forward takes \\(a, b\\)"),
        (Text(), (X, Y), "cannot be told"),
        (Any_(), (X, Y), "forward takes \\(\\*args\\)"),
        (One(), {"image": X, "label": Y}, "arrays 'image', 'label'"),
        (One(), {"x": X, "label": Y}, "which is which cannot be told"),
        (Two(), {"image": X}, "forward takes \\(a, b\\)"),
        (One(), {"name": ["a", "b"]}, "arrays \\(none\\)"),
        (One(), "text", "a str, which is no input of a model"),
        (One(), (), "tuples of 0"),
    ],
)
def test_batches_that_could_mean_two_things_are_refused(
    model: nn.Module, batch: Any, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        rule_for(model, batch)


@pytest.mark.parametrize(
    ("batch", "inputs", "args", "kwargs"),
    [
        ((X, Y), 1, (Y,), {}),
        ((X, Y), (1, 0), (Y, X), {}),
        ({"p": X, "q": Y}, "q", (Y,), {}),
        ({"p": X, "q": Y}, {"a": "q", "b": "p"}, (), {"a": Y, "b": X}),
        ((X, Y), lambda batch: batch[1], (Y,), {}),
        ((X, Y), lambda batch: (batch[1], batch[0]), (Y, X), {}),
        ((X, Y), lambda batch: {"b": batch[0]}, (), {"b": X}),
    ],
)
def test_inputs_say_what_to_pass(
    batch: Any, inputs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    found = rule_for(Two(), batch, inputs).apply(batch)
    assert all(one is two for one, two in zip(found.args, args, strict=True))
    assert found.kwargs.keys() == kwargs.keys()
    assert all(found.kwargs[name] is kwargs[name] for name in kwargs)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"c": 0}, "names 'c', which forward does not take.*\\(a, b\\)"),
        ((), "is neither a key, a tuple of keys"),
        (0.5, "is neither a key, a tuple of keys"),
    ],
)
def test_inputs_that_say_nothing_are_refused(inputs: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        rule_for(Two(), (X, Y), inputs)


@pytest.mark.parametrize(("inputs", "batch"), [(5, (X, Y)), ("z", {"p": X}), ("z", X)])
def test_inputs_that_the_batch_lacks_are_named(inputs: Any, batch: Any) -> None:
    with pytest.raises(InputError, match=f"the entry {inputs!r} of a batch"):
        rule_for(Two(), batch, inputs).apply(batch)


def test_rule_is_part_of_the_identity() -> None:
    batch = {"p": X, "q": Y}
    rules = [rule_for(Two(), batch, inputs) for inputs in ("p", "q", {"a": "p"}, len)]
    assert len({str(rule.identity()) for rule in rules}) == 4

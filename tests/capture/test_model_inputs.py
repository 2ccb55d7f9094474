"""What a forward is called with, and how it is cut into samples."""

from collections import OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchlens.errors import InputError
from torchlens.model_inputs import ModelInputs, as_inputs


def test_tensor_tuple_and_mapping_become_arguments() -> None:
    x, y = torch.zeros(2, 3), torch.ones(2)
    assert as_inputs(x).args == (x,)
    assert as_inputs((x, y)).args == (x, y)
    assert as_inputs(OrderedDict(a=x)).kwargs == {"a": x}
    given = ModelInputs((x,), {"b": y})
    assert as_inputs(given) is given


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ([1, 2], r"A list of 2 items .* may be one argument or several"),
        (3, r"wanted as a tensor, a tuple .* but a int came"),
        ({1: torch.zeros(1)}, r"keys must be strings; 1 is not"),
    ],
)
def test_other_examples_are_refused_with_the_remedy(
    example: object, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        as_inputs(example)


def test_fields_of_the_wrong_kind_are_refused() -> None:
    with pytest.raises(InputError, match=r"Write \(x,\) for one argument"):
        ModelInputs(torch.zeros(1))  # type: ignore[arg-type]  # the point of the test
    with pytest.raises(InputError, match="kwargs was wanted as a mapping"):
        ModelInputs((), [1])  # type: ignore[arg-type]  # the point of the test


def test_num_samples_is_that_of_the_first_tensor_with_the_axis() -> None:
    inputs = ModelInputs((torch.tensor(1.0), torch.zeros(5, 2)), {"k": torch.zeros(7)})
    assert inputs.num_samples() == 5
    assert inputs.num_samples(1) == 2
    with pytest.raises(InputError, match=r"No input tensor has an axis 3 .* #1 float"):
        inputs.num_samples(3)
    with pytest.raises(InputError, match=r"The input #0 has no samples"):
        ModelInputs((torch.zeros(0, 2),)).num_samples()


def test_take_cuts_nested_tensors_and_leaves_constants() -> None:
    x, constant = torch.arange(12.0).reshape(4, 3), torch.arange(3)
    inputs = ModelInputs((x, constant), {"more": {"m": [x + 1]}, "flag": True})
    part = inputs.take((2, 0))
    assert torch.equal(part.args[0], x[[2, 0]])
    assert part.args[1] is constant
    assert torch.equal(part.kwargs["more"]["m"][0], x[[2, 0]] + 1)
    assert part.kwargs["flag"] is True


@given(st.integers(1, 5), st.integers(0, 1), st.booleans())
def test_distinct_samples_differ_pairwise(size: int, axis: int, equal: bool) -> None:
    rows = torch.ones(size, 4) if equal else torch.randn(size, 4)
    x = rows.movedim(0, axis)
    batch = ModelInputs((x,)).distinct(3, axis)
    found = batch.args[0].movedim(axis, 0)
    assert found.shape == (3, 4)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert not torch.equal(found[one], found[other])
    assert torch.equal(found[0], rows[0])


def test_distinct_keeps_real_rows_where_there_are_enough() -> None:
    x = torch.randn(5, 2)
    assert torch.equal(ModelInputs((x,)).distinct(3).args[0], x[:3])


def test_distinct_rolls_tokens_and_keeps_masks() -> None:
    ids = torch.tensor([[5, 6, 7, 8]])
    mask = torch.tensor([[1, 1, 1, 0]])
    flags = torch.tensor([[True, False, False, False]])
    batch = ModelInputs((), {"ids": ids, "mask": mask, "flags": flags}).distinct(3)
    assert batch.kwargs["ids"].tolist() == [[5, 6, 7, 8], [8, 5, 6, 7], [7, 8, 5, 6]]
    assert torch.equal(batch.kwargs["mask"], mask.expand(3, 4))
    assert torch.equal(batch.kwargs["flags"], flags.expand(3, 4))


def test_distinct_is_the_same_every_time_and_leaves_the_example() -> None:
    x = torch.zeros(1, 3)
    one, other = (ModelInputs((x,)).distinct(3).args[0] for _ in range(2))
    assert torch.equal(one, other)
    assert torch.equal(x, torch.zeros(1, 3))

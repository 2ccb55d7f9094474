"""A fingerprint changes with the data and with nothing else."""

import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torchlens.extract.fingerprints import (
    describe_callable,
    digest_ids,
    digest_item,
    fingerprint_rows,
)
from torchlens.extract.samples import open_source

ITEMS: list[Any] = [
    torch.zeros(3),
    torch.zeros(3, dtype=torch.float64),
    torch.zeros(1, 3),
    torch.tensor([0.0, 0.0, -0.0]),
    torch.zeros(3, dtype=torch.bfloat16),
    np.zeros(3),
    "text",
    b"text",
    1,
    1.0,
    True,
    None,
    [1, 2],
    [[1], 2],
    {"a": 1},
    {"a": 1, "b": None},
    {"b": 1},
]


def test_item_digest_differs_with_content() -> None:
    assert len({digest_item(item) for item in ITEMS}) == len(ITEMS)


def test_item_digest_is_the_same_for_equal_items() -> None:
    one = {"x": torch.arange(6).reshape(2, 3), "y": ["a", (1, 2)]}
    other = {"y": ["a", (1, 2)], "x": torch.arange(6).reshape(3, 2).T.reshape(2, 3)}
    other["x"] = torch.arange(6).reshape(2, 3).t().contiguous().t()
    assert digest_item(one) == digest_item(other)


def test_image_counts_with_its_pixels() -> None:
    from PIL import Image

    black, white = (Image.new("RGB", (2, 2), shade) for shade in ("black", "white"))
    assert digest_item(black) != digest_item(white)
    assert digest_item(black) == digest_item(Image.new("RGB", (2, 2), "black"))


def test_ids_are_digested_with_their_borders() -> None:
    assert digest_ids(["ab", "c"]) != digest_ids(["a", "bc"])


@pytest.mark.parametrize("row", [0, 99])
def test_fingerprint_sees_the_ends(row: int) -> None:
    data = torch.randn(100, 3)
    before = fingerprint_rows(open_source(data))
    assert before == fingerprint_rows(open_source(data.clone()))
    data[row] += 1
    assert before != fingerprint_rows(open_source(data))


def test_fingerprint_of_a_dataset_that_changes_is_none() -> None:
    class Noisy(list[float]):
        def __getitem__(self, row: Any) -> Any:
            return random.random()

    assert fingerprint_rows(open_source(Noisy([0.0, 0.0]))) is None


def test_fingerprint_of_a_folder_is_of_its_files(tmp_path: Path) -> None:
    from PIL import Image

    for name in ("a.png", "b.png"):
        Image.new("L", (2, 2), 3).save(tmp_path / name)
    plain = fingerprint_rows(open_source(tmp_path, transform=np.asarray))
    # What is made of the files is told elsewhere and may differ between machines.
    assert plain == fingerprint_rows(open_source(tmp_path, transform=str))
    Image.new("L", (2, 2), 4).save(tmp_path / "b.png")
    assert plain != fingerprint_rows(open_source(tmp_path, transform=np.asarray))


def test_callables_are_described_without_addresses() -> None:
    class Resize:
        def __call__(self, image: Any) -> Any:
            return image

    assert describe_callable(np.asarray).endswith("asarray")
    assert "0x" not in describe_callable(Resize())
    assert "3" in describe_callable(torch.nn.Linear(3, 2))
    assert describe_callable(partial(int, base=2)) != describe_callable(
        partial(int, base=8)
    )

"""Every dataset form ends as the same rows; what has no order is refused."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from torchlens.errors import DataError, TorchLensWarning
from torchlens.extract.samples import open_source


class Squares(Dataset[Any]):
    def __len__(self) -> int:
        return 7

    def __getitem__(self, row: int) -> int:
        return row * row


class Endless(Dataset[Any]):
    def __getitem__(self, row: int) -> int:
        return row


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


class Rereadable:
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


class SizedStream(Stream):
    def __len__(self) -> int:
        return 5


@pytest.mark.parametrize(
    "dataset",
    [Squares(), [n * n for n in range(7)], np.arange(7) ** 2, torch.arange(7) ** 2],
    ids=["dataset", "list", "array", "tensor"],
)
def test_indexed_forms_give_the_same_rows(dataset: object) -> None:
    source = open_source(dataset)
    assert source.num_rows == 7 and not source.streamed
    assert [int(source.items[row]) for row in range(7)] == [n * n for n in range(7)]


def test_loader_gives_its_dataset_collate_workers_and_batch_size() -> None:
    def collate(items: list[Any]) -> Any:
        return items

    loader = DataLoader(
        Squares(), batch_size=3, collate_fn=collate, num_workers=2, prefetch_factor=4
    )
    source = open_source(loader)
    assert source.items is loader.dataset and source.collate is collate
    assert source.batch_size == 3
    assert source.options.num_workers == 2 and source.options.prefetch_factor == 4


def test_collate_given_beside_a_loader_wins() -> None:
    def mine(items: list[Any]) -> Any:
        return items

    assert open_source(DataLoader(Squares()), collate=mine).collate is mine


def test_shuffling_loader_is_read_in_order_with_a_warning() -> None:
    with pytest.warns(TorchLensWarning, match="row i of the store is item i"):
        source = open_source(DataLoader(Squares(), shuffle=True))
    assert source.num_rows == 7


def test_drop_last_is_ignored_with_a_warning() -> None:
    with pytest.warns(TorchLensWarning, match="every row is extracted"):
        assert open_source(DataLoader(Squares(), 4, drop_last=True)).num_rows == 7


@pytest.mark.parametrize(
    "sampler",
    [
        SubsetRandomSampler([1, 2]),
        WeightedRandomSampler([1.0] * 7, 7),
        RandomSampler(Squares(), replacement=True),
        RandomSampler(Squares(), num_samples=3),
    ],
    ids=["subset", "weighted", "replacement", "fewer"],
)
def test_other_samplers_are_refused_with_the_remedy(sampler: Any) -> None:
    with pytest.raises(DataError, match=r"Subset\(dataset, indices\)"):
        open_source(DataLoader(Squares(), sampler=sampler))


def test_plain_batch_sampler_is_looked_through() -> None:
    batches = BatchSampler(SequentialSampler(Squares()), 5, drop_last=False)
    source = open_source(DataLoader(Squares(), batch_sampler=batches))
    assert source.batch_size == 5


def test_own_batch_sampler_is_refused() -> None:
    with pytest.raises(DataError, match="Pass its dataset and batch_size="):
        open_source(DataLoader(Squares(), batch_sampler=[[0, 1], [2]]))


def test_loader_without_batching_is_refused() -> None:
    with pytest.raises(DataError, match="Pass a dataset of single samples"):
        open_source(DataLoader(Squares(), batch_size=None))


def test_subset_is_an_indexed_dataset() -> None:
    source = open_source(Subset(Squares(), [6, 0]))
    assert source.num_rows == 2 and source.items[0] == 36


@pytest.mark.parametrize(
    ("dataset", "length"),
    [(Stream(), None), (SizedStream(), 5), (Rereadable(), None)],
    ids=["stream", "sized", "iterable"],
)
def test_iterables_are_streams(dataset: object, length: int | None) -> None:
    source = open_source(dataset)
    assert source.streamed and source.num_rows == length


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ([], "has no items"),
        (torch.empty(0, 3), "has no items"),
        (torch.tensor(1.0), "first axis must be the sample"),
        (np.array([object()]), "array of Python objects"),
        ({"a": torch.zeros(3)}, "list of dicts"),
        ({1, 2}, "has no order"),
        (iter([1, 2]), "can be read only once"),
        ((n for n in range(3)), "can be read only once"),
        (3, "int is no dataset"),
        (Endless(), "no __len__"),
        ("/no/such/folder", "no folder '/no/such/folder'"),
    ],
)
def test_what_is_no_dataset_is_refused(dataset: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_source(dataset)


def test_transform_is_for_folders_only() -> None:
    with pytest.raises(DataError, match="Apply it inside the dataset"):
        open_source(TensorDataset(torch.zeros(3)), transform=str)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    from PIL import Image

    (tmp_path / "sub").mkdir()
    for shade, name in enumerate(["b.png", "a.jpg", "sub/c.PNG"]):
        Image.new("L", (4, 2), 10 * shade).save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no image")
    return tmp_path


def test_folder_lists_images_by_relative_name(pictures: Path) -> None:
    source = open_source(str(pictures), transform=np.asarray)
    assert source.file_names == ("a.jpg", "b.png", "sub/c.PNG")
    assert source.items[1].shape == (2, 4, 3)
    assert (source.items[1] == 0).all() and (source.items[2] == 20).all()


def test_folder_needs_its_preprocessing(pictures: Path) -> None:
    with pytest.raises(DataError, match="need transform="):
        open_source(pictures)


def test_folder_without_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no image"):
        open_source(tmp_path, transform=np.asarray)


def test_mapped_file_is_read_without_sharing_its_memory(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(6.0).reshape(3, 2))
    source = open_source(np.load(tmp_path / "x.npy", mmap_mode="r"))
    batch = source.collate([source.items[0], source.items[2]])
    assert batch.tolist() == [[0, 1], [4, 5]] and source.num_rows == 3

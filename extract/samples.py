"""Which datasets are understood, and the one form all of them are brought into.

Row i is dataset index i.  Anything that would say otherwise, such as a sampler, is
either harmless and reported or refused with what to do instead.  What an item means
for ids is in `sample_ids`, for the model in `model_call`.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    default_collate,
)

from torchlens.errors import DataError, TorchLensWarning

from .image_folder import open_image_folder

__all__ = ["LoaderOptions", "Source", "open_source"]

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True)
class LoaderOptions:
    """How items are read: worker processes and memory pinning."""

    num_workers: int = 0
    pin_memory: bool | None = None
    prefetch_factor: int | None = None
    timeout_seconds: float = 0.0
    worker_init_fn: Callable[[int], None] | None = None
    multiprocessing_context: Any = None


@dataclass(frozen=True, slots=True)
class Source:
    """A dataset in the form the engine reads.

    Attributes:
        items: Indexed with a row when `streamed` is false, iterated otherwise.
        num_rows: Its length; `None` when it is only known by reading it.
        streamed: Whether items come from an iterator.
        collate: Joins a list of items into one batch.
        options: Workers and pinning.
        file_names: Ids that come with the data, for a folder.
        batch_size: What a given DataLoader asks for.
    """

    items: Any
    num_rows: int | None
    streamed: bool = False
    collate: Collate = default_collate
    options: LoaderOptions = LoaderOptions()
    file_names: tuple[str, ...] | None = None
    batch_size: int | None = None


class _Reiterable(IterableDataset[Any]):
    """A plain iterable as a dataset that a DataLoader accepts."""

    def __init__(self, iterable: Iterable[Any]) -> None:
        self._iterable = iterable

    def __iter__(self) -> Iterator[Any]:
        return iter(self._iterable)


class _ReadOnlyRows(Dataset[torch.Tensor]):
    """Rows of an array that torch cannot share memory with, such as a mapped file."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, row: int) -> torch.Tensor:
        return torch.from_numpy(np.array(self.array[row]))


def open_source(
    dataset: object,
    *,
    collate: Collate | None = None,
    num_workers: int = 0,
    transform: Callable[[Any], Any] | None = None,
) -> Source:
    """Bring `dataset` into the form the engine reads.

    Args:
        dataset: A map-style or iterable dataset, a DataLoader, a tensor, an array, a
            list of items, or the path of a folder of images.
        collate: Joins items into a batch; default what the DataLoader has, else
            torch's default.
        num_workers: Processes that read items; a DataLoader brings its own number.
        transform: Turns an image of a folder into a tensor; needed for folders only.

    Raises:
        DataError: If the dataset has no rows, no known order, or an unknown form.
    """
    if isinstance(dataset, str | Path):
        folder = open_image_folder(Path(dataset), transform)
        options = LoaderOptions(num_workers=num_workers)
        return Source(
            folder,
            len(folder),
            collate=collate or default_collate,
            options=options,
            file_names=folder.names,
        )
    if transform is not None:
        raise DataError(
            f"transform= is for a folder of images, but the dataset is a "
            f"{type(dataset).__name__}. Apply it inside the dataset instead, and "
            f"describe it in preprocess=."
        )
    if isinstance(dataset, DataLoader):
        return _open_loader(dataset, collate, num_workers)
    options = LoaderOptions(num_workers=num_workers)
    return _open_items(dataset, collate or default_collate, options, None)


def _open_items(
    dataset: object, collate: Collate, options: LoaderOptions, batch_size: int | None
) -> Source:
    if isinstance(dataset, torch.Tensor | np.ndarray):
        _check_array(dataset)
        if isinstance(dataset, np.ndarray) and not dataset.flags.writeable:
            dataset = _ReadOnlyRows(dataset)
    elif isinstance(dataset, IterableDataset):
        return _open_stream(dataset, collate, options, batch_size)
    elif isinstance(dataset, Mapping):
        raise DataError(
            f"A mapping with keys {list(dataset)[:5]} has no first sample. Pass a "
            f"list of dicts, one a sample, or a Dataset that returns them."
        )
    elif isinstance(dataset, Set):
        raise DataError(
            "A set has no order, so its rows would change from run to run. Pass a "
            "sorted list."
        )
    elif isinstance(dataset, Iterator):
        raise DataError(
            f"A {type(dataset).__name__} can be read only once, so the run could not "
            f"be resumed. Pass a list, or an IterableDataset that starts anew."
        )
    elif not hasattr(dataset, "__getitem__"):
        if isinstance(dataset, Iterable):
            return _open_stream(_Reiterable(dataset), collate, options, batch_size)
        raise DataError(
            f"{type(dataset).__name__} is no dataset. Wanted: a map-style or iterable "
            f"Dataset, a DataLoader, a tensor, an array, a list of items, or the path "
            f"of a folder of images."
        )
    num_rows = _length(dataset)
    if num_rows is None:
        raise DataError(
            f"{type(dataset).__name__} has items by index but no __len__, so its rows "
            f"cannot be counted. Define __len__, or pass an IterableDataset."
        )
    if num_rows == 0:
        raise DataError("The dataset has no items; there is nothing to extract.")
    return Source(dataset, num_rows, False, collate, options, None, batch_size)


def _check_array(dataset: torch.Tensor | np.ndarray[Any, Any]) -> None:
    if dataset.ndim == 0:
        raise DataError(
            "A 0-dimensional tensor is no dataset. The first axis must be the sample."
        )
    if isinstance(dataset, np.ndarray) and dataset.dtype == object:
        raise DataError(
            "An array of Python objects cannot be batched. Pass a list of items and "
            "collate=, or an array of numbers."
        )


def _open_stream(
    dataset: IterableDataset[Any],
    collate: Collate,
    options: LoaderOptions,
    batch_size: int | None,
) -> Source:
    num_rows = _length(dataset)
    return Source(dataset, num_rows, True, collate, options, None, batch_size)


def _length(dataset: object) -> int | None:
    try:
        return len(dataset)  # type: ignore[arg-type]  # that is what is asked here
    except (TypeError, NotImplementedError):
        return None


def _open_loader(
    loader: DataLoader[Any], collate: Collate | None, num_workers: int
) -> Source:
    options = LoaderOptions(
        loader.num_workers or num_workers,
        loader.pin_memory,
        loader.prefetch_factor,
        loader.timeout,
        loader.worker_init_fn,
        loader.multiprocessing_context,
    )
    chosen: Collate = collate or loader.collate_fn
    if isinstance(loader.dataset, IterableDataset):
        if loader.batch_size is None and collate is None:
            chosen = default_collate
        return _open_items(loader.dataset, chosen, options, loader.batch_size)
    batches = loader.batch_sampler
    if batches is None:
        raise DataError(
            "The DataLoader has batch_size=None, so its items may be whole batches and "
            "rows cannot be told apart. Pass a dataset of single samples."
        )
    if type(batches) is not BatchSampler:
        raise DataError(
            f"The DataLoader groups rows with {type(batches).__name__}, but batches "
            f"are cut by row number here. Pass its dataset and batch_size= instead."
        )
    _check_sampler(batches.sampler, loader.dataset)
    if batches.drop_last:
        warnings.warn(
            "drop_last=True of the DataLoader is ignored: every row is extracted.",
            TorchLensWarning,
            stacklevel=4,
        )
    return _open_items(loader.dataset, chosen, options, batches.batch_size)


def _check_sampler(
    sampler: Sampler[int] | Iterable[int], dataset: Dataset[Any]
) -> None:
    length = _length(dataset)
    if type(sampler) is SequentialSampler and _length(sampler) == length:
        return
    if type(sampler) is RandomSampler and not sampler.replacement:
        if sampler.num_samples == _length(sampler.data_source) == length:
            warnings.warn(
                "The DataLoader shuffles; that is ignored, since row i of the store "
                "is item i of the dataset.",
                TorchLensWarning,
                stacklevel=5,
            )
            return
    raise DataError(
        f"The DataLoader draws its rows with {type(sampler).__name__}, which leaves "
        f"out, repeats or reorders rows. Pass torch.utils.data.Subset(dataset, "
        f"indices) with the rows in the order wanted, without a sampler."
    )

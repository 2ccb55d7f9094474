"""A plan over the batches of a loader: rows as they are made, for use on the fly."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .errors import DataError, InputError
from .lookup import Layers
from .model_access import unwrap_model
from .model_inputs import ModelInputs, as_inputs
from .planner import plan
from .plans import CapturePlan
from .replayer import Policy, Replayer

Ids = str | Callable[[Any], Sequence[str]] | None

__all__ = ["Batch", "Ids", "stream"]


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one batch.

    Attributes:
        ids: One per sample, in the order of the rows.
        rows: By site name, [samples, *features]; ordinary tensors on the model's
            device that share no memory with later batches.
        missing: Sites that this batch did not have, under the policy "retrace".
        source: The batch as the loader gave it.
    """

    ids: tuple[str, ...]
    rows: Mapping[str, Tensor]
    missing: tuple[str, ...] = ()
    source: Any = field(default=None, repr=False)

    def __getitem__(self, name: str) -> Tensor:
        """Return the rows of one site."""
        return self.rows[name]


def stream(
    model: nn.Module,
    loader: Iterable[Any],
    layers: Layers | CapturePlan,
    *,
    ids: Ids = None,
    inputs: Callable[[Any], Any] | None = None,
    dtype: str | torch.dtype | Mapping[str, str | torch.dtype] | None = None,
    batch_axis: int = 0,
    training: bool = False,
    allow: Collection[str] = (),
    on_divergence: Policy = "raise",
) -> Iterator[Batch]:
    """Yield the rows of `layers` for every batch of `loader`.

    The first batch makes the plan, unless `layers` is one.  Every batch runs in the
    plan's train/eval mode, whatever the model's is in between, and several iterators
    may share a model; closing or exhausting the iterator leaves the model as it was.

    Args:
        model: The model to capture.
        loader: Yields collated batches: tensors, tuples of positional arguments,
            mappings of keyword arguments.
        layers: What to capture, or a plan.
        ids: The key under which a batch holds its ids (taken out of the model's
            inputs), or a function from a batch to them; otherwise samples are numbered
            from "0".
        inputs: Function from a batch to the model's inputs, for batches that hold
            more, such as labels.
        dtype: As in `plan`.
        batch_axis: As in `plan`.
        training: As in `plan`.
        allow: As in `plan`.
        on_divergence: What to do with a batch that takes another path: "raise", or
            "retrace" to yield the sites that still exist.

    Raises:
        InputError: If a batch cannot be turned into the model's inputs.
        DataError: If a batch has another number of ids than samples.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU())
        >>> for batch in stream(model, torch.randn(6, 3).split(4), "1"):
        ...     print(batch.ids, tuple(batch["1"].shape))
        ('0', '1', '2', '3') (4, 2)
        ('4', '5') (2, 2)
    """
    module = unwrap_model(model)
    source = _Source(ids, inputs, _device_of(module))
    if not isinstance(layers, CapturePlan):
        return _planned(
            module,
            loader,
            source,
            layers,
            dtype,
            batch_axis,
            training,
            allow,
            on_divergence,
        )
    if dtype is not None or allow or training or batch_axis:
        raise InputError(
            "A plan fixes dtype, batch_axis, training and allow, so stream takes none "
            "of them beside it. Plan again with other values."
        )
    replayer = Replayer(module, layers, on_divergence=on_divergence)
    return _batches(replayer, loader, source)


def _planned(
    model: nn.Module,
    loader: Iterable[Any],
    source: "_Source",
    layers: Layers,
    dtype: str | torch.dtype | Mapping[str, str | torch.dtype] | None,
    batch_axis: int,
    training: bool,
    allow: Collection[str],
    on_divergence: Policy,
) -> Iterator[Batch]:
    iterator = iter(loader)
    try:
        first = next(iterator)
    except StopIteration:
        return
    made = plan(
        model,
        source.inputs(first),
        layers,
        dtype=dtype,
        batch_axis=batch_axis,
        training=training,
        allow=allow,
    )
    # Just planned on this very model: its weights need no second look.
    replayer = Replayer(model, made, on_divergence=on_divergence, check_model=False)
    yield from _batches(replayer, _chain(first, iterator), source)


def _chain(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rest


def _batches(
    replayer: Replayer, loader: Iterable[Any], source: "_Source"
) -> Iterator[Batch]:
    axis = replayer.plan.input_batch_axis
    with replayer:
        for batch in loader:
            inputs = source.inputs(batch)
            num_samples = inputs.num_samples(axis)
            names = source.ids(batch, num_samples)
            rows = replayer.run(
                inputs.args,
                inputs.kwargs,
                num_samples=num_samples,
                sample_ids=names,
            )
            yield Batch(names, rows, replayer.missing, batch)


class _Source:
    """Takes the model's inputs and the ids out of a loader's batch."""

    def __init__(
        self,
        ids: Ids,
        inputs: Callable[[Any], Any] | None,
        device: torch.device | None,
    ) -> None:
        if not (ids is None or isinstance(ids, str) or callable(ids)):
            raise InputError(
                "ids was wanted as the key of the ids in a batch, or as a function "
                f"from a batch to its ids, but a {type(ids).__name__} came."
            )
        self._ids = ids
        self._inputs = inputs
        self._device = device
        self._count = 0

    def inputs(self, batch: Any) -> ModelInputs:
        """Return the model's inputs of a batch, on the model's device."""
        given = batch
        if self._inputs is not None:
            given = self._inputs(batch)
        elif isinstance(batch, Mapping) and isinstance(self._ids, str):
            given = {key: item for key, item in batch.items() if key != self._ids}
        elif isinstance(batch, list):
            if len(batch) != 1:
                raise InputError(
                    f"The loader gave a list of {len(batch)} items, and which of them "
                    "the model takes is not known. Pass inputs=, a function from a "
                    "batch to the model's inputs, such as "
                    "inputs=lambda batch: batch[0]."
                )
            given = batch[0]
        inputs = as_inputs(given)
        return inputs if self._device is None else inputs.to(self._device)

    def ids(self, batch: Any, num_samples: int) -> tuple[str, ...]:
        """Return the ids of a batch's samples."""
        first = self._count
        self._count += num_samples
        if self._ids is None:
            return tuple(map(str, range(first, first + num_samples)))
        if callable(self._ids):
            found = self._ids(batch)
        elif isinstance(batch, Mapping) and self._ids in batch:
            found = batch[self._ids]
        else:
            raise DataError(
                f"ids={self._ids!r} was wanted as a key of every batch, but this "
                f"{type(batch).__name__} has no such key. Pass a function instead."
            )
        if isinstance(found, Tensor):
            found = found.tolist()
        names = tuple(map(str, found))
        if len(names) != num_samples:
            raise DataError(
                f"A batch of {num_samples} samples came with {len(names)} ids: "
                f"{', '.join(names[:5])}. Give one id per sample."
            )
        return names


def _device_of(model: nn.Module) -> torch.device | None:
    """Return the one device of the model, or `None` where it is spread over several."""
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or any("_hf_hook" in vars(part) for part in model.modules()):
        return None
    return devices.pop()

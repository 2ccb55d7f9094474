"""From parsed arguments to the objects that the functions of the library take."""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchlens.errors import DataError, InputError, PlanError
from torchlens.lookup import Layers
from torchlens.model_inputs import ModelInputs
from torchlens.plans import CapturePlan

from .config import as_dtype_names
from .job import example_inputs
from .model_call import Inputs
from .named_objects import load_dataset, load_model, load_transform

__all__ = [
    "dataset_of",
    "example_of",
    "inputs_of",
    "layers_of",
    "metadata_of",
    "model_of",
]

_NUM_TOKENS = 100
# What torchvision's models for classification are documented to take.
_IMAGE_SHAPE = (3, 224, 224)


def model_of(arguments: argparse.Namespace) -> nn.Module:
    """Return the model, on the device asked for and in eval mode."""
    model = load_model(arguments.model, arguments.weights).eval()
    return model if arguments.device is None else model.to(arguments.device)


def dataset_of(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """Return the dataset, and the transform where it is a folder of images."""
    dataset = load_dataset(arguments.data)
    if not isinstance(dataset, Path):
        return dataset, None
    transform = load_transform(arguments.transform, arguments.model, arguments.weights)
    if transform is None:
        raise DataError(
            f"The images in {arguments.data!r} need --transform FILE.py:name, or "
            f"torchvision weights such as torchvision:ResNet18_Weights.DEFAULT, to "
            f"become what the model expects."
        )
    return dataset, transform


def example_of(arguments: argparse.Namespace, model: nn.Module) -> ModelInputs:
    """Return a small batch: of the data, or random numbers of the given shape."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if arguments.data is not None:
        dataset, transform = dataset_of(arguments)
        found = example_inputs(model, dataset, transform, inputs_of(arguments))
        return found.to(device)
    shape = _shape(arguments)
    dtype = getattr(torch, str(as_dtype_names(arguments.input_dtype)))
    generator = torch.Generator().manual_seed(0)
    if dtype.is_floating_point:
        batch = torch.randn((3, *shape), generator=generator).to(dtype)
    else:
        batch = torch.randint(_NUM_TOKENS, (3, *shape), generator=generator).to(dtype)
    return ModelInputs((batch.to(device),))


def _shape(arguments: argparse.Namespace) -> tuple[int, ...]:
    if arguments.input_shape is not None:
        try:
            return tuple(int(size) for size in arguments.input_shape.split(","))
        except ValueError as error:
            raise InputError(
                f"--input-shape {arguments.input_shape!r} is no shape of one sample; "
                f"such as 3,224,224."
            ) from error
    if arguments.model.startswith("torchvision:"):
        return _IMAGE_SHAPE
    raise InputError(
        "The model has to run once: give --input-shape of one sample, such as "
        "3,224,224, or --data."
    )


def inputs_of(arguments: argparse.Namespace) -> Inputs:
    """Return what --inputs says: a key, or a mapping from parameters to keys."""
    text: str | None = arguments.inputs
    if text is None:
        return None
    if "=" not in text:
        return _key(text)
    pairs = [pair.partition("=") for pair in text.split(",")]
    return {name: _key(key) for name, _, key in pairs}


def _key(text: str) -> str | int:
    return int(text) if text.isdecimal() else text


def layers_of(arguments: argparse.Namespace) -> Layers | CapturePlan:
    """Return the layers named, or the plan that was saved."""
    if (arguments.plan is None) == (arguments.layers is None):
        raise InputError("Say what to extract with either --layers or --plan.")
    if arguments.plan is None:
        layers: list[str] = arguments.layers
        return layers
    if arguments.dtype is not None:
        raise InputError("A saved plan has its dtype; leave --dtype out.")
    try:
        return CapturePlan.from_json(Path(arguments.plan).read_text())
    except OSError as error:
        raise PlanError(
            f"The plan {arguments.plan!r} cannot be read: {error}"
        ) from error


def metadata_of(arguments: argparse.Namespace) -> Any:
    """Return the CSV as a DataFrame, its id column being called otherwise."""
    if arguments.metadata is None:
        return None
    import pandas as pd

    try:
        return pd.read_csv(arguments.metadata)
    except (OSError, ValueError) as error:
        raise DataError(
            f"The metadata {arguments.metadata!r} cannot be read: {error}"
        ) from error

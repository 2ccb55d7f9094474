"""Models and datasets by name, as the command line takes them.

`FILE.py:name` and `pkg.mod:name` run the user's code; `torchvision:NAME`, `hf:DIR`, a
folder of images and `.npy` do not.
"""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from torchlens.errors import DataError, InputError, ModelError
from torchlens.near_misses import unknown_name

__all__ = ["load_dataset", "load_model", "load_object", "load_transform"]


def load_object(name: str) -> Any:
    """Return what `FILE.py:name` or `pkg.mod:name` names.

    Raises:
        InputError: If there is no such file, module or name.
    """
    place, colon, attribute = name.rpartition(":")
    if not colon or not place or not attribute:
        raise InputError(
            f"{name!r} names no object; wanted FILE.py:name or package.module:name. "
            f"A model of torchvision is written torchvision:NAME."
        )
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = [n for n in vars(module) if not n.startswith("_")]
            raise InputError(
                f"{place} has no {attribute!r}; it has {', '.join(names) or 'nothing'}."
            )
        found = getattr(found, part)
    return found


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InputError(f"There is no file {str(path)!r}.")
    # Its neighbours can be imported, as when it is run as a script.
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path.resolve()):
        return known
    # Under a name of its own where something else is called like the file.
    name = path.stem if known is None else f"{path.stem}_given_by_path"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise InputError(
            f"There is no module {name!r} on the path. For a file write its name with "
            f".py, such as ./model.py:build."
        ) from error


def load_model(name: str, weights: str | None) -> nn.Module:
    """Return the model called `name`.

    Args:
        name: `torchvision:NAME`, `hf:DIR`, or a model, class or function by name.
        weights: For torchvision, "none", the name of its weights, or a file of a state
            dict; for others a file; default what comes with the model. "none" draws
            the same weights each time.

    Raises:
        InputError: If the name is not understood.
        ModelError: If it gives no module.
    """
    kind, _, rest = name.partition(":")
    if kind == "torchvision":
        return _torchvision_model(rest, weights)
    if kind == "hf":
        model = _transformers_model(rest)
    else:
        found = load_object(name)
        model = found if isinstance(found, nn.Module) else found()
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"{name} gave a {type(model).__name__}; wanted a torch.nn.Module, or a "
            f"function without arguments that returns one."
        )
    return model if weights is None else _with_weights(model, weights)


def _torchvision_model(name: str, weights: str | None) -> nn.Module:
    from torchvision.models import get_model, get_model_weights, list_models

    if name not in list_models():
        meant = unknown_name(name, list_models(), "torchvision.models.list_models()")
        raise InputError(f"torchvision has no model {name!r}. {meant}")
    known = get_model_weights(name)
    wanted = weights or "DEFAULT"
    if wanted.lower() == "none":
        # The same numbers each time, or a store could never be continued.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model: nn.Module = get_model(name, weights=None)
    elif wanted in known.__members__:
        try:
            model = get_model(name, weights=known[wanted])
        except OSError as error:  # URLError is one
            raise ModelError(
                f"The weights {known[wanted]} cannot be downloaded: {error}. Give "
                f"--weights a file with a state dict, or none for a model that is not "
                f"trained."
            ) from error
    else:
        model = _with_weights(get_model(name, weights=None), wanted)
    return model


def _with_weights(model: nn.Module, file: str) -> nn.Module:
    if not Path(file).is_file():
        raise InputError(
            f'--weights {file!r} is no file with a state dict. Give one, or "none" for '
            f"a model that is not trained."
        )
    if file.endswith(".npz"):
        with np.load(file) as arrays:
            state: Any = {name: torch.from_numpy(arrays[name]) for name in arrays}
    elif file.endswith(".safetensors"):
        from safetensors.torch import load_file

        state = load_file(file)
    else:
        state = torch.load(file, map_location="cpu", weights_only=True)
    try:
        model.load_state_dict(state.get("state_dict", state))
    except RuntimeError as error:
        raise InputError(
            f"The weights in {file!r} do not fit {type(model).__name__}: {error}"
        ) from error
    return model


def _transformers_model(folder: str) -> Any:
    if not Path(folder).is_dir():
        raise InputError(
            f"hf:{folder} names no folder. Save the model there with save_pretrained."
        )
    from transformers import AutoModel

    return AutoModel.from_pretrained(folder, local_files_only=True)


def load_transform(name: str | None, model_name: str, weights: str | None) -> Any:
    """Return what turns an image into a tensor, or `None` when nothing says it.

    Args:
        name: A function or transform by name, `torchvision:ResNet18_Weights.DEFAULT`,
            or `None` for that of torchvision weights that come with the model.
        model_name: As given to `load_model`.
        weights: Likewise.
    """
    if name is not None and not name.startswith("torchvision:"):
        return load_object(name)
    kind, _, model = model_name.partition(":")
    if name is not None:
        entry = name.partition(":")[2]
        owner, _, member = entry.partition(".")
        found = load_object(f"torchvision.models:{owner}")
        if member not in getattr(found, "__members__", {}):
            raise InputError(
                f"--transform {name!r} names no torchvision weights; such as "
                f"torchvision:ResNet18_Weights.DEFAULT."
            )
        return found[member].transforms()
    if kind != "torchvision":
        return None
    from torchvision.models import get_model_weights

    known = get_model_weights(model)
    wanted = weights or "DEFAULT"
    return known[wanted].transforms() if wanted in known.__members__ else None


def load_dataset(name: str) -> Any:
    """Return the dataset called `name`, in a form that `extract_dataset` takes.

    Args:
        name: A folder of images, an `.npy` file whose first axis is the sample, or a
            dataset, or a function that returns one, by name.

    Raises:
        DataError: If the name is not understood.
    """
    path = Path(name)
    if path.is_dir():
        return path
    if name.endswith(".npy"):
        if not path.is_file():
            raise DataError(f"There is no file {name!r}.")
        return np.load(path, mmap_mode="r", allow_pickle=False)
    if ":" not in name:
        raise DataError(
            f"{name!r} is no folder of images, no .npy file and no FILE.py:name."
        )
    found = load_object(name)
    is_function = callable(found) and not hasattr(found, "__getitem__")
    return found() if is_function or isinstance(found, type) else found

"""From what the user passed to the plain module that will be captured."""

import sys
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from .errors import ModelError

_WRAPPED = "_orig_mod"  # what torch.compile calls the module inside its wrapper

__all__ = ["compiler_is_loaded", "original_module", "plain_name", "unwrap_model"]


def unwrap_model(model: Any) -> nn.Module:
    """Return the plain module inside DDP and `torch.compile` wrappers.

    Raises:
        ModelError: If `model` is no `nn.Module`, is TorchScript, is a `DataParallel`,
            or has parameters on the meta device.
    """
    if not isinstance(model, nn.Module):
        kind = "the class" if isinstance(model, type) else "an object of type"
        name = model.__name__ if isinstance(model, type) else type(model).__name__
        raise ModelError(
            f"A torch.nn.Module was wanted as the model, but {kind} {name!r} came. "
            "Pass the module itself, built and loaded."
        )
    while True:
        if isinstance(model, torch.jit.ScriptModule):
            raise ModelError(
                f"{type(model).__name__!r} is a TorchScript module, whose ops run "
                "outside Python and cannot be seen. Pass the eager module it was "
                "scripted or traced from."
            )
        if isinstance(model, nn.DataParallel):
            raise ModelError(
                "nn.DataParallel runs replicas in threads that share one set of hooks, "
                "so captures of different replicas would mix. Pass model.module, and "
                "use one process per device."
            )
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif model is not original_module(model):
            model = original_module(model)
        else:
            break
        assert isinstance(model, nn.Module)
    _refuse_lazy(model)
    _refuse_meta(model)
    return model


def _refuse_lazy(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ModelError(
                f"{name!r} of {type(model).__name__} has no shape yet: it belongs to "
                "a lazy module. Run one forward of the model first, which gives it one."
            )


def _refuse_meta(model: nn.Module) -> None:
    for kind, named in (
        ("parameter", model.named_parameters()),
        ("buffer", model.named_buffers()),
    ):
        for name, tensor in named:
            if tensor.is_meta and not _is_offloaded(model):
                raise ModelError(
                    f"The {kind} {name!r} of {type(model).__name__} lies on the meta "
                    "device and has no values. Load the weights first, for example "
                    "with model.to_empty(device=...) and load_state_dict."
                )


def _is_offloaded(model: nn.Module) -> bool:
    """Return whether accelerate brings the weights in during the forward."""
    return any(hasattr(module, "_hf_hook") for module in model.modules())


def original_module(module: nn.Module) -> nn.Module:
    """Return what a wrapper of `torch.compile` holds, and other modules as they are."""
    # Importing the wrapper's class takes a second.
    while type(module).__name__ == "OptimizedModule":
        inner = module._modules.get(_WRAPPED)
        if inner is None:
            break
        module = inner
    return module


def plain_name(name: str) -> str:
    """Return a dotted name as it is without the wrappers of `torch.compile`."""
    if _WRAPPED not in name:
        return name
    return ".".join(step for step in name.split(".") if step != _WRAPPED)


def compiler_is_loaded() -> bool:
    """Return whether a forward may run code that `torch.compile` has replaced.

    Compiled functions inside a forward leave no mark on the modules, but compiling
    anything loads the compiler.
    """
    return "torch._dynamo" in sys.modules

"""Who a model is: its class, its configuration and its weights, as digests.

Two models of equal identity compute the same values for the same inputs, as far as
that can be told without running them; the code of their forward is covered by the
digest of the traced ops that a plan adds.
"""

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .model_access import original_module, plain_name
from .structures import format_path, leaves

_PIECE_BYTES = 64 << 20
# Facts of a transformers config that say where it came from, not what it computes.
_IGNORED_CONFIG = frozenset({"_name_or_path", "name_or_path", "transformers_version"})

__all__ = ["ModelIdentity", "digest_text", "identify"]


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Class, configuration and weights of a model.

    Attributes:
        class_name: Qualified name of the root's class.
        config: Digest of every module's class and printed settings, and of the
            transformers configuration where there is one.
        weights: Digest of every parameter and buffer, non-persistent ones included.
    """

    class_name: str
    config: str
    weights: str


def identify(model: nn.Module) -> ModelIdentity:
    """Return the identity of `model`."""
    return ModelIdentity(class_name(model), config_digest(model), weights_digest(model))


def class_name(model: nn.Module) -> str:
    """Return the module and qualified name of the model's class."""
    return f"{type(model).__module__}.{type(model).__qualname__}"


def config_digest(model: nn.Module) -> str:
    """Return a digest of what modules the model has and how each is set."""
    lines = [
        # Sizes and settings such as strides and eps stand in extra_repr alone.
        f"{plain_name(name)}:{type(module).__qualname__}({module.extra_repr()})"
        f"{_scalars(module)}"
        for name, module in model.named_modules()
        if module is original_module(module)
    ]
    lines.append(json.dumps(_settings(model), sort_keys=True, default=_stable))
    return digest_text("\n".join(lines))


def weights_digest(model: nn.Module) -> str:
    """Return a digest of the names, shapes, dtypes and bytes of all model tensors."""
    tensors = sorted(_tensors(model).items())
    # hashlib lets go of the interpreter lock, so several tensors hash at once.
    with ThreadPoolExecutor(max_workers=4) as pool:
        digests = pool.map(_digest_tensor, (tensor for _, tensor in tensors))
        lines = [
            f"{name}:{list(tensor.shape)}:{tensor.dtype}:{digest}"
            for (name, tensor), digest in zip(tensors, digests, strict=True)
        ]
    return digest_text("\n".join(lines))


def digest_text(text: str) -> str:
    """Return the first 32 hexadecimal digits of the text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for names in (model.named_parameters, model.named_buffers):
        for name, tensor in names(remove_duplicate=False):
            found[plain_name(name)] = tensor
    # Quantised modules keep their weights in objects that only state_dict opens.
    for path, tensor in leaves(model.state_dict()):
        name = f"{plain_name(str(path[0]))}{format_path(path[1:])}"
        found.setdefault(name, tensor)
    return found


def _digest_tensor(tensor: Tensor) -> str:
    if tensor.is_meta:
        return "meta"
    values = tensor.detach()
    if values.is_quantized:
        values = values.dequantize()
    if values.layout is not torch.strided:
        values = values.to_dense()
    if values.numel() == 0:
        return "empty"
    digest = hashlib.sha256()
    # reshape(-1) first: a tensor without axes cannot be viewed as bytes.
    flat = values.cpu().contiguous().reshape(-1).view(torch.uint8)
    data: Any = flat.numpy()
    for start in range(0, len(data), _PIECE_BYTES):
        digest.update(data[start : start + _PIECE_BYTES])
    return digest.hexdigest()


def _scalars(module: nn.Module) -> list[tuple[str, float | str]]:
    """Return plain settings; not integers, which modules also use as counters."""
    return sorted(
        (name, value)
        for name, value in vars(module).items()
        if isinstance(value, float | str) and not name.startswith("_")
    )


def _settings(model: nn.Module) -> dict[str, Any]:
    config = getattr(model, "config", None)
    to_dict = getattr(config, "to_dict", None)
    if isinstance(config, Mapping):
        found = dict(config)
    elif callable(to_dict):
        found = dict(to_dict())
    else:
        return {}
    return {
        str(key): value for key, value in found.items() if key not in _IGNORED_CONFIG
    }


def _stable(value: object) -> str:
    """Return text for what JSON does not know, without memory addresses."""
    text = repr(value)
    return type(value).__qualname__ if " at 0x" in text else text

"""What a plan is made from, as one digest: an equal request leads to the same plan."""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch import nn

from torchlens.errors import SelectorError
from torchlens.identity import identify
from torchlens.lookup import Layers
from torchlens.model_inputs import ModelInputs
from torchlens.run_modes import ambient_autocast
from torchlens.selector_algebra import Selector

from .code_digest import digest_code

__all__ = ["digest_request"]


def digest_request(
    model: nn.Module,
    layers: Layers,
    dtype: str | Mapping[str, str] | None,
    allow: Collection[str],
    identity: Mapping[str, Any],
    inputs: ModelInputs,
) -> str | None:
    """Return a digest of all that a plan is made from, or `None` if it cannot be told.

    Args:
        model: The plain module.
        layers: What is asked for.
        dtype: As given to the plan.
        allow: Likewise.
        identity: What the run's values depend on beside the model.
        inputs: The example.
    """
    code, described = digest_code(model), _describe_layers(layers)
    if code is None or described is None:
        return None
    facts = {
        "model": asdict(identify(model)),
        "code": code,
        "layers": described,
        "dtype": dtype,
        "allow": sorted(allow),
        "identity": identity,
        "inputs": inputs.describe(),
        "autocast": [asdict(ambient_autocast(kind)) for kind in ("cpu", "cuda")],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _describe_layers(layers: Any) -> Any:
    """Return layers as plain data, or `None` for what has no such form."""
    if isinstance(layers, str):
        return layers
    if isinstance(layers, Mapping):
        values = {str(name): _describe_layers(layers[name]) for name in layers}
        return None if None in values.values() else {"mapping": list(values.items())}
    if isinstance(layers, Sequence):
        entries = [_describe_layers(layer) for layer in layers]
        return None if None in entries else entries
    if isinstance(layers, Selector):
        try:
            return {"selector": layers.to_json()}
        except SelectorError:
            # It holds a function of the caller's.
            return None
    return None

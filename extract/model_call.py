"""From a collated batch to the arguments of the model's forward.

The rule, decided once on the first batch and then applied to every one:

* `inputs=` given: a key or position picks the one argument, a tuple of them the
  positional ones, a mapping parameter -> key the keyword ones, a callable does it all;
* a tensor is the one positional argument;
* a dict whose array entries are all named like parameters of forward becomes keyword
  arguments; one with a single array entry gives that one; ids, metadata and entries
  that are no arrays are left out;
* a tuple is (input, labels...) only when forward takes exactly one argument.

Anything else is refused, because a guess could be wrong without anybody noticing.
"""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchlens.errors import InputError
from torchlens.model_inputs import ModelInputs, as_inputs

from .fingerprints import describe_callable

__all__ = ["InputRule", "Inputs", "Signature", "make_input_rule", "read_signature"]

Key = str | int
Inputs = Key | Sequence[Key] | Mapping[str, Key] | Callable[[Any], Any] | None


@dataclass(frozen=True, slots=True)
class Signature:
    """What forward can be given: named parameters, and positional ones in order."""

    names: frozenset[str]
    positional: tuple[str, ...]
    required: tuple[str, ...]
    takes_more: bool


def read_signature(model: nn.Module) -> Signature:
    """Read the parameters of the model's forward."""
    parameters = inspect.signature(model.forward).parameters.values()
    by_position = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    by_name = (
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    )
    positional = tuple(p.name for p in parameters if p.kind in by_position)
    return Signature(
        names=frozenset(p.name for p in parameters if p.kind in by_name),
        positional=positional,
        required=tuple(
            p.name
            for p in parameters
            if p.kind in by_position and p.default is inspect.Parameter.empty
        ),
        takes_more=any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters),
    )


@dataclass(frozen=True, slots=True)
class InputRule:
    """How one batch becomes arguments; see the module's docstring.

    With `function` unset, `positional` and `keywords` pick entries of the batch;
    a `None` key stands for the whole batch.
    """

    positional: tuple[Key | None, ...] = ()
    keywords: tuple[tuple[str, Key], ...] = ()
    function: Callable[[Any], Any] | None = None

    def apply(self, batch: Any, device: torch.device | None = None) -> ModelInputs:
        """Return the arguments for one batch, its tensors on `device`."""
        if self.function is not None:
            found = as_inputs(self.function(batch))
        else:
            found = ModelInputs(
                tuple(_pick(batch, key) for key in self.positional),
                {name: _pick(batch, key) for name, key in self.keywords},
            )
        return found if device is None else found.to(device)

    def identity(self) -> dict[str, Any]:
        """Return the rule as plain data, for comparing two runs."""
        if self.function is not None:
            return {"function": describe_callable(self.function)}
        return {"positional": list(self.positional), "keywords": dict(self.keywords)}


def _pick(batch: Any, key: Key | None) -> Any:
    if key is None:
        return batch
    try:
        return batch[key]
    except (KeyError, IndexError, TypeError) as error:
        raise InputError(
            f"inputs= asks for the entry {key!r} of a batch, but the batch is "
            f"{_describe(batch)}."
        ) from error


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray)


def _describe(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return f"a mapping with the entries {', '.join(map(repr, batch))}"
    if isinstance(batch, list | tuple):
        return f"a {type(batch).__name__} of {len(batch)} entries"
    return f"a {type(batch).__name__}"


def make_input_rule(
    batch: Any, signature: Signature, inputs: Inputs, dropped: Collection[str]
) -> InputRule:
    """Decide how batches like `batch` become arguments.

    Args:
        batch: A collated batch.
        signature: Of the model's forward.
        inputs: What the caller says, see the module's docstring.
        dropped: Keys of ids and metadata in dict items.

    Raises:
        InputError: If that cannot be told without guessing.
    """
    if inputs is not None:
        return _explicit_rule(inputs, signature)
    if _is_array(batch):
        return InputRule(positional=(None,))
    if isinstance(batch, Mapping):
        return _mapping_rule(batch, signature, dropped)
    if isinstance(batch, list | tuple):
        return _tuple_rule(batch, signature)
    raise InputError(
        f"A batch is {_describe(batch)}, which is no input of a model. Say what to "
        f"pass with inputs=, such as inputs=lambda batch: batch.images."
    )


def _explicit_rule(inputs: Inputs, signature: Signature) -> InputRule:
    if callable(inputs):
        return InputRule(function=inputs)
    if isinstance(inputs, Mapping):
        unknown = sorted(set(inputs) - signature.names)
        if unknown:
            raise InputError(
                f"inputs= names {', '.join(map(repr, unknown))}, which forward does "
                f"not take; its parameters: {_parameters(signature)}."
            )
        return InputRule(keywords=tuple(inputs.items()))
    if isinstance(inputs, str | int):
        return InputRule(positional=(inputs,))
    if isinstance(inputs, Sequence) and inputs:
        return InputRule(positional=tuple(inputs))
    raise InputError(
        f"inputs={inputs!r} is neither a key, a tuple of keys, a mapping from "
        f"parameters to keys, nor a callable on the batch."
    )


def _mapping_rule(
    batch: Mapping[str, Any], signature: Signature, dropped: Collection[str]
) -> InputRule:
    arrays = [key for key in batch if _is_array(batch[key]) and key not in dropped]
    known = [
        key
        for key in batch
        if key in signature.names and (key not in dropped or _is_array(batch[key]))
    ]
    strangers = [key for key in arrays if key not in known]
    if known and not strangers:
        return InputRule(keywords=tuple((key, key) for key in known))
    if len(arrays) == 1 and not known and _takes_one(signature):
        return InputRule(positional=(arrays[0],))
    raise InputError(
        f"The items have the arrays {', '.join(map(repr, arrays)) or '(none)'}, and "
        f"forward takes {_parameters(signature)}; which is which cannot be told. Say "
        f"it with inputs=, a mapping from parameters to entries, or a key for the one "
        f"input."
    )


def _takes_one(signature: Signature) -> bool:
    one_needed = len(signature.required) <= 1
    return one_needed and bool(signature.positional or signature.takes_more)


def _tuple_rule(batch: Sequence[Any], signature: Signature) -> InputRule:
    if len(batch) == 1 and _takes_one(signature):
        return InputRule(positional=(0,))
    only_one = len(signature.positional) == 1 == len(signature.required)
    if batch and only_one and not signature.takes_more:
        return InputRule(positional=(0,))
    raise InputError(
        f"The items are tuples of {len(batch)}, and forward takes "
        f"{_parameters(signature)}; whether the rest are labels or inputs cannot be "
        f"told. Say it with inputs=0 for the first alone, or inputs=(0, 1) for both."
    )


def _parameters(signature: Signature) -> str:
    listed = [*signature.positional]
    listed += sorted(signature.names - set(listed))
    if signature.takes_more:
        listed.append("*args")
    return f"({', '.join(listed)})"

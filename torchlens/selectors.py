"""The vocabulary of selectors: functions whose values combine with `&`, `|`, `-`, `~`.

    func("relu") & in_module("layer1") - label("relu_2_7")

`selector_algebra` says how they combine and resolve.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from . import module_selectors, op_selectors
from .addresses import as_path
from .errors import SelectorError
from .op_views import Op
from .picks import Operator
from .records import Path
from .selector_algebra import SIGNS, Combination, Selector

__all__ = [
    "Selector",
    "contains",
    "everything",
    "followed_by",
    "from_json",
    "func",
    "in_module",
    "label",
    "label_contains",
    "module",
    "module_input",
    "module_type",
    "output",
    "preceded_by",
    "regex",
    "where",
]


def func(name: str, output: int | None = None) -> Selector:
    """Select ops by function.

    Args:
        name: "max_pool2d" and "maxpool2d" are the same; "relu" takes `relu_` too, while
            "relu_" takes only the call in place.
        output: Which of several outputs of the call, from 0; all of them by default.
    """
    return op_selectors.Func(_text("func", name), _index("func", output))


def module(address: str) -> Selector:
    """Select the output of a module's calls.

    Args:
        address: "layer1.0.relu" for every call, "layer1.0.relu:2" for the second;
            'encoder["hidden"]' or "lstm[1]" for part of a structured output.
    """
    return module_selectors.Module(_text("module", address))


def module_input(address: str, path: str | int | Path | None = None) -> Selector:
    """Select what a module's calls receive.

    Args:
        address: The module, with ":k" for one call.
        path: The position or the keyword of the argument, then the place inside it:
            `0`, "hidden_states", `(0, "mask")`, '[0]["mask"]'; every tensor by default.
    """
    return module_selectors.ModuleInput(_text("module_input", address), as_path(path))


def in_module(address: str) -> Selector:
    """Select the ops that ran during a module's calls, at any depth.

    Args:
        address: The module, with ":k" for one call. A `ModuleList` stands for the
            modules it holds.
    """
    return module_selectors.InModule(_text("in_module", address))


def module_type(cls: type[nn.Module] | str) -> Selector:
    """Select the outputs of all modules of a class and its subclasses.

    Args:
        cls: The class, or its name.
    """
    if isinstance(cls, type) and issubclass(cls, nn.Module):
        return module_selectors.ModuleType(f"{cls.__module__}.{cls.__qualname__}")
    if isinstance(cls, str) and cls:
        return module_selectors.ModuleType(cls)
    raise SelectorError(
        "module_type needs a class of modules, such as nn.Conv2d, or its name; not "
        f"{type(cls).__name__} {cls!r}."
    )


def label(text: str) -> Selector:
    """Select ops by label: "conv2d_3_7", "conv2d_3", "linear_1_1:2", "input_1"."""
    return op_selectors.Label(_text("label", text))


def label_contains(text: str) -> Selector:
    """Select ops whose label contains `text`; capitals do not count."""
    return op_selectors.LabelContains(_text("label_contains", text))


contains = label_contains


def regex(pattern: str) -> Selector:
    """Select ops in whose label `pattern` is found, as by `re.search`."""
    return op_selectors.Regex(_text("regex", pattern))


def where(test: Callable[[Op], Any]) -> Selector:
    """Select the ops for which `test` answers true; such a selector cannot be stored.

    Args:
        test: Gets an `Op`, which has a label, shape, module and so on, but no payload.
    """
    if not callable(test):
        raise SelectorError(
            f"where needs a function of one op, not {type(test).__name__} {test!r}."
        )
    return op_selectors.Where(test)


def followed_by(selector: Selector) -> Selector:
    """Select the ops that an op picked by `selector` reads directly."""
    return op_selectors.FollowedBy(_selector("followed_by", selector))


def preceded_by(selector: Selector) -> Selector:
    """Select the ops that directly read an op picked by `selector`."""
    return op_selectors.PrecededBy(_selector("preceded_by", selector))


def output(index: int) -> Selector:
    """Select the ops that are number `index`, from 0, of a call's several outputs."""
    if index is None:
        raise SelectorError("output needs the number of the output, from 0.")
    number = _index("output", index)
    assert number is not None
    return op_selectors.Output(number)


def everything() -> Selector:
    """Select every op; inputs, outputs and buffers of the model are none."""
    return op_selectors.Everything()


def from_json(text: str) -> Selector:
    """Return the selector that `Selector.to_json` wrote.

    Raises:
        SelectorError: If the text is not such a selector.
    """
    try:
        value = json.loads(text)
    except (TypeError, ValueError) as error:
        raise SelectorError(f"A stored selector is not JSON: {error}.") from error
    return _from_dict(value)


_BUILDERS: dict[str, Callable[..., Selector]] = {
    "everything": everything,
    "followed_by": lambda selector: followed_by(_from_dict(selector)),
    "func": func,
    "in_module": in_module,
    "label": lambda text: label(text),
    "label_contains": lambda text: label_contains(text),
    "module": module,
    "module_input": lambda address, path=(): module_input(address, tuple(path)),
    "module_type": lambda type_name: module_type(type_name),
    "output": output,
    "preceded_by": lambda selector: preceded_by(_from_dict(selector)),
    "regex": regex,
}


def _from_dict(value: object) -> Selector:
    if not isinstance(value, Mapping) or not isinstance(value.get("select"), str):
        raise SelectorError(
            f'A stored selector is an object with "select", not {value!r}.'
        )
    kind = value["select"]
    given = {name: item for name, item in value.items() if name != "select"}
    if kind in SIGNS:
        return _combination(kind, given)
    builder = _BUILDERS.get(kind)
    if builder is None:
        raise SelectorError(
            f"There is no selector {kind!r}. This version knows: "
            f"{', '.join(sorted([*_BUILDERS, *SIGNS]))}."
        )
    try:
        return builder(**given)
    except TypeError as error:
        raise SelectorError(
            f"The stored selector {value!r} has other arguments than {kind} takes: "
            f"{error}."
        ) from error


def _combination(kind: Operator, given: Mapping[str, object]) -> Selector:
    parts = given.get("parts")
    single = kind == "not"
    if not isinstance(parts, list) or (len(parts) != 1 if single else len(parts) < 2):
        raise SelectorError(
            f"A stored {kind!r} needs a list of {'one part' if single else 'parts'}, "
            f"not {parts!r}."
        )
    return Combination(kind, tuple(map(_from_dict, parts)))


def _text(name: str, value: object) -> str:
    if isinstance(value, str) and value:
        return value
    raise SelectorError(
        f"{name} needs a text that is not empty, not {type(value).__name__} {value!r}."
    )


def _index(name: str, value: object) -> int | None:
    if value is None or (
        isinstance(value, int) and not isinstance(value, bool) and value >= 0
    ):
        return value
    raise SelectorError(
        f"{name} counts outputs with whole numbers from 0, not {value!r}."
    )


def _selector(name: str, value: object) -> Selector:
    if isinstance(value, Selector):
        return value
    raise SelectorError(
        f"{name} needs a selector, such as func('relu'), not "
        f"{type(value).__name__} {value!r}."
    )

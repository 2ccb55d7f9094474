"""Tensors inside nested values: where each is, and how that place is written.

Knows tuples, lists, named tuples, mappings and dataclasses.  A path is a tuple whose
ints index sequences, whose plain strings are mapping keys and whose strings with a
leading dot are attributes: `[0]`, `["hidden"]`, `.key`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .labels import format_path, parse_path
from .records import Path

_MAX_DEPTH = 12
_WITHOUT_TENSORS = frozenset({bool, bytes, float, int, str, type(None)})

__all__ = [
    "argument_leaves",
    "format_path",
    "get_at",
    "leaves",
    "map_tensors",
    "parse_path",
]


def leaves(value: Any) -> list[tuple[Path, torch.Tensor]]:
    """Return every tensor inside `value` with its path, in a fixed order."""
    found: list[tuple[Path, torch.Tensor]] = []
    _collect(value, (), found)
    return found


def argument_leaves(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[tuple[Path, torch.Tensor]]:
    """Return the tensors of a call; paths start with the position or the keyword."""
    found: list[tuple[Path, torch.Tensor]] = []
    for position, value in enumerate(args):
        _collect(value, (position,), found)
    for name, value in kwargs.items():
        _collect(value, (name,), found)
    return found


def _collect(value: Any, path: Path, found: list[tuple[Path, torch.Tensor]]) -> None:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        found.append((path, value))
    elif kind in _WITHOUT_TENSORS or len(path) >= _MAX_DEPTH:
        return
    elif kind is tuple or kind is list:
        for index, item in enumerate(value):
            _collect(item, (*path, index), found)
    elif kind is dict or isinstance(value, Mapping):
        for key, item in value.items():
            if isinstance(key, str | int):
                _collect(item, (*path, key), found)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for name in value._fields:
            _collect(getattr(value, name), (*path, f".{name}"), found)
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            _collect(item, (*path, index), found)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _collect(getattr(value, field.name), (*path, f".{field.name}"), found)


def get_at(value: Any, path: Path) -> Any:
    """Return what lies at `path` inside `value`.

    Raises:
        LookupError: If the structure has nothing there.
    """
    for part in path:
        if isinstance(part, str) and part.startswith("."):
            try:
                value = getattr(value, part[1:])
            except AttributeError as error:
                raise LookupError(str(error)) from error
        else:
            value = value[part]
    return value


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return a copy of the nested `value` with every tensor replaced by `change` of it.

    Containers that hold no tensor are returned as they are.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(map_tensors(item, change) for item in value)
    if isinstance(value, Mapping):
        changed = {key: map_tensors(item, change) for key, item in value.items()}
        if type(value) is dict:
            return changed
        copied = _shallow_copy(value)
        for key, item in changed.items():
            copied[key] = item
        return copied
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {
            field.name: map_tensors(getattr(value, field.name), change)
            for field in dataclasses.fields(value)
            if field.init
        }
        return dataclasses.replace(value, **changes)
    return value


def _shallow_copy(value: Any) -> Any:
    copy = getattr(value, "copy", None)
    return copy() if callable(copy) else dict(value)

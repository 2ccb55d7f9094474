"""What an architecture of the registry is: a name and how to build one example."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

__all__ = ["Architecture", "Example"]


@dataclass(frozen=True, slots=True)
class Example:
    """A model with the arguments of one call."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Architecture:
    """How to build one model of a family with an input that fits it.

    Attributes:
        name: Unique, such as "torchvision/resnet18".
        build: Makes the model, in the mode in which it is to run, and its input.
        slow: Whether a trace with validation takes more than about two seconds.
        gap: Part of the sentence that the trace gives as the reason why it is not
            complete; "" where it has to be complete.
    """

    name: str
    build: Callable[[], Example]
    slow: bool = False
    gap: str = ""

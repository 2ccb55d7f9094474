"""Architectures with random weights and small inputs, for tests and the sweep.

Nothing is downloaded: torchvision and timm build without weights, transformers from
small configurations.  Sizes are chosen so that one forward takes milliseconds.
"""

from .cases import Architecture, Example
from .plain import plain_architectures
from .text import text_architectures
from .vision import vision_architectures

__all__ = ["Architecture", "Example", "architectures"]


def architectures() -> tuple[Architecture, ...]:
    """Return all architectures, of every family, in a fixed order."""
    return (*vision_architectures(), *text_architectures(), *plain_architectures())

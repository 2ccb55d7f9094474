"""Where in the user's code an op was called."""

import linecache
from dataclasses import dataclass
from typing import final

from .records import Frame

__all__ = ["Source"]


@final
@dataclass(frozen=True, slots=True)
class Source:
    """The lines of source code that led to an op, outermost first."""

    frames: tuple[Frame, ...]

    @property
    def text(self) -> str:
        """Return the innermost line as it is written; empty where it is not on disk."""
        if not self.frames:
            return ""
        last = self.frames[-1]
        return linecache.getline(last.file, last.line).strip()

    def __str__(self) -> str:
        """Return file, line and function of the innermost line."""
        if not self.frames:
            return "no line of Python"
        last = self.frames[-1]
        return f"{last.file}:{last.line} in {last.function}"

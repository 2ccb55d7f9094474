"""Plain text tables with aligned columns."""

from collections.abc import Sequence

__all__ = ["format_table"]


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with a rule under its header and columns aligned left."""
    widths = [
        max(len(line[column]) for line in (header, *rows))
        for column in range(len(header))
    ]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in (header, ["-" * width for width in widths], *rows)
    ]
    return "\n".join(line.rstrip() for line in lines)

"""Numbers as people read them: counts, bytes, durations, shapes."""

from collections.abc import Sequence

__all__ = ["counted", "shaped", "sized", "timed"]

_COUNT_UNITS = ("", "K", "M", "G", "T", "P")
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def counted(number: int | None) -> str:
    """Return a count in three or four digits with a unit; "?" for `None`.

    Example:
        >>> counted(714188480), counted(69), counted(None)
        ('714.2 M', '69', '?')
    """
    return "?" if number is None else _scaled(number, 1000, _COUNT_UNITS)


def sized(num_bytes: int) -> str:
    """Return bytes with a binary unit.

    Example:
        >>> sized(3 * 2**20), sized(12)
        ('3.0 MiB', '12 B')
    """
    return _scaled(num_bytes, 1024, _BYTE_UNITS)


def timed(seconds: float) -> str:
    """Return a duration with a unit.

    Example:
        >>> timed(0.0123), timed(4.5e-6)
        ('12.3 ms', '4.5 us')
    """
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.1f} {unit}"
    return f"{seconds * 1e6:.1f} us"


def shaped(shape: Sequence[int]) -> str:
    """Return a shape as text, such as "[2, 3, 224, 224]"."""
    return f"[{', '.join(map(str, shape))}]"


def _scaled(number: int, step: int, units: Sequence[str]) -> str:
    if abs(number) < step:
        return f"{number} {units[0]}".rstrip()
    value, index = number / step, 1
    while abs(value) >= step - 0.05 and index < len(units) - 1:  # 999.96 reads 1000.0
        value, index = value / step, index + 1
    return f"{value:.1f} {units[index]}"

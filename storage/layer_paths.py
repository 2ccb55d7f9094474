"""Layer names to path components and back, safe on every file system.

Lower- and upper-case letters, digits, `-`, `_` and `.` stay; every other byte of the
UTF-8 name becomes `~` and two hexadecimal digits.  Names a file system, a shell or
zarr would misread have their first or last character escaped.  `layer_name` undoes all
of it.
"""

import re
from collections.abc import Iterable, Mapping

from torchlens.errors import DataError

from .checksums import sha256_hex

# Most file systems end a component at 255 bytes; the rest is for chunk suffixes.
_MAX_PATH = 200
_KEPT_OF_LONG = 120
_UNSAFE = re.compile(rb"[^A-Za-z0-9._-]")
_UPPER = re.compile(rb"[A-Z]")
# Not a hexadecimal digit of an escape before it.
_LETTER = re.compile(rb"(?<!~)(?<!~[0-9a-f])[a-z]")
_ESCAPE = re.compile(rb"~([0-9a-f]{2})")
_DEVICES = {"con", "prn", "aux", "nul"} | {
    f"{port}{digit}" for port in ("com", "lpt") for digit in range(1, 10)
}


def layer_path(name: str, *, escape_case: bool = False) -> str:
    """Return the path component that stands for a layer name.

    Args:
        name: Any non-empty text.
        escape_case: Escape upper-case letters too, or the first letter if there is
            none: for a name that differs from another one in case only.

    Raises:
        DataError: If the name is empty or no valid Unicode.
    """
    try:
        raw = name.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"The layer name {name!r} is no valid Unicode.") from error
    if not raw:
        raise DataError("A layer name is empty; give every layer a name.")
    text = _UNSAFE.sub(_escaped, raw)
    if escape_case:
        plain = text
        text = _UPPER.sub(_escaped, plain)
        if text == plain:
            text = _LETTER.sub(_escaped, plain, count=1)
    path = _escape_ends(text.decode("ascii"))
    if len(path) <= _MAX_PATH:
        return path
    return f"{path[:_KEPT_OF_LONG].rstrip('~')}~~{sha256_hex(raw)[:32]}"


def layer_name(path: str) -> str:
    """Return the layer name behind a path component.

    Raises:
        DataError: If the path was shortened; the array's attributes hold its name.
    """
    if "~~" in path:
        raise DataError(
            f"The path {path!r} stands for a name too long for a path. Its array's "
            "attributes and run.json hold the name."
        )
    raw = _ESCAPE.sub(lambda match: bytes([int(match[1], 16)]), path.encode("ascii"))
    return raw.decode("utf-8")


def assign_paths(names: Iterable[str], taken: Iterable[str] = ()) -> Mapping[str, str]:
    """Return a path for each name, distinct even where case does not count.

    Args:
        names: The layer names, distinct.
        taken: Paths that other layers of the same store have already.
    """
    used = {path.casefold() for path in taken}
    paths: dict[str, str] = {}
    for name in sorted(names):
        path = layer_path(name)
        if path.casefold() in used:
            path = layer_path(name, escape_case=True)
        if path.casefold() in used:
            raise DataError(
                f"The layer name {name!r} gives the path {path!r}, which another layer "
                "of the store has. Name the layer otherwise."
            )
        used.add(path.casefold())
        paths[name] = path
    return paths


def _escaped(match: re.Match[bytes]) -> bytes:
    return b"~%02x" % match[0][0]


def _escape_ends(text: str) -> str:
    stem = text.split(".", 1)[0].casefold()
    # "." and "__" lead hidden and reserved names, "zarr.json" is the group's own.
    if (
        text[0] in ".-"
        or text.startswith("__")
        or text.casefold() == "zarr.json"
        or stem in _DEVICES
    ):
        text = f"~{ord(text[0]):02x}{text[1:]}"
    if text[-1] == ".":
        text = f"{text[:-1]}~2e"
    return text

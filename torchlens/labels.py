"""The grammar of names: labels of ops, addresses of modules, paths into outputs.

Pure text: nothing here knows a graph.  Whether a name exists is for `lookup` to say.
"""

import json
import re
from dataclasses import dataclass

from .errors import SelectorError

__all__ = [
    "BOUNDARY_TYPES",
    "AddressRef",
    "LabelRef",
    "Path",
    "format_path",
    "match_label",
    "match_suffix",
    "normalise_type",
    "parse_address",
    "parse_label",
    "parse_path",
]

Path = tuple[str | int, ...]
BOUNDARY_TYPES = ("input", "output", "buffer")

_NUMBER = r"[1-9][0-9]*"
_TYPE = re.compile(r"[^\W\d_][^\W_]*")
_LABEL = re.compile(
    rf"(?P<type>{_TYPE.pattern})_(?P<k>{_NUMBER})(?:_(?P<n>{_NUMBER}))?"
    rf"(?::(?P<p>{_NUMBER}))?"
)
_CALL = re.compile(rf":({_NUMBER})")
_FIELD = re.compile(r"\.[^\W\d]\w*")
_STEP = re.compile(
    r"""\[(?P<index>-?[0-9]+)\]
    | \["(?P<double>(?:[^"\\]|\\.)*)"\]
    | \['(?P<single>(?:[^'\\]|\\.)*)'\]
    | (?P<field>\.[^\W\d]\w*)""",
    re.VERBOSE | re.DOTALL,
)
_LABEL_FORMS = (
    "A label reads type_k_n (relu_1_2), type_k (relu_1), either with :pass "
    "(relu_1:2), or input_k, output_k, buffer_k; numbers count from 1."
)
_ADDRESS_FORMS = (
    'An address reads features.6, features.6:1 (call 1), addr[0], addr["hidden"], '
    'addr[0].key; the root module is "self".'
)


@dataclass(frozen=True, slots=True)
class LabelRef:
    """A label in parts; what was not said is `None`.

    Attributes:
        type: Normalised function name, or "input", "output", "buffer".
        type_index: k: the k-th layer of this type, from 1.
        step: n: the n-th layer overall, from 1.
        pass_index: p: which execution of the layer, from 1.
    """

    type: str
    type_index: int
    step: int | None = None
    pass_index: int | None = None

    def __post_init__(self) -> None:
        """Refuse parts that would not read back as the same label."""
        numbers = (self.type_index, self.step, self.pass_index)
        if (
            _TYPE.fullmatch(self.type) is None
            or any(number is not None and number < 1 for number in numbers)
            or (self.is_boundary and (self.step or self.pass_index))
        ):
            raise SelectorError(f"{str(self)!r} is not a label. {_LABEL_FORMS}")

    def __str__(self) -> str:
        """Return the label as text."""
        step = "" if self.step is None else f"_{self.step}"
        suffix = "" if self.pass_index is None else f":{self.pass_index}"
        return f"{self.type}_{self.type_index}{step}{suffix}"

    @property
    def is_boundary(self) -> bool:
        """Return whether this names an input, an output or a buffer."""
        return self.type in BOUNDARY_TYPES


@dataclass(frozen=True, slots=True)
class AddressRef:
    """A module address with the call and the place in its output, where said."""

    address: str
    call_index: int | None = None
    path: Path = ()

    def __str__(self) -> str:
        """Return the address as text."""
        call = "" if self.call_index is None else f":{self.call_index}"
        return f"{self.address}{call}{format_path(self.path)}"


def normalise_type(func_name: str) -> str:
    """Return the type a function's name gives to labels.

    Example:
        >>> normalise_type("max_pool2d"), normalise_type("relu_")
        ('maxpool2d', 'relu')
    """
    return func_name.replace("_", "").lower()


def match_label(text: str) -> LabelRef | None:
    """Return `text` read as a label, or `None` when it is not written like one."""
    found = _LABEL.fullmatch(text)
    if found is None:
        return None
    step, pass_index = found["n"], found["p"]
    if found["type"] in BOUNDARY_TYPES and (step or pass_index):
        return None
    return LabelRef(
        type=found["type"],
        type_index=int(found["k"]),
        step=int(step) if step else None,
        pass_index=int(pass_index) if pass_index else None,
    )


def parse_label(text: str) -> LabelRef:
    """Return `text` read as a label.

    Raises:
        SelectorError: If it is not written like one.

    Example:
        >>> parse_label("linear_1_3:2")
        LabelRef(type='linear', type_index=1, step=3, pass_index=2)
    """
    ref = match_label(text)
    if ref is None:
        raise SelectorError(f"{text!r} is not a label. {_LABEL_FORMS}")
    return ref


def format_path(path: Path) -> str:
    """Return a path into a structured value as text.

    Example:
        >>> format_path((0, "hidden", ".key"))
        '[0]["hidden"].key'
    """
    return "".join(map(_format_step, path))


def parse_path(text: str) -> Path:
    """Return the path written as `text`; the reverse of `format_path`.

    Raises:
        SelectorError: If the text is not a path.
    """
    steps: list[str | int] = []
    position = 0
    while position < len(text):
        found = _STEP.match(text, position)
        if found is None:
            raise SelectorError(
                f"{text!r} is not a path into an output. Write it like "
                f'[0], ["hidden"] or .field, as often as needed.'
            )
        steps.append(_step_value(found))
        position = found.end()
    return tuple(steps)


def match_suffix(text: str) -> tuple[int | None, Path] | None:
    """Return the call and path that `text`, the end of an address, spells."""
    call = _CALL.match(text)
    rest = text[call.end() :] if call else text
    try:
        path = parse_path(rest)
    except SelectorError:
        return None
    return (int(call[1]) if call else None), path


def parse_address(text: str) -> AddressRef:
    """Return `text` read as a module address, call and path.

    A dotted word directly after the address belongs to the address: only a graph can
    tell a submodule from a field of the output, so `lookup` tries both.

    Raises:
        SelectorError: If it is not written like an address.

    Example:
        >>> parse_address('encoder.0:2["hidden"]')
        AddressRef(address='encoder.0', call_index=2, path=('hidden',))
    """
    head = re.match(r"[^:\[\].]+(?:\.[^:\[\].]+)*", text)
    suffix = match_suffix(text[head.end() :]) if head else None
    if head is None or suffix is None:
        raise SelectorError(f"{text!r} is not a module address. {_ADDRESS_FORMS}")
    return AddressRef(head[0], *suffix)


def _format_step(step: str | int) -> str:
    if isinstance(step, int):
        return f"[{step}]"
    if _FIELD.fullmatch(step):
        return step
    return f"[{json.dumps(step, ensure_ascii=False)}]"


def _step_value(found: re.Match[str]) -> str | int:
    if found["index"] is not None:
        return int(found["index"])
    if found["field"] is not None:
        return found["field"]
    body = found["double"]
    if body is None:
        body = found["single"].replace("\\'", "'").replace('"', '\\"')
    try:
        return str(json.loads(f'"{body}"', strict=False))
    except json.JSONDecodeError as error:
        raise SelectorError(f"The key {body!r} has a bad escape: {error}.") from error

"""What a torch function is to a capture: its name, whether it writes, and so on.

Facts depend on the function object alone, and are cached.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["FunctionFacts", "facts_of", "type_name"]

# Calls that return or change no values worth an op of their own.
_NOT_OPS = frozenset(
    {
        "__contains__",
        "__cuda_array_interface__",
        "__deepcopy__",
        "__format__",
        "__hash__",
        "__len__",
        "__repr__",
        "__reduce_ex__",
        "__set__",
        "__setstate__",
        "_base",
        "_backward_hooks",
        "_is_view",
        "_version",
        "backward",
        "cdata",
        "data_ptr",
        "device",
        "dim",
        "dtype",
        "element_size",
        "get_device",
        "grad",
        "grad_fn",
        "is_complex",
        "is_contiguous",
        "is_floating_point",
        "is_inference",
        "is_leaf",
        "is_pinned",
        "is_same_size",
        "is_shared",
        "is_tensor",
        "item",
        "layout",
        "name",
        "names",
        "ndim",
        "ndimension",
        "nelement",
        "numel",
        "output_nr",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "requires_grad",
        "requires_grad_",
        "retain_grad",
        "retains_grad",
        "shape",
        "share_memory_",
        "size",
        "storage",
        "storage_offset",
        "stride",
        "tolist",
        "untyped_storage",
    }
)
_RANDOM = frozenset(
    "alpha_dropout bernoulli binomial cauchy dropout dropout1d dropout2d dropout3d "
    "exponential feature_alpha_dropout feature_dropout fractional_max_pool2d "
    "fractional_max_pool3d geometric gru kaiming_normal kaiming_uniform log_normal "
    "lstm multinomial native_dropout normal poisson rand rand_like randint "
    "randint_like randn randn_like random randperm rnn_relu rnn_tanh rrelu "
    "rrelu_with_noise scaled_dot_product_attention uniform".split()
)
_DUNDER_WRITES = frozenset({"__setitem__", "__delitem__"})


@dataclass(frozen=True, slots=True)
class FunctionFacts:
    """Name, label type, and how the function treats its arguments.

    Attributes:
        name: As called, without the underscores of a special method.
        type: For labels: lower case, no underscores.
        is_op: Whether a call that returns tensors becomes an op.
        writes: Position and name of each argument that it writes into; a nameless one
            may come under any keyword.
        random: Whether it may draw from torch's random generator.
    """

    name: str
    type: str
    is_op: bool
    writes: tuple[tuple[int, str], ...]
    random: bool = False


def type_name(name: str) -> str:
    """Return the label type of a function name, such as "maxpool2d"."""
    return name.replace("_", "").lower()


@functools.lru_cache(maxsize=4096)
def facts_of(func: Callable[..., Any]) -> FunctionFacts:
    """Return the facts about one function as a function mode receives it."""
    name: str = getattr(func, "__name__", type(func).__name__)
    if name in ("__get__", "__set__", "__delete__"):
        return _attribute_facts(func, name)
    schema = _schema_of(func)
    if schema is not None:
        name = schema.name.rpartition("::")[2]
    is_op = name not in _NOT_OPS
    special = name.startswith("__") and name.endswith("__")
    plain = name.strip("_") if special else name
    if schema is not None and schema.is_mutable:
        writes = tuple(
            (position, argument.name)
            for position, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
    else:
        writes = ((0, ""),) if is_op and _writes_first(name, special) else ()
    random = plain.rstrip("_") in _RANDOM
    return FunctionFacts(plain, type_name(plain), is_op, writes, random)


def _attribute_facts(func: Callable[..., Any], access: str) -> FunctionFacts:
    """Return the facts about reading or assigning an attribute of a tensor."""
    owner = getattr(func, "__self__", None)
    attribute = str(getattr(owner, "__name__", access))
    if access == "__get__":
        is_op = attribute not in _NOT_OPS
        return FunctionFacts(attribute, type_name(attribute), is_op, ())
    name = f"set_{attribute}"
    is_op = access == "__set__" and attribute in _VALUE_ATTRIBUTES
    writes = ((0, ""),) if is_op else ()
    return FunctionFacts(name, type_name(name), is_op, writes)


def _schema_of(func: Callable[..., Any]) -> Any:
    """Return the schema of a function from `torch.ops`, `None` for any other."""
    if type(func).__module__ != "torch._ops":
        return None
    return getattr(getattr(func, "default", func), "_schema", None)


def _writes_first(name: str, special: bool) -> bool:
    if special:
        in_place = name.startswith("__i") and name[3:-2] in _IN_PLACE_OPERATORS
        return in_place or name in _DUNDER_WRITES
    return name.endswith("_") and not name.startswith("__")


_VALUE_ATTRIBUTES = frozenset({"data", "imag", "real"})
_IN_PLACE_OPERATORS = frozenset(
    "add and div floordiv lshift matmul mod mul or pow rshift sub truediv xor".split()
)

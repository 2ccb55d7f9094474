"""What a torch function is to a capture: its name, whether it writes, and so on.

Facts depend on the function object alone and are cached by the caller.
"""

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
    "alpha_dropout bernoulli cauchy dropout dropout1d dropout2d dropout3d exponential "
    "feature_alpha_dropout feature_dropout fractional_max_pool2d geometric gru "
    "log_normal lstm multinomial normal poisson rand rand_like randint randint_like "
    "randn randn_like random randperm rnn_relu rnn_tanh rrelu rrelu_with_noise "
    "scaled_dot_product_attention uniform".split()
)
_DUNDER_WRITES = frozenset({"__setitem__", "__delitem__"})


@dataclass(frozen=True, slots=True)
class FunctionFacts:
    """Name, label type, and how the function treats its arguments.

    Attributes:
        name: As called, without the underscores of a special method.
        type: For labels: lower case, no underscores.
        is_op: Whether a call that returns tensors becomes an op.
        writes: Whether it writes into its first argument.
        random: Whether it may draw from torch's random generator.
    """

    name: str
    type: str
    is_op: bool
    writes: bool
    random: bool = False


def type_name(name: str) -> str:
    """Return the label type of a function name, such as "maxpool2d"."""
    return name.replace("_", "").lower()


def facts_of(func: Callable[..., Any]) -> FunctionFacts:
    """Return the facts about one function as a function mode receives it."""
    name: str = getattr(func, "__name__", type(func).__name__)
    if name in ("__get__", "__set__", "__delete__"):
        owner = getattr(func, "__self__", None)
        attribute = str(getattr(owner, "__name__", name))
        is_op = name == "__get__" and attribute not in _NOT_OPS
        return FunctionFacts(attribute, type_name(attribute), is_op, False)
    is_op = name not in _NOT_OPS
    special = name.startswith("__") and name.endswith("__")
    writes = name in _DUNDER_WRITES or (
        name.startswith("__i") and special and name[3:-2] in _IN_PLACE_OPERATORS
    )
    if not special and name.endswith("_") and not name.startswith("__"):
        writes = True
    plain = name.strip("_") if special else name
    random = plain.rstrip("_") in _RANDOM
    return FunctionFacts(plain, type_name(plain), is_op, writes and is_op, random)


_IN_PLACE_OPERATORS = frozenset(
    "add and div floordiv lshift matmul mod mul or pow rshift sub truediv xor".split()
)

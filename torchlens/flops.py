"""Floating-point operations of common ops, by formula from shapes.

A fused multiply-add counts as 2.  Formulas follow the definition of each op (number of
output elements times the work for one), as the common counters do; unlisted ops have no
count rather than a wrong one.
"""

from collections.abc import Callable, Sequence
from math import prod

Shape = tuple[int, ...]
_Formula = Callable[[Sequence[Shape], Shape], int]

__all__ = ["flops_of"]


def _linear(inputs: Sequence[Shape], output: Shape) -> int:
    total = 2 * prod(output) * inputs[1][-1]
    return total + (prod(output) if len(inputs) > 2 else 0)


def _convolution(inputs: Sequence[Shape], output: Shape) -> int:
    total = 2 * prod(output) * prod(inputs[1][1:])
    return total + (prod(output) if len(inputs) > 2 else 0)


def _transposed_convolution(inputs: Sequence[Shape], output: Shape) -> int:
    total = 2 * prod(inputs[0]) * prod(inputs[1][1:])
    return total + (prod(output) if len(inputs) > 2 else 0)


def _matmul(inputs: Sequence[Shape], output: Shape) -> int:
    return 2 * prod(output) * inputs[0][-1]


def _addmm(inputs: Sequence[Shape], output: Shape) -> int:
    return 2 * prod(output) * inputs[1][-1] + prod(output)


def _attention(inputs: Sequence[Shape], output: Shape) -> int:
    query, key, value = inputs[:3]
    scores = prod(query[:-1]) * key[-2]
    return 2 * scores * query[-1] + 5 * scores + 2 * scores * value[-1]


def _per_element(cost: int) -> _Formula:
    return lambda inputs, output: cost * prod(output)


def _per_input(cost: int) -> _Formula:
    return lambda inputs, output: cost * prod(inputs[0]) if inputs else 0


_FORMULAS: dict[str, _Formula] = {
    "linear": _linear,
    "conv1d": _convolution,
    "conv2d": _convolution,
    "conv3d": _convolution,
    "convtranspose1d": _transposed_convolution,
    "convtranspose2d": _transposed_convolution,
    "convtranspose3d": _transposed_convolution,
    "matmul": _matmul,
    "mm": _matmul,
    "bmm": _matmul,
    "imatmul": _matmul,
    "addmm": _addmm,
    "baddbmm": _addmm,
    "scaleddotproductattention": _attention,
    "batchnorm": _per_element(4),
    "layernorm": _per_element(7),
    "groupnorm": _per_element(7),
    "instancenorm": _per_element(7),
    "rmsnorm": _per_element(4),
    "softmax": _per_element(5),
    "logsoftmax": _per_element(5),
    "gelu": _per_element(8),
    "silu": _per_element(5),
    "sigmoid": _per_element(4),
    "tanh": _per_element(6),
}
_FORMULAS |= dict.fromkeys(
    "add sub mul div truediv iadd isub imul itruediv relu relu6 hardtanh leakyrelu neg "
    "exp log sqrt rsqrt pow ipow reciprocal abs rsub clamp clampmin maximum minimum "
    "square".split(),
    _per_element(1),
)
_FORMULAS |= dict.fromkeys(
    "maxpool1d maxpool2d maxpool3d avgpool1d avgpool2d avgpool3d adaptiveavgpool1d "
    "adaptiveavgpool2d adaptiveavgpool3d sum mean amax max amin min".split(),
    _per_input(1),
)
_FORMULAS |= dict.fromkeys(
    "view reshape transpose permute t flatten getitem contiguous identity expand "
    "expandas unsqueeze squeeze detach split chunk unbind cat stack to clone dropout "
    "embedding zeros ones arange empty full narrow select slice zeroslike oneslike "
    "unflatten roll pad".split(),
    _per_element(0),
)


def flops_of(type_name: str, inputs: Sequence[Shape], output: Shape) -> int | None:
    """Return the operations of one op, or `None` where no formula is known.

    Args:
        type_name: Label type, such as "conv2d".
        inputs: Shapes of the tensor arguments, in order, parameters included.
        output: Shape of the output.
    """
    formula = _FORMULAS.get(type_name)
    if formula is None:
        return None
    try:
        return formula(inputs, output)
    except IndexError:
        return None  # an unusual call of a known op, such as a 1-D matmul

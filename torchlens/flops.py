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


def _inputs_elements(inputs: Sequence[Shape], output: Shape) -> int:
    return prod(inputs[0]) if inputs else 0


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
}
_FORMULAS |= dict.fromkeys(
    "maxpool1d maxpool2d maxpool3d avgpool1d avgpool2d avgpool3d adaptiveavgpool1d "
    "adaptiveavgpool2d adaptiveavgpool3d sum mean amax max amin min".split(),
    _inputs_elements,
)
_PER_ELEMENT: dict[str, int] = {  # of the output
    "batchnorm": 4,
    "layernorm": 7,
    "groupnorm": 7,
    "instancenorm": 7,
    "rmsnorm": 4,
    "softmax": 5,
    "logsoftmax": 5,
    "gelu": 8,
    "silu": 5,
    "sigmoid": 4,
    "tanh": 6,
}
_PER_ELEMENT |= dict.fromkeys(
    "add sub mul div truediv iadd isub imul itruediv relu relu6 hardtanh leakyrelu neg "
    "exp log sqrt rsqrt pow ipow reciprocal abs rsub clamp clampmin maximum minimum "
    "square".split(),
    1,
)
_PER_ELEMENT |= dict.fromkeys(
    "view reshape transpose permute t flatten getitem contiguous identity expand "
    "expandas unsqueeze squeeze detach split chunk unbind cat stack to clone dropout "
    "embedding zeros ones arange empty full narrow select slice zeroslike oneslike "
    "unflatten roll pad".split(),
    0,
)


def flops_of(
    type_name: str, inputs: Callable[[], Sequence[Shape]], output: Shape
) -> int | None:
    """Return the operations of one op, or `None` where no formula is known.

    Args:
        type_name: Label type, such as "conv2d".
        inputs: Returns the shapes of the tensor arguments, in order, parameters
            included; asked only where the formula needs them.
        output: Shape of the output.
    """
    cost = _PER_ELEMENT.get(type_name)
    if cost is not None:
        return cost and cost * prod(output)
    formula = _FORMULAS.get(type_name)
    if formula is None:
        return None
    try:
        return formula(inputs(), output)
    except IndexError:
        return None  # an unusual call of a known op, such as a 1-D matmul

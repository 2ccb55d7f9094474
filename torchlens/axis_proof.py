"""Which axis of a site follows the batch: proved by values at batch sizes 3, 2 and 1.

Sample i alone must equal its slice of the batch.  A size that happens to match proves
nothing, and a size that does not change proves a constant only if the values agree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .row_layout import RowLayout

# Samples of the three probe runs; together they show every sample in another batch.
PROBE_SAMPLES = ((0, 1, 2), (1, 2), (0,))
_TOLERANCE = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
_FLOAT32_TOLERANCE = 1e-4
# TF32 and kernels chosen by batch size differ more than this between batch sizes.
_CUDA_FACTOR = 50.0

Kind = Literal["rows", "constant", "mixing", "size", "axes", "ambiguous"]

__all__ = [
    "PROBE_SAMPLES",
    "Proof",
    "close",
    "possible_layouts",
    "prove_axis",
    "prove_fixed_axis",
]


@dataclass(frozen=True, slots=True)
class Proof:
    """What the values say about one site.

    Attributes:
        kind: "rows" and "constant" are proved layouts.  "mixing": sizes fit, but a
            sample's values depend on its batch.  "size": a size that does not grow in
            proportion.  "axes": several axes follow the batch.  "ambiguous": the
            values do not tell the possible layouts apart.
        layout: The layout; for "mixing" the one that the sizes suggest, if only one.
        detail: What was found, for messages.
    """

    kind: Kind
    layout: RowLayout | None
    detail: str = ""


def prove_axis(values: Sequence[Tensor], *, by_value: bool = True) -> Proof:
    """Return what values caught for the batches `PROBE_SAMPLES` prove.

    Args:
        values: The site's tensor in each of the three runs, or in the first two.
        by_value: Whether values can be compared; not if they are random.
    """
    sizes = [len(samples) for samples in PROBE_SAMPLES[: len(values)]]
    shapes = [tuple(value.shape) for value in values]
    text = ", ".join(str(list(shape)) for shape in shapes)
    detail = f"its shapes at batch sizes {listed(sizes)} are {text}"
    if len({len(shape) for shape in shapes}) > 1:
        return Proof("size", None, detail)
    axes = [k for k in range(len(shapes[0])) if len({s[k] for s in shapes}) > 1]
    if not axes:
        return _prove_constant(values, detail, by_value)
    if len(axes) > 1:
        return Proof("axes", None, detail)
    axis = axes[0]
    group = shapes[0][axis] - shapes[1][axis]
    if any(shape[axis] != n * group for shape, n in zip(shapes, sizes, strict=True)):
        return Proof("size", None, detail)
    layouts = possible_layouts(axis, group, shapes[0])
    if not by_value:
        if len(layouts) == 1:
            return Proof("rows", layouts[0], detail)
        return Proof("ambiguous", None, detail)
    fitting = [layout for layout in layouts if _samples_agree(layout, values)]
    if len(fitting) > 1:
        return Proof("ambiguous", None, detail)
    if fitting:
        return Proof("rows", fitting[0], detail)
    suggested = layouts[0] if len(layouts) == 1 else None
    return Proof("mixing", suggested, detail)


def prove_fixed_axis(
    base: Tensor, changed: Sequence[tuple[int, Tensor]], num_samples: int
) -> Proof:
    """Return what single changed samples prove at one fixed batch size.

    Args:
        base: The site's tensor for a batch.
        changed: Pairs of the one sample that was changed, and the tensor then.
        num_samples: The batch size.
    """
    shape = tuple(base.shape)
    detail = f"its shape at the batch size {num_samples} is {list(shape)}"
    fitting = [
        layout
        for axis, size in enumerate(shape)
        if size and size % num_samples == 0
        for layout in possible_layouts(axis, size // num_samples, shape)
        if all(
            _changed_rows(layout, base, value, num_samples) == {sample}
            for sample, value in changed
        )
    ]
    if num_samples == 1:
        fitting = [layout for layout in fitting if not layout.merged]
    if len(fitting) == 1:
        return Proof("rows", fitting[0], detail)
    if fitting:
        return Proof("ambiguous", None, detail)
    if all(close(base, value) for _, value in changed):
        return Proof("constant", RowLayout(None, "", 1, shape), detail)
    return Proof("mixing", None, detail)


def close(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors agree within what batch size may change."""
    if one.shape != other.shape or one.dtype is not other.dtype:
        return False
    if one.numel() == 0:
        return True
    if not (one.dtype.is_floating_point or one.dtype.is_complex):
        return torch.equal(one, other)
    wide = torch.complex128 if one.dtype.is_complex else torch.float64
    first, second = one.to(wide), other.to(wide)
    # Equal values, and infinities and NaN in the same places, differ by nothing.
    same = (first == second) | (first.isnan() & second.isnan())
    gap = torch.where(same, torch.zeros_like(first), first - second).abs()
    finite = second.abs()
    finite = finite[finite.isfinite()]
    scale = float(finite.max()) if finite.numel() else 0.0
    return bool((gap <= _tolerance(one) * scale).all())


def listed(sizes: Sequence[int]) -> str:
    """Return batch sizes in words, such as "3, 2 and 1"."""
    *first, last = map(str, sizes)
    return f"{', '.join(first)} and {last}"


def _tolerance(tensor: Tensor) -> float:
    tolerance = _TOLERANCE.get(tensor.dtype, _FLOAT32_TOLERANCE)
    return tolerance if tensor.device.type == "cpu" else tolerance * _CUDA_FACTOR


def _prove_constant(values: Sequence[Tensor], detail: str, by_value: bool) -> Proof:
    first = values[0]
    agree = all(close(first, other) for other in values[1:])
    if by_value and not agree:
        return Proof("mixing", None, f"{detail}, and its values differ")
    return Proof("constant", RowLayout(None, "", 1, tuple(first.shape)), detail)


def possible_layouts(axis: int, group: int, shape: tuple[int, ...]) -> list[RowLayout]:
    """Return the layouts that the sizes allow for an axis of samples times `group`."""
    before, after = shape[:axis], shape[axis + 1 :]
    if group == 1:
        return [RowLayout(axis, "", 1, (*before, *after))]
    row = (*before, group, *after)
    return [
        RowLayout(axis, "batch_major", group, row),
        RowLayout(axis, "batch_minor", group, row),
    ]


def _samples_agree(layout: RowLayout, values: Sequence[Tensor]) -> bool:
    batch = layout.rows(values[0], len(PROBE_SAMPLES[0]))
    parts = PROBE_SAMPLES[1 : len(values)]
    return all(
        close(layout.rows(value, len(samples)), batch[list(samples)])
        for samples, value in zip(parts, values[1:], strict=True)
    )


def _changed_rows(
    layout: RowLayout, base: Tensor, value: Tensor, num_samples: int
) -> set[int]:
    if base.shape != value.shape:
        return set()
    before, after = layout.rows(base, num_samples), layout.rows(value, num_samples)
    return {
        index for index in range(num_samples) if not close(before[index], after[index])
    }

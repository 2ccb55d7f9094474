"""What one batch size fixes: the shapes to expect, and how rows are taken.

Made once per batch size, so that the hot path only compares and copies.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from .errors import InputError
from .model_inputs import ModelInputs
from .plans import CapturePlan, SitePlan, torch_dtype

TakeRows = Callable[[Tensor], Tensor]

__all__ = ["BatchTemplate", "TakeRows"]


class BatchTemplate:
    """Shapes and row functions of a plan for batches of `num_samples`.

    Attributes:
        num_samples: Samples of the batch.
        shapes: The shape that each site's tensor must have.
        rows: What takes the rows out of it; `None` where it is the rows already.
    """

    def __init__(self, plan: CapturePlan, num_samples: int) -> None:
        fixed = plan.fixed_batch
        if num_samples < 1 or (fixed is not None and num_samples > fixed):
            wanted = "at least one sample" if fixed is None else f"1 to {fixed} samples"
            raise InputError(
                f"A batch of {wanted} was wanted, but num_samples={num_samples} came."
            )
        self.num_samples = num_samples
        self._plan = plan
        run = num_samples if fixed is None else fixed
        self._pad = run - num_samples
        self.shapes: Sequence[tuple[int, ...]] = [
            site.layout.caught_shape(run) for site in plan.sites
        ]
        self.rows: Sequence[TakeRows | None] = [
            self._take(site, run) for site in plan.sites
        ]

        self._wanted = [
            (
                site.name,
                (num_samples, *site.row_shape),
                torch_dtype(site.stored_dtype),
            )
            for site in plan.sites
        ]

    def _take(self, site: SitePlan, run: int) -> TakeRows | None:
        layout, count = site.layout, self.num_samples
        if self._pad and layout.batch_axis is not None:
            return lambda tensor: layout.rows(tensor, run)[:count]
        if layout.batch_axis == 0 and not layout.merged:
            return None
        return lambda tensor: layout.rows(tensor, count)

    def pad(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Return the inputs, the last sample repeated up to a fixed batch size."""
        if not self._pad:
            return args, kwargs
        last = self.num_samples - 1
        order = (*range(self.num_samples), *[last] * self._pad)
        inputs = ModelInputs(args, kwargs).take(order, self._plan.input_batch_axis)
        return inputs.args, inputs.kwargs

    def targets(self, out: Mapping[str, Tensor]) -> list[Tensor]:
        """Return `out` in plan order, checked.

        Raises:
            InputError: If a tensor is missing or does not fit.
        """
        targets = []
        for name, shape, dtype in self._wanted:
            target = out.get(name)
            if target is None:
                raise InputError(
                    f"out has no tensor for the site {name!r}; it has "
                    f"{', '.join(map(repr, out)) or 'none'}."
                )
            if target.shape != shape or target.dtype is not dtype:
                raise InputError(
                    f"out[{name!r}] was wanted as {str(dtype)[6:]} {list(shape)}, but "
                    f"is {str(target.dtype)[6:]} {list(target.shape)}."
                )
            targets.append(target)
        return targets

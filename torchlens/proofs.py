"""Gathers, on the probe's batches, the evidence that a plan rests on.

Three self-checks: one sample alone equals the same sample in its batch, one batch twice
is identical, and the model's output with capture equals the one without.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .axis_proof import PROBE_SAMPLES, Proof, close, prove_axis, prove_fixed_axis
from .catches import Catch
from .errors import CaptureError, PlanError, TorchLensWarning
from .graph import Graph
from .model_inputs import ModelInputs
from .model_state import random_state
from .plans import Check
from .probe import Probe, Sighting, first_line, is_batched
from .row_layout import RowLayout
from .self_checks import (
    find_drawing_op,
    find_mixing_op,
    find_random_op,
    missing_mask_hint,
)

ALLOWED = frozenset({"constants", "mixing", "fixed_batch"})

__all__ = ["ALLOWED", "Evidence", "gather"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the probe proved; lists follow the order of the catches.

    Attributes:
        order: Catches in the order in which a forward hands them on.
        layouts: Where the samples are.
        dtypes: As the model makes them.
        unsafe: Catches whose tensor cannot be kept without a copy.
        checks: Results of the self-checks.
        notes: What the caller should know.
        fixed: Whether the batch size is fixed.
    """

    order: tuple[int, ...]
    layouts: tuple[RowLayout, ...]
    dtypes: tuple[str, ...]
    unsafe: frozenset[int]
    checks: tuple[Check, ...]
    notes: tuple[str, ...]
    fixed: bool


def gather(
    model: nn.Module,
    probe: Probe,
    graph: Graph,
    catches: Mapping[str, Catch],
    batch: ModelInputs,
    batch_axis: int,
    allow: frozenset[str],
) -> Evidence:
    """Run the probe on `batch`, the one that was traced, and on parts of it.

    Raises:
        PlanError: If a site has no rows, or the model mixes samples or takes batches
            of one size only, unless allowed.
    """
    return _Gathering(model, probe, graph, catches, batch, batch_axis, allow).evidence()


class _Gathering:
    def __init__(
        self,
        model: nn.Module,
        probe: Probe,
        graph: Graph,
        catches: Mapping[str, Catch],
        batch: ModelInputs,
        batch_axis: int,
        allow: frozenset[str],
    ) -> None:
        self._model = model
        self._name = type(model).__name__
        self._probe = probe
        self._graph = graph
        self._names = tuple(catches)
        self._catches = tuple(catches.values())
        self._batch = batch
        self._axis = batch_axis
        self._allow = allow
        self._checks: list[Check] = []
        self._notes: list[str] = []
        self._reused: frozenset[int] = frozenset()

    def evidence(self) -> Evidence:
        first = self._probe.sight(self._batch, self._catches)
        self._refuse_unusable(first.values)
        by_value = self._check_twice(first)
        self._check_output(first)
        fixed = "fixed_batch" in self._allow
        proofs = self._prove_fixed(first) if fixed else self._prove(first, by_value)
        layouts = tuple(map(self._accept, self._names, proofs))
        mixed = any(proof.kind == "mixing" for proof in proofs)
        self._checks.append(
            Check("sample alone equals sample in batch", by_value and not mixed)
            if by_value
            else Check(
                "sample alone equals sample in batch", False, "values are random"
            )
        )
        return Evidence(
            order=first.order,
            layouts=layouts,
            dtypes=tuple(str(value.dtype)[6:] for value in first.values),
            unsafe=first.unsafe | self._reused,
            checks=tuple(self._checks),
            notes=tuple(self._notes),
            fixed=fixed,
        )

    def _refuse_unusable(self, values: Sequence[Tensor]) -> None:
        for name, value in zip(self._names, values, strict=True):
            if is_batched(value):
                raise PlanError(
                    f"The site {name!r} lies inside torch.vmap or another function "
                    "transform, where a tensor stands for many and cannot be kept. "
                    "Choose a site outside of it."
                )
            if value.layout is not torch.strided or value.is_quantized:
                kind = "quantised" if value.is_quantized else str(value.layout)[6:]
                raise PlanError(
                    f"The site {name!r} is a {kind} tensor, which has no rows to keep."
                    " Choose a site where the tensor is dense."
                )

    def _check_twice(self, first: Sighting) -> bool:
        """Return whether the same batch gives the same values twice."""
        again = self._probe.sight(self._batch, self._catches, halt=True)
        self._reused = first.reused_by(again)
        name = "same batch twice is identical"
        pairs = zip(self._names, first.values, again.values, strict=True)
        differing = [site for site, one, other in pairs if not _identical(one, other)]
        if not differing:
            drawing = self._find_drawing_op()
            self._checks.append(Check(name, drawing is None, drawing or ""))
            if drawing is not None:
                self._warn(drawing)
            return True
        culprit = find_random_op(self._model, self._batch)
        made = f"first op that differs: {culprit}" if culprit else "no op was found"
        text = f"{differing[0]!r} differs between two runs of one batch; {made}"
        self._checks.append(Check(name, False, text))
        self._warn(text)
        same = dict(
            zip(self._names, zip(first.values, again.values, strict=True), strict=True)
        )
        return all(close(*same[site]) for site in differing)

    def _find_drawing_op(self) -> str | None:
        """Return in words an op before the sites that draws random numbers.

        Rare events, such as dropout of one value in a thousand, do not show in two runs
        of a small batch; that numbers are drawn does.
        """
        op = find_drawing_op(self._graph, [catch.key for catch in self._catches])
        if op is None:
            return None
        states = [random_state(self._model)]
        for _ in range(2):
            self._probe.sight(self._batch, self._catches, halt=True)
            states.append(random_state(self._model))
        before, once, twice = states
        # Equal after both: nothing was drawn, or the model seeds itself each time.
        if torch.equal(before, once) or torch.equal(once, twice):
            return None
        return f"random numbers go into the sites; drawn by {op}"

    def _warn(self, text: str) -> None:
        self._notes.append(text)
        warnings.warn(
            f"{self._name} is not deterministic: {text}. Rows are as the model makes "
            "them, but another run gives others.",
            TorchLensWarning,
            stacklevel=6,
        )

    def _check_output(self, first: Sighting) -> None:
        """Compare the model's output with capture to the one without."""
        name = "output with capture equals output without"
        plain = self._probe.plain(self._batch)
        if _all_identical(first.output, plain):
            self._checks.append(Check(name, True))
            return
        if not _all_identical(plain, self._probe.plain(self._batch)):
            self._checks.append(Check(name, False, "the output itself is random"))
            return
        raise PlanError(
            f"The output of {self._name} changes when its sites are captured, so the "
            "captured values cannot be trusted. Its forward may look at its own hooks "
            "or at its `forward` attribute; capture other sites."
        )

    def _prove(self, first: Sighting, by_value: bool) -> list[Proof]:
        sightings = [first]
        for samples in PROBE_SAMPLES[1:]:
            part = self._batch.take(samples, self._axis)
            try:
                sightings.append(self._probe.sight(part, self._catches, halt=True))
            except CaptureError as error:
                raise PlanError(
                    f"{self._name} takes another path for {len(samples)} samples than "
                    f"for 3: {error}"
                ) from error
            except Exception as error:
                if len(sightings) == 2 and self._explain_mixing(sightings, samples):
                    break
                raise PlanError(
                    f"{self._name} runs on a batch of 3 samples, but not on "
                    f"{len(samples)}: {first_line(error)}. If it takes batches of one "
                    'size only, pass allow=("fixed_batch",) with an example of that '
                    "size; short batches are then padded and cut."
                ) from error
        proofs = [
            prove_axis(
                [sighting.values[index] for sighting in sightings], by_value=by_value
            )
            for index in range(len(self._names))
        ]
        return self._turn(first, proofs) if by_value else proofs

    def _turn(self, first: Sighting, proofs: list[Proof]) -> list[Proof]:
        """Find rows that do not follow their samples: a model may sort its batch."""
        order = PROBE_SAMPLES[0][::-1]
        part = self._batch.take(order, self._axis)
        try:
            turned = self._probe.sight(part, self._catches, halt=True)
        except Exception:
            return proofs  # it takes sorted batches only, such as sequences by length

        def follows(index: int, layout: RowLayout) -> bool:
            rows = layout.rows(first.values[index], len(order))
            return close(layout.rows(turned.values[index], len(order)), rows[[*order]])

        return [
            Proof("mixing", proof.layout, f"{proof.detail}, but rows are reordered")
            if proof.kind == "rows"
            and proof.layout is not None
            and not follows(index, proof.layout)
            else proof
            for index, proof in enumerate(proofs)
        ]

    def _explain_mixing(
        self, sightings: Sequence[Sighting], failed: tuple[int, ...]
    ) -> bool:
        """Return whether the runs so far show mixing, and whether it is permitted.

        Raises:
            PlanError: If they show it, and it is not.
        """
        mixing = False
        for index, name in enumerate(self._names):
            values = [sighting.values[index] for sighting in sightings]
            proof = prove_axis(values)
            if proof.kind == "mixing":
                mixing = True
                if "mixing" not in self._allow:
                    self._accept_mixing(name, proof)
        if mixing:
            self._notes.append(f"{self._name} does not run on {len(failed)} sample")
        return mixing

    def _prove_fixed(self, first: Sighting) -> list[Proof]:
        size = self._batch.num_samples(self._axis)
        wider = self._batch.distinct(size + 2, self._axis)
        changed = []
        for sample, spare in {0: size, size - 1: size + 1}.items():
            order = [*range(sample), spare, *range(sample + 1, size)]
            part = wider.take(tuple(order), self._axis)
            changed.append((sample, self._probe.sight(part, self._catches, halt=True)))
        return [
            prove_fixed_axis(
                value,
                [(sample, sighting.values[index]) for sample, sighting in changed],
                size,
            )
            for index, value in enumerate(first.values)
        ]

    def _accept(self, name: str, proof: Proof) -> RowLayout:
        """Return the layout that was proved, or raise why there is none."""
        if proof.kind == "rows" and proof.layout is not None:
            return proof.layout
        if proof.kind == "constant" and proof.layout is not None:
            if "constants" in self._allow:
                self._notes.append(f"{name!r} is a constant: every row is the same")
                return proof.layout
            part = self._catches[self._names.index(name)].key.path
            other = "Name the other parts of this output" if part else "Choose another"
            raise PlanError(
                f"The site {name!r} has no batch axis: {proof.detail}, and its values "
                f"do not change with the samples. {other}, or pass "
                'allow=("constants",) to keep the same row for every sample.'
            )
        if proof.kind == "mixing":
            return self._accept_mixing(name, proof)
        if proof.kind == "ambiguous":
            raise PlanError(
                f"The samples of {name!r} cannot be told apart: {proof.detail}, and "
                "the values fit more than one order. Plan with an example whose "
                "samples differ more."
            )
        what = (
            "more than one axis follows the batch, so that values belong to pairs of "
            "samples"
            if proof.kind == "axes"
            else "no axis grows in proportion to the batch"
        )
        raise PlanError(
            f"The site {name!r} cannot be cut into rows: {what}; {proof.detail}. "
            "Choose another site."
        )

    def _accept_mixing(self, name: str, proof: Proof) -> RowLayout:
        text = (
            f"{name!r} of {self._name} mixes samples: a sample gives other values in "
            f"another batch; {proof.detail}. "
        )
        if "fixed_batch" not in self._allow:
            key = self._catches[self._names.index(name)].key
            culprit = find_mixing_op(self._model, self._batch, self._axis, key)
            text += f"First op that differs: {culprit}."
        text += missing_mask_hint(self._model, self._batch)
        if "mixing" not in self._allow:
            raise PlanError(
                f'{text} Rows would depend on the batch size; pass allow=("mixing",) '
                "if that is meant."
            )
        if proof.layout is None:
            raise PlanError(f"{text} No axis of it can be told to hold the samples.")
        self._notes.append(text)
        return proof.layout


def _identical(one: Tensor, other: Tensor) -> bool:
    """Return whether shapes and values are equal, NaN to NaN included."""
    if torch.equal(one, other):
        return True
    if one.shape != other.shape or one.dtype is not other.dtype:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _all_identical(ones: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(ones) == len(others) and all(map(_identical, ones, others))

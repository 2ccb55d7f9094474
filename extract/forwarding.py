"""One batch through the replayer, its rows into the places that wait for them."""

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from torchlens.plans import CapturePlan, torch_dtype
from torchlens.replayer import Policy, Replayer

from .filling import BlockFiller
from .loading import LoadedBatch
from .model_call import InputRule
from .pieces import OpenBlock
from .progress import StageClock

__all__ = ["BatchRunner"]


class BatchRunner:
    """Runs batches; the model is prepared inside `with runner.replayer`.

    On the CPU, rows of a layer that is stored as it is go straight from the hook into
    the block's buffer.  A layer that is cast is captured in its own dtype first, so
    that values which do not fit can be told from those that were infinite before.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: CapturePlan,
        rule: InputRule,
        *,
        device: torch.device | None,
        on_divergence: Policy,
        check_model: bool,
        clock: StageClock,
    ) -> None:
        sites = tuple(
            dataclasses.replace(site, stored_dtype=site.dtype) for site in plan.sites
        )
        self.replayer = Replayer(
            model,
            dataclasses.replace(plan, sites=sites),
            on_divergence=on_divergence,
            check_model=check_model,
        )
        self._plan = plan
        self._rule = rule
        self._device = device
        self._clock = clock
        self._direct = device is None or device.type == "cpu"
        self._cast = [s.name for s in plan.sites if s.dtype != s.stored_dtype]
        self._scratch: dict[str, Tensor] = {}

    def run(self, batch: LoadedBatch, block: OpenBlock, filler: BlockFiller) -> None:
        """Compute the rows of one batch and give them to the filler."""
        with self._clock.stage("write"):
            places = filler.places(len(batch.all_rows))
        start = len(block.facts.ids)
        missing: tuple[str, ...] = ()
        if batch.rows:
            whole = not batch.failures
            values = self._forward(batch, places if whole and self._direct else None)
            missing = self.replayer.missing
            with self._clock.stage("copy"):
                found = {name: at for name, at in places.items() if name not in missing}
                if whole:
                    # Layers captured in place need no copy.
                    found = {n: at for n, at in found.items() if values[n] is not at}
                    filler.copy(values, found)
                else:
                    first = batch.all_rows[0]
                    positions = [row - first for row in batch.rows]
                    filler.scatter(values, found, positions)
        else:
            filler.scatter({}, places, [])
        for name in missing:
            filler.leave_empty(name, places[name])
            rows = block.facts.missing.setdefault(name, [])
            rows += range(block.block.start + start, batch.all_rows[-1] + 1)
        self._note(batch, block)
        with self._clock.stage("write"):
            filler.advance(len(batch.all_rows))

    def _forward(
        self, batch: LoadedBatch, places: Mapping[str, Tensor] | None
    ) -> dict[str, Tensor]:
        with self._clock.stage("forward"):
            inputs = self._rule.apply(batch.inputs, self._device)
            out = None if places is None else self._targets(places)
            values = self.replayer.run(
                inputs.args,
                inputs.kwargs,
                num_samples=len(batch.rows),
                sample_ids=batch.ids,
                out=out,
            )
            return values if out is None else out

    def _targets(self, places: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return where hooks copy to: the places, or scratch rows for a cast layer."""
        if not self._cast:
            return dict(places)
        targets = dict(places)
        for site in self._plan.sites:
            if site.name not in self._cast:
                continue
            num_rows = len(places[site.name])
            rows = self._scratch.get(site.name)
            if rows is None or len(rows) < num_rows:
                dtype = torch_dtype(site.dtype)
                rows = torch.empty((num_rows, *site.row_shape), dtype=dtype)
                self._scratch[site.name] = rows
            targets[site.name] = rows[:num_rows]
        return targets

    def _note(self, batch: LoadedBatch, block: OpenBlock) -> None:
        facts = block.facts
        facts.ids += batch.ids
        facts.batch_rows.append(len(batch.rows))
        facts.failed += [failure.row for failure in batch.failures]
        for name, values in batch.metadata.items():
            facts.metadata.setdefault(name, []).extend(values)

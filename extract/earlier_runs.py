"""Looks up what an earlier call for the same request planned, so as not to trace again.

That is how a finished store is recognised without running the model at all.
"""

import json

from torchlens.errors import PlanError
from torchlens.plans import CapturePlan
from torchlens.storage.objects import open_objects
from torchlens.storage.runs import read_runs

from .config import Settings

__all__ = ["find_plan", "stored_layers"]


def find_plan(settings: Settings, request: str) -> CapturePlan | None:
    """Return the plan that a run in the store made for an equal request, if any."""
    if settings.output_dir is None or settings.overwrite:
        return None
    for run in read_runs(open_objects(settings.output_dir)):
        provenance = run.record.provenance
        if provenance.get("request") == request:
            try:
                return CapturePlan.from_json(json.dumps(provenance["plan"]))
            except (KeyError, PlanError):
                # Written by another version of this package: plan anew and compare.
                return None
    return None


def stored_layers(settings: Settings) -> frozenset[str]:
    """Return the layers of all runs in the store, finished or not, that will stay."""
    if settings.output_dir is None or settings.overwrite:
        return frozenset()
    runs = read_runs(open_objects(settings.output_dir))
    return frozenset(name for run in runs for name in run.record.arrays)

"""Looks up what earlier calls planned and stored, and says how this one differs.

A plan of an equal request is how a finished store is recognised without running the
model at all.
"""

import json

from torchlens.errors import PlanError, ResumeError
from torchlens.plans import CapturePlan
from torchlens.storage.objects import open_objects
from torchlens.storage.runs import read_runs

from .config import Settings

__all__ = ["explain_refusal", "find_plan", "stored_layers"]


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


_MEANINGS = {
    "identity.model.class_name": "the model is of another class",
    "identity.model.config": "the modules of the model, or their settings, are others",
    "identity.model.weights": "the model has other weights; weights drawn at random "
    "differ in every process unless torch.manual_seed comes first",
    "identity.dataset.fingerprint": "the items of the dataset are others",
    "identity.dataset.ids": "the ids of the samples are made in another way",
    "identity.preprocess": "the data is prepared in another way",
}


def explain_refusal(error: ResumeError) -> ResumeError:
    """Return the refusal of a store with what its differing fields mean."""
    text = str(error)
    found = [meaning for field, meaning in _MEANINGS.items() if field in text]
    if not found:
        return error
    return ResumeError(f"{text}\nThat is: {'; '.join(found)}.")

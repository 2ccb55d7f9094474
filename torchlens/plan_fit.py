"""Whether a model is the one that a plan was made for."""

import sys

from torch import nn

from .errors import PlanError
from .identity import class_name, config_digest, weights_digest
from .plans import CapturePlan

__all__ = ["check_fit", "python_version"]


def check_fit(model: nn.Module, plan: CapturePlan, *, weights: bool = True) -> None:
    """Refuse a model that is not the planned one, naming each fact that differs.

    Args:
        model: The plain module.
        plan: The plan to run on it.
        weights: Whether settings and weights are compared too; that reads them all.

    Raises:
        PlanError: If a fact differs.
    """
    facts = [("class", plan.model.class_name, class_name(model))]
    if any(site.catch.via == "mode" for site in plan.sites):
        # Call sites are instruction offsets, which change between minor versions.
        facts.append(("Python version", plan.python_version, python_version()))
    if weights:
        facts.append(("config", plan.model.config, config_digest(model)))
        facts.append(("weights", plan.model.weights, weights_digest(model)))
    differing = [fact for fact in facts if fact[1] != fact[2]]
    if differing:
        text = "; ".join(
            f"{name}: planned {planned}, came {came}"
            for name, planned, came in differing
        )
        raise PlanError(
            f"The plan does not fit this {type(model).__name__}: {text}. Load the "
            "weights and settings that were planned, or plan again."
        )


def python_version() -> str:
    """Return the minor version, such as "3.11"."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"

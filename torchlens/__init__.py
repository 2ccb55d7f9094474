"""Capture what happens inside PyTorch models, for one input or a whole dataset.

`trace` looks at one forward pass; `extract_dataset` writes chosen layers of a dataset
into a store, and `open_store` reads it.  Everything else here serves those.
"""

from typing import TYPE_CHECKING, Any

from .errors import (
    BudgetError,
    CaptureError,
    DataError,
    InputError,
    ManifestError,
    ModelError,
    NonFiniteError,
    PathDivergenceError,
    PlanError,
    ReplayError,
    ResumeError,
    SelectorError,
    StoreError,
    TorchLensError,
    TorchLensWarning,
)
from .model_inputs import ModelInputs
from .planner import plan
from .plans import CapturePlan
from .recording import pluck, record
from .replayer import Replayer
from .selectors import (
    contains,
    everything,
    followed_by,
    func,
    in_module,
    label,
    label_contains,
    module,
    module_input,
    module_type,
    output,
    preceded_by,
    regex,
    where,
)
from .streaming import stream
from .tracing import trace, validate
from .views import Trace

if TYPE_CHECKING:
    from .extract import extract_dataset
    from .storage import Store, open_store

__all__ = [
    "BudgetError",
    "CaptureError",
    "CapturePlan",
    "DataError",
    "InputError",
    "ManifestError",
    "ModelError",
    "ModelInputs",
    "NonFiniteError",
    "PathDivergenceError",
    "PlanError",
    "ReplayError",
    "Replayer",
    "ResumeError",
    "SelectorError",
    "Store",
    "StoreError",
    "TorchLensError",
    "TorchLensWarning",
    "Trace",
    "contains",
    "everything",
    "extract_dataset",
    "followed_by",
    "func",
    "in_module",
    "label",
    "label_contains",
    "module",
    "module_input",
    "module_type",
    "open_store",
    "output",
    "plan",
    "pluck",
    "preceded_by",
    "record",
    "regex",
    "stream",
    "trace",
    "validate",
    "where",
]


def __getattr__(name: str) -> Any:
    """Import the engine and the store when they are first asked for.

    Most interactive work needs neither, and an import should cost what torch costs.
    """
    if name == "extract_dataset":
        from .extract import extract_dataset

        return extract_dataset
    if name in ("Store", "open_store"):
        from . import storage

        return getattr(storage, name)
    raise AttributeError(f"module 'torchlens' has no attribute {name!r}")

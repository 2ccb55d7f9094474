"""Capture what happens inside PyTorch models, for one input or a whole dataset.

`trace` looks at one forward pass; `extract_dataset` writes chosen layers of a dataset
into a store, and `open_store` reads it.  Everything else here serves those.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import (
        BudgetError as BudgetError,
        CaptureError as CaptureError,
        DataError as DataError,
        InputError as InputError,
        ManifestError as ManifestError,
        ModelError as ModelError,
        NonFiniteError as NonFiniteError,
        PathDivergenceError as PathDivergenceError,
        PlanError as PlanError,
        ReplayError as ReplayError,
        ResumeError as ResumeError,
        SelectorError as SelectorError,
        StoreError as StoreError,
        TorchLensError as TorchLensError,
        TorchLensWarning as TorchLensWarning,
    )
    from .extract import extract_dataset as extract_dataset
    from .model_inputs import ModelInputs as ModelInputs
    from .planner import plan as plan
    from .plans import CapturePlan as CapturePlan
    from .recording import (
        pluck as pluck,
        record as record,
    )
    from .replayer import Replayer as Replayer
    from .selectors import (
        contains as contains,
        everything as everything,
        followed_by as followed_by,
        func as func,
        in_module as in_module,
        label as label,
        label_contains as label_contains,
        module as module,
        module_input as module_input,
        module_type as module_type,
        output as output,
        preceded_by as preceded_by,
        regex as regex,
        where as where,
    )
    from .storage import (
        Store as Store,
        open_store as open_store,
    )
    from .streaming import stream as stream
    from .tracing import (
        trace as trace,
        validate as validate,
    )
    from .views import Trace as Trace

# Where each public name lives.  A module is loaded when one of its names is first used;
# benchmarks/import_time.py prints what that saves.
_HOMES = {
    "BudgetError": "errors",
    "CaptureError": "errors",
    "CapturePlan": "plans",
    "DataError": "errors",
    "InputError": "errors",
    "ManifestError": "errors",
    "ModelError": "errors",
    "ModelInputs": "model_inputs",
    "NonFiniteError": "errors",
    "PathDivergenceError": "errors",
    "PlanError": "errors",
    "ReplayError": "errors",
    "Replayer": "replayer",
    "ResumeError": "errors",
    "SelectorError": "errors",
    "Store": "storage",
    "StoreError": "errors",
    "TorchLensError": "errors",
    "TorchLensWarning": "errors",
    "Trace": "views",
    "contains": "selectors",
    "everything": "selectors",
    "extract_dataset": "extract",
    "followed_by": "selectors",
    "func": "selectors",
    "in_module": "selectors",
    "label": "selectors",
    "label_contains": "selectors",
    "module": "selectors",
    "module_input": "selectors",
    "module_type": "selectors",
    "open_store": "storage",
    "output": "selectors",
    "plan": "planner",
    "pluck": "recording",
    "preceded_by": "selectors",
    "record": "recording",
    "regex": "selectors",
    "stream": "streaming",
    "trace": "tracing",
    "validate": "tracing",
    "where": "selectors",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'torchlens' has no attribute {name!r}")
    value = getattr(import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})

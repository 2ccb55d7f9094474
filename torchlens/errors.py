"""Every exception and warning this package raises.

One class per thing a caller can do about it; each is also the builtin that generic
handlers expect.  Messages say what was wanted, what came, where, and what to do.
"""

__all__ = [
    "BudgetError",
    "CaptureError",
    "DataError",
    "InputError",
    "ManifestError",
    "ModelError",
    "NonFiniteError",
    "PathDivergenceError",
    "PlanError",
    "ReplayError",
    "ResumeError",
    "SelectorError",
    "StoreError",
    "TorchLensError",
    "TorchLensWarning",
]


class TorchLensError(Exception):
    """Base of every exception raised on purpose by this package."""


class SelectorError(TorchLensError, ValueError):
    """A label, address or selector names nothing, or too much: ask differently."""


class ModelError(TorchLensError, TypeError):
    """The object cannot be captured as a model: pass another, or unwrap it."""


class InputError(TorchLensError, ValueError):
    """The inputs do not fit the model's call: change the inputs or how they map."""


class CaptureError(TorchLensError, RuntimeError):
    """The forward ran, but what it did cannot be captured as asked."""


class PlanError(TorchLensError, ValueError):
    """The chosen sites cannot be extracted row by row: choose or permit otherwise."""


class ReplayError(TorchLensError, RuntimeError):
    """A planned run could not be carried out on this batch."""


class PathDivergenceError(ReplayError):
    """A batch took another path than the plan: re-plan, or run with "retrace"."""


class DataError(TorchLensError, ValueError):
    """The dataset breaks the rules: duplicate ids, wrong counts, unusable items."""


class NonFiniteError(TorchLensError, ArithmeticError):
    """NaN, infinity or overflow under a policy that refuses them."""


class StoreError(TorchLensError, OSError):
    """The store cannot be read or written where it lies."""


class ManifestError(TorchLensError, ValueError):
    """A record inside the store is damaged, foreign, or of an unknown version."""


class ResumeError(TorchLensError, RuntimeError):
    """An existing store belongs to a different run: use another place or overwrite."""


class BudgetError(TorchLensError, ValueError):
    """The forecast does not fit memory, disk or the given limit: ask for less."""


class TorchLensWarning(UserWarning):
    """The result is right, but the caller should know something about it."""

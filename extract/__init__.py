"""The dataset engine: any dataset through a planned model into a store."""

if __name__ != "torchlens.extract":
    raise ImportError("This folder is imported as torchlens.extract.")

from .engine import extract_dataset
from .forecast import RunForecast
from .interrupts import REQUEUE_CODE, RequeueExit
from .progress import RunSummary

__all__ = [
    "REQUEUE_CODE",
    "RequeueExit",
    "RunForecast",
    "RunSummary",
    "extract_dataset",
]

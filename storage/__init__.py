"""Bytes, shapes and names: how rows of activations lie on disk and come back.

Knows arrays, never models.  `open_run` writes a store block by block, `open_store`
reads one; `FORMAT.md` beside this file specifies every object of a store.
"""

if __name__ != "torchlens.storage":
    raise ImportError("This folder is imported as torchlens.storage.")

from .block_writer import BlockWriter
from .layer_paths import layer_name, layer_path
from .layer_reader import LayerReader
from .layout import Layout, plan_layout
from .objects import MemoryObjects, ObjectStore
from .opening import open_run, open_store
from .run_spec import ArraySpec, RunSpec
from .store import Store
from .verify import Problem, VerifyReport
from .writer import StoreWriter

__all__ = [
    "ArraySpec",
    "BlockWriter",
    "LayerReader",
    "Layout",
    "MemoryObjects",
    "ObjectStore",
    "Problem",
    "RunSpec",
    "Store",
    "StoreWriter",
    "VerifyReport",
    "layer_name",
    "layer_path",
    "open_run",
    "open_store",
    "plan_layout",
]

"""A digest of the source files behind a model, to notice edited code without running.

It only decides whether an earlier plan may be used again; when it differs, the model is
traced anew and the plans are compared.
"""

import hashlib
import inspect
import platform
from pathlib import Path

import torch
from torch import nn

__all__ = ["digest_code"]


def digest_code(model: nn.Module) -> str | None:
    """Return a digest of the files that define the classes of all submodules.

    `None` when a class has no file, as in a notebook: nothing can then be told.
    """
    files = set()
    for kind in {type(module) for module in model.modules()}:
        if kind.__module__.split(".")[0] == "torch":
            continue
        try:
            files.add(inspect.getfile(kind))
        except (TypeError, OSError):
            return None
    digest = hashlib.sha256()
    digest.update(f"{torch.__version__} {platform.python_version()}".encode())
    for file in sorted(files):
        try:
            content = Path(file).read_bytes()
        except OSError:
            return None
        # Names of files differ between machines, what is in them does not.
        digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()

"""Content digests of datasets and settings, so that a changed one is noticed.

A digest of a whole dataset would cost as much as reading it; a few rows spread over
it catch what happens in practice: another file, order, or preparation of the data.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from .image_folder import ImageFolder
from .samples import Source

__all__ = [
    "describe_callable",
    "digest_ids",
    "digest_item",
    "fingerprint_rows",
]

_ARRAY_ROWS = 64
_ITEM_ROWS = 3


def digest_item(item: object) -> str:
    """Return the sha256 of an item's content: tensors, arrays, images, plain data.

    What has no content of its own counts with the name of its type.
    """
    digest = hashlib.sha256()
    _feed(digest.update, item)
    return digest.hexdigest()


def _feed(update: Callable[[bytes], None], item: object) -> None:
    if isinstance(item, torch.Tensor):
        update(f"tensor {item.dtype} {tuple(item.shape)}".encode())
        flat = item.detach().cpu().contiguous().reshape(-1)
        update(flat.view(torch.uint8).numpy().tobytes())
    elif isinstance(item, np.ndarray | np.generic):
        update(f"array {item.dtype.str} {item.shape}".encode())
        update(np.ascontiguousarray(item).tobytes())
    elif isinstance(item, bytes):
        update(b"bytes " + item)
    elif item is None or isinstance(item, str | int | float | complex | bool):
        update(f"{type(item).__name__} {item!r}\n".encode())
    elif isinstance(item, Mapping):
        update(f"mapping {len(item)}".encode())
        for key in sorted(item, key=str):
            _feed(update, str(key))
            _feed(update, item[key])
    elif isinstance(item, Sequence):
        update(f"sequence {len(item)}".encode())
        for value in item:
            _feed(update, value)
    elif callable(getattr(item, "tobytes", None)):
        update(
            f"image {getattr(item, 'mode', '')} {getattr(item, 'size', '')}".encode()
        )
        update(item.tobytes())  # type: ignore[attr-defined]  # asked just above
    else:
        update(f"object {type(item).__qualname__}".encode())


def digest_ids(ids: Iterable[str]) -> str:
    """Return the sha256 of ids in order; each is fed with its length."""
    digest = hashlib.sha256()
    for name in ids:
        data = name.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def fingerprint_rows(source: Source) -> str | None:
    """Return a digest of rows spread over an indexed dataset, ends included.

    `None` when a row differs from one read to the next, as with random augmentation:
    such a dataset has no content to compare.  Rows that cannot be read count as such.
    """
    if source.num_rows is None:
        return None
    items = source.items
    in_memory = isinstance(items, torch.Tensor | np.ndarray)
    count = min(_ARRAY_ROWS if in_memory else _ITEM_ROWS, source.num_rows)
    step = (source.num_rows - 1) / max(1, count - 1)
    rows = sorted({round(place * step) for place in range(count)})
    digests = [_digest_row(items, row) for row in rows]
    if not in_memory and digests[0] != _digest_row(items, rows[0]):
        return None
    return digest_ids(digests)


def _digest_row(items: Any, row: int) -> str:
    try:
        if isinstance(items, ImageFolder):
            return digest_item(items.raw_bytes(row))
        return digest_item(items[row])
    except Exception as error:
        return f"unreadable: {type(error).__name__}"


def describe_callable(function: object) -> str:
    """Return words for a callable that are the same in another process.

    Its `repr` without memory addresses when it says its settings, as torchvision
    transforms do; otherwise its qualified name.
    """
    name = getattr(function, "__qualname__", None)
    if isinstance(name, str):
        return f"{getattr(function, '__module__', '')}.{name}"
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(function))

"""The little that a store asks of a place: create whole objects, read, list, delete.

`put_new` is the only way data gets in: it creates a whole object or says that one is
there.  Nothing is appended, renamed or locked by the layers above.
"""

import contextlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, final
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from torchlens.errors import StoreError

Parts: TypeAlias = Sequence[bytes | NDArray[np.uint8]]
Location: TypeAlias = "str | os.PathLike[str] | ObjectStore | None"


class ObjectStore(ABC):
    """Objects under one root, named by keys with "/" between components."""

    @property
    @abstractmethod
    def url(self) -> str:
        """Where the root is, for messages and for other programs."""

    @abstractmethod
    def put_new(self, key: str, parts: Parts) -> bool:
        """Create the object from its parts; return False if there is one already.

        A reader sees the whole object or none, whatever happens to the writer.
        """

    @abstractmethod
    def give_up_conditions(self) -> None:
        """Note that the place overwrites what `put_new` should leave alone."""

    @abstractmethod
    def replace(self, key: str, parts: Parts) -> None:
        """Create or replace the object at once; readers see the old or the new one."""

    @abstractmethod
    def get(self, key: str) -> bytes:
        """Return the object's bytes; raise FileNotFoundError if there is none."""

    @abstractmethod
    def get_range(self, key: str, start: int, stop: int | None) -> bytes:
        """Return bytes [start, stop); a negative start counts from the end."""

    @abstractmethod
    def size(self, key: str) -> int | None:
        """Return the object's size in bytes, None if there is no such object."""

    @abstractmethod
    def list(self, prefix: str, *, recursive: bool = False) -> Mapping[str, int]:
        """Return key to size of the objects in a folder, in one listing."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Delete the object if it is there."""

    @abstractmethod
    def sweep(self) -> None:
        """Remove what dead writers left half done."""

    @abstractmethod
    def prune(self) -> None:
        """Remove folders that deletion left empty, where there are folders."""

    def local_path(self, key: str) -> str | None:
        """Return the file behind a key, None where objects are no local files."""
        return None


def joined(parts: Parts) -> bytes:
    """Return the parts as one byte string."""
    return b"".join(
        part if isinstance(part, bytes) else part.tobytes() for part in parts
    )


def open_objects(
    location: Location,
    *,
    fsync: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> ObjectStore:
    """Return the objects at a path or URL; None gives a private in-memory place.

    Args:
        location: Directory, URL, objects opened before, or None.
        fsync: For directories: wait for the disk before an object counts.
        storage_options: For URLs: options of the client that opens them, and `client`,
            "s3fs" or "obstore", for S3.

    Raises:
        StoreError: If the place cannot hold a store.
    """
    if location is None:
        return MemoryObjects()
    if isinstance(location, ObjectStore):
        return location
    text = os.fspath(location)
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    if "://" not in text and "::" not in text:
        from .local_objects import LocalObjects

        return LocalObjects(text, fsync=fsync)
    from .remote_objects import RemoteObjects

    return RemoteObjects(text, storage_options)


def refuses_second_put(objects: ObjectStore, folder: str) -> bool:
    """Return whether the place keeps the promise of `put_new`, by trying it.

    Some object stores ignore the condition "only if absent" and overwrite silently,
    some do not know it.

    Raises:
        StoreError: If nothing can be written there.
    """
    key = f"{folder}/probe-{uuid4().hex}"
    try:
        # False for the first means that its own retry was refused: a kept promise too.
        objects.put_new(key, [b"1"])
        refused = not objects.put_new(key, [b"2"])
    except NotImplementedError:
        return False
    with contextlib.suppress(StoreError):
        objects.delete(key)  # who may write need not be allowed to delete
    return refused


@final
class MemoryObjects(ObjectStore):
    """Objects in a dictionary of this process: the same protocol, no disk."""

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """A name for messages; nothing else can open it."""
        return f"<in-memory store {id(self):#x}>"

    def put_new(self, key: str, parts: Parts) -> bool:
        """Create the object; return False if there is one already."""
        data = joined(parts)
        with self._lock:
            return self._objects.setdefault(key, data) is data

    def give_up_conditions(self) -> None:
        """Nothing is ever overwritten here."""

    def replace(self, key: str, parts: Parts) -> None:
        """Create or replace the object."""
        self._objects[key] = joined(parts)

    def get(self, key: str) -> bytes:
        """Return the object's bytes."""
        try:
            return self._objects[key]
        except KeyError:
            raise FileNotFoundError(key) from None

    def get_range(self, key: str, start: int, stop: int | None) -> bytes:
        """Return part of the object's bytes."""
        return self.get(key)[start:stop]

    def size(self, key: str) -> int | None:
        """Return the object's size."""
        data = self._objects.get(key)
        return None if data is None else len(data)

    def list(self, prefix: str, *, recursive: bool = False) -> Mapping[str, int]:
        """Return key to size of the objects in a folder."""
        folder = f"{prefix}/" if prefix else ""
        with self._lock:
            found = {
                key: len(data)
                for key, data in self._objects.items()
                if key.startswith(folder)
            }
        if recursive:
            return found
        return {k: n for k, n in found.items() if "/" not in k[len(folder) :]}

    def delete(self, key: str) -> None:
        """Delete the object if it is there."""
        self._objects.pop(key, None)

    def sweep(self) -> None:
        """Nothing is ever half done here."""

    def prune(self) -> None:
        """There are no folders here."""


def missing_object(objects: ObjectStore, key: str) -> StoreError:
    """Return the error for an object that must exist and does not."""
    return StoreError(
        f"The object {key!r} of the store at {objects.url} is gone. Somebody removed "
        "it: restore it, or extract again into another place."
    )

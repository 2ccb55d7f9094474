"""What a library for remote stores must do, one request each, without retrying."""

from abc import ABC, abstractmethod
from collections.abc import Mapping


class RemoteClient(ABC):
    """Requests for objects under one root; errors are those of the library."""

    @abstractmethod
    def put(self, key: str, data: bytes, *, create: bool) -> None:
        """Put an object whole; with `create`, only if there is none."""

    @abstractmethod
    def get(self, key: str) -> bytes:
        """Return an object's bytes."""

    @abstractmethod
    def get_range(self, key: str, start: int, stop: int | None) -> bytes:
        """Return bytes [start, stop); a negative start counts from the end."""

    @abstractmethod
    def size(self, key: str) -> int | None:
        """Return an object's size, None for anything that is no object."""

    @abstractmethod
    def list(self, prefix: str, *, recursive: bool) -> Mapping[str, int]:
        """Return key to size of the objects in a folder, never from a cache."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Delete an object."""

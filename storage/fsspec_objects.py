"""Objects on any fsspec file system: memory://, s3://, gs:// and others."""

import contextlib
from collections.abc import Mapping
from typing import Any, final

import fsspec

from torchlens.errors import StoreError

from .objects import ObjectStore, Parts, joined


@final
class FsspecObjects(ObjectStore):
    """Objects below a URL; each put is one whole-object request."""

    def __init__(self, url: str, storage_options: Mapping[str, Any]) -> None:
        self._url = url.rstrip("/")
        try:
            self._fs, root = fsspec.core.url_to_fs(self._url, **storage_options)
        except (ImportError, ValueError) as error:
            raise StoreError(
                f"No file system opens {url!r}: {error}. Install the package that "
                "serves this kind of URL, or use a local directory."
            ) from error
        self._root = root.rstrip("/")

    @property
    def url(self) -> str:
        """The URL as given."""
        return self._url

    def put_new(self, key: str, parts: Parts) -> bool:
        """Create the object; return False if there is one already."""
        try:
            self._fs.pipe_file(self._path(key), joined(parts), mode="create")
        except FileExistsError:
            return False
        return True

    def replace(self, key: str, parts: Parts) -> None:
        """Create or replace the object."""
        self._fs.pipe_file(self._path(key), joined(parts))

    def get(self, key: str) -> bytes:
        """Return the object's bytes."""
        return bytes(self._fs.cat_file(self._path(key)))

    def get_range(self, key: str, start: int, stop: int | None) -> bytes:
        """Return part of the object's bytes."""
        return bytes(self._fs.cat_file(self._path(key), start=start, end=stop))

    def size(self, key: str) -> int | None:
        """Return the object's size."""
        try:
            info = self._fs.info(self._path(key))
        except FileNotFoundError:
            return None
        return int(info["size"]) if info["type"] == "file" else None

    def list(self, prefix: str, *, recursive: bool = False) -> Mapping[str, int]:
        """Return key to size of the objects in a folder."""
        folder = self._path(prefix)
        # A cached listing would hide the blocks that others commit.
        self._fs.invalidate_cache(folder)
        depth = None if recursive else 1
        try:
            found = self._fs.find(folder, maxdepth=depth, detail=True)
        except FileNotFoundError:
            return {}
        start = len(self._root) + 1
        return {
            path[start:]: int(info["size"])
            for path, info in found.items()
            if info["type"] == "file" and path.startswith(f"{folder}/")
        }

    def delete(self, key: str) -> None:
        """Delete the object if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(key))

    def sweep(self) -> None:
        """Remote puts leave nothing half done."""

    def prune(self) -> None:
        """Folders are only prefixes here."""

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root

"""Requests through fsspec: memory://, s3:// by s3fs, gs://, az:// and others."""

from collections.abc import Mapping
from typing import Any, final

import fsspec

from torchlens.errors import StoreError

from .remote_client import RemoteClient

_S3 = frozenset({"s3", "s3a"})
_AZURE = frozenset({"abfs", "abfss", "adl", "az"})
# One PUT for objects of any size we make: uploads in parts leave parts behind when
# their writer dies.  Five GiB is the most that S3 takes at once.
_ONE_PUT_BYTES = 5 << 30


@final
class FsspecClient(RemoteClient):
    """A fsspec file system of this process's own, never shared or cached."""

    def __init__(self, url: str, storage_options: Mapping[str, Any]) -> None:
        protocol = url.split("://", 1)[0]
        options = dict(storage_options)
        if protocol in _S3:
            # Whoever calls retries, with one policy for every client.
            config = {"retries": {"total_max_attempts": 1}}
            options["config_kwargs"] = config | dict(options.get("config_kwargs", {}))
            # More than 1 asks for the size before each read.
            options.setdefault("max_concurrency", 1)
        if "::" not in url:
            options |= {"skip_instance_cache": True, "use_listings_cache": False}
        try:
            self._fs, root = fsspec.core.url_to_fs(url, **options)
        except (ImportError, ValueError) as error:
            raise StoreError(
                f"No file system opens {url!r}: {error}. Install the package that "
                "serves this kind of URL, or use a local directory."
            ) from error
        self._root = root.rstrip("/")
        self._put_options = {"chunksize": _ONE_PUT_BYTES} if protocol in _S3 else {}
        self._create_options = (
            {"overwrite": False} if protocol in _AZURE else {"mode": "create"}
        )
        if protocol in _S3:
            self._fs.retries = 1

    def put(self, key: str, data: bytes, *, create: bool) -> None:
        """Put an object by one request."""
        options = self._create_options if create else {}
        self._fs.pipe_file(self._path(key), data, **self._put_options, **options)

    def get(self, key: str) -> bytes:
        """Return an object's bytes."""
        return bytes(self._fs.cat_file(self._path(key)))

    def get_range(self, key: str, start: int, stop: int | None) -> bytes:
        """Return part of an object's bytes."""
        return bytes(self._fs.cat_file(self._path(key), start=start, end=stop))

    def size(self, key: str) -> int | None:
        """Return an object's size."""
        info = self._fs.info(self._path(key))
        return int(info["size"]) if info["type"] == "file" else None

    def list(self, prefix: str, *, recursive: bool) -> Mapping[str, int]:
        """Return key to size of the objects in a folder."""
        folder = self._path(prefix)
        # A cached listing would hide the blocks that others commit.
        self._fs.invalidate_cache(folder)
        if recursive:
            found = self._fs.find(folder, detail=True).values()
        else:
            found = self._fs.ls(folder, detail=True)
        start = len(self._root) + 1
        return {
            info["name"][start:]: int(info["size"])
            for info in found
            if info["type"] == "file" and info["name"].startswith(f"{folder}/")
        }

    def delete(self, key: str) -> None:
        """Delete an object."""
        self._fs.rm_file(self._path(key))

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root

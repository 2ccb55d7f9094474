"""Requests to S3 through obstore, where it is installed and can be configured."""

import os
from collections.abc import Mapping
from datetime import timedelta
from importlib.util import find_spec
from typing import Any, final

from torchlens.errors import StoreError

from .remote_client import RemoteClient

# Options in the words of s3fs, and what obstore calls them.
_OPTIONS = {
    "key": "access_key_id",
    "secret": "secret_access_key",
    "token": "session_token",
    "anon": "skip_signature",
    "endpoint_url": "endpoint",
    "region_name": "region",
}
# obstore reads neither profiles nor these.
_ONLY_S3FS = ("AWS_PROFILE", "AWS_ENDPOINT_URL_S3")
_CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
# The threads behind obstore do not survive a fork, and it would wait for them for ever.
# Which process started them is a fact of the process, so it is kept for the process.
_started_in: list[int] = []


def obstore_fits(url: str, storage_options: Mapping[str, Any]) -> bool:
    """Return whether obstore is installed and these options mean the same to it."""
    if not url.startswith("s3://") or find_spec("obstore") is None:
        return False
    if any(os.environ.get(name) for name in _ONLY_S3FS):
        return False
    options = _flat(storage_options)
    if set(options) - set(_OPTIONS):
        return False
    if options.get("anon") or {"key", "secret"} <= set(options):
        return True
    return all(os.environ.get(name) for name in _CREDENTIALS)


def survived_fork() -> bool:
    """Return whether obstore can be used in this process."""
    return not _started_in or _started_in[0] == os.getpid()


@final
class ObstoreClient(RemoteClient):
    """An obstore store; each put is one request, never an upload in parts."""

    def __init__(self, url: str, storage_options: Mapping[str, Any]) -> None:
        try:
            import obstore
            import obstore.exceptions
            from obstore.store import S3Store
        except ImportError as error:
            raise StoreError(
                f"{url} was to be opened with obstore, which is not installed. "
                "Install it, or leave out client='obstore'."
            ) from error
        options = _flat(storage_options)
        unknown = sorted(set(options) - set(_OPTIONS))
        if unknown:
            raise StoreError(
                f"The storage options {unknown} mean nothing to obstore. Leave out "
                "client='obstore', or give only "
                f"{', '.join(sorted(_OPTIONS))}."
            )
        endpoint = options.get("endpoint_url") or os.environ.get("AWS_ENDPOINT_URL")
        bucket, _, prefix = url.removeprefix("s3://").partition("/")
        config = {_OPTIONS[name]: value for name, value in options.items()}
        if endpoint:
            config["endpoint"] = endpoint
        config.setdefault("region", os.environ.get("AWS_REGION", "us-east-1"))
        self._api: Any = obstore
        # Whoever calls retries, with one policy for every client.
        try:
            self._store: Any = S3Store(
                bucket,
                prefix=prefix or None,
                client_options={"allow_http": True},
                retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=60)},
                **config,
            )
        except obstore.exceptions.BaseError as error:
            raise StoreError(
                f"obstore cannot open {url}: {str(error).splitlines()[0]}. Correct the "
                "storage options or the environment, or use client='s3fs'."
            ) from error
        if not _started_in:
            _started_in.append(os.getpid())

    def put(self, key: str, data: bytes, *, create: bool) -> None:
        """Put an object by one request."""
        mode = "create" if create else "overwrite"
        self._api.put(self._store, key, data, mode=mode, use_multipart=False)

    def get(self, key: str) -> bytes:
        """Return an object's bytes."""
        return bytes(self._api.get(self._store, key).bytes())

    def get_range(self, key: str, start: int, stop: int | None) -> bytes:
        """Return part of an object's bytes."""
        if stop is not None and start >= stop >= 0:
            return b""
        wanted = {"suffix": -start} if start < 0 else {"offset": start}
        try:
            if start < 0 or stop is None:
                options = {"range": wanted}
                return bytes(self._api.get(self._store, key, options=options).bytes())
            return bytes(self._api.get_range(self._store, key, start=start, end=stop))
        except self._api.exceptions.GenericError as error:
            if "non-partial response" not in str(error):
                raise
            # The server answers with all of the object; obstore does not cut that.
            return self.get(key)[start:stop]

    def size(self, key: str) -> int | None:
        """Return an object's size."""
        return int(self._api.head(self._store, key)["size"])

    def list(self, prefix: str, *, recursive: bool) -> Mapping[str, int]:
        """Return key to size of the objects in a folder."""
        if recursive:
            pages = self._api.list(self._store, prefix or None)
            found = [entry for page in pages for entry in page]
        else:
            found = self._api.list_with_delimiter(self._store, prefix or None)[
                "objects"
            ]
        return {entry["path"]: int(entry["size"]) for entry in found}

    def delete(self, key: str) -> None:
        """Delete an object."""
        self._api.delete(self._store, key)


def _flat(storage_options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with those of `client_kwargs` beside the others."""
    options = {k: v for k, v in storage_options.items() if k != "client_kwargs"}
    return {**options, **(storage_options.get("client_kwargs") or {})}

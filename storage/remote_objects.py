"""Objects at a URL: one request each, retried where that helps, safe under fork."""

import contextlib
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, final

from torchlens.errors import StoreError

from .fsspec_client import FsspecClient
from .objects import ObjectStore, Parts, joined
from .remote_client import RemoteClient
from .retries import Patience, persist

T = TypeVar("T")

_CLIENTS = ("auto", "s3fs", "obstore")
_PASSWORD = re.compile(r"(?<=://)[^/@]*@")


@final
class RemoteObjects(ObjectStore):
    """Objects below a URL that fsspec, or for S3 obstore, can open.

    Options reach the client and nothing else: no object, message or URL holds them.
    The option `client` chooses between "s3fs" and "obstore" for S3; "auto" takes
    obstore where it is installed and all it needs is in the options or environment.
    """

    def __init__(
        self,
        url: str,
        storage_options: Mapping[str, Any] | None = None,
        *,
        patience: Patience | None = None,
        conditional: bool = True,
    ) -> None:
        self._address = url.rstrip("/")
        self._options = dict(storage_options or {})
        self._patience = patience or Patience()
        self._conditional = conditional
        # A forked child makes its own client, and must not even forget its parent's:
        # collecting it would close connections that the parent still uses.
        self._clients: dict[int, RemoteClient] = {}
        self._client()

    @property
    def url(self) -> str:
        """The URL as given, without a password."""
        return _PASSWORD.sub("", self._address)

    def put_new(self, key: str, parts: Parts) -> bool:
        """Create the object; return False if there is one already.

        False may also mean that an earlier try of this very call created it and its
        answer was lost; so callers compare what is there with what they wanted.
        """
        data = joined(parts)
        if not self._conditional:
            if self.size(key) is not None:
                return False
            self.replace(key, [data])
            return True
        try:
            self._do("write", key, lambda client: client.put(key, data, create=True))
        except FileExistsError:
            return False
        except FileNotFoundError as error:
            raise self._nowhere(key) from error
        return True

    def give_up_conditions(self) -> None:
        """Put without the condition from now on, looking first."""
        self._conditional = False

    def replace(self, key: str, parts: Parts) -> None:
        """Create or replace the object."""
        data = joined(parts)
        try:
            self._do("write", key, lambda client: client.put(key, data, create=False))
        except FileNotFoundError as error:
            raise self._nowhere(key) from error

    def get(self, key: str) -> bytes:
        """Return the object's bytes."""
        return self._do("read", key, lambda client: client.get(key))

    def get_range(self, key: str, start: int, stop: int | None) -> bytes:
        """Return part of the object's bytes."""
        try:
            return self._do(
                "read", key, lambda client: client.get_range(key, start, stop)
            )
        except EOFError:
            return b""

    def size(self, key: str) -> int | None:
        """Return the object's size."""
        try:
            return self._do("look at", key, lambda client: client.size(key))
        except FileNotFoundError:
            return None

    def list(self, prefix: str, *, recursive: bool = False) -> Mapping[str, int]:
        """Return key to size of the objects in a folder."""
        try:
            return self._do(
                "list", prefix, lambda client: client.list(prefix, recursive=recursive)
            )
        except FileNotFoundError:
            return {}

    def delete(self, key: str) -> None:
        """Delete the object if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self._do("delete", key, lambda client: client.delete(key))

    def sweep(self) -> None:
        """Remote puts leave nothing half done."""

    def prune(self) -> None:
        """Folders are only prefixes here."""

    def __reduce__(self) -> tuple[Any, ...]:
        facts = (self._address, self._options, self._patience, self._conditional)
        return _again, facts

    def _do(self, verb: str, key: str, action: Callable[[RemoteClient], T]) -> T:
        where = f"{self.url}/{key}"
        return persist(lambda: action(self._client()), self._patience, verb, where)

    def _client(self) -> RemoteClient:
        process = os.getpid()
        client = self._clients.get(process)
        if client is None:
            client = self._clients[process] = self._make_client()
        return client

    def _make_client(self) -> RemoteClient:
        options = dict(self._options)
        choice = options.pop("client", "auto")
        if choice not in _CLIENTS:
            raise StoreError(
                f"The storage option client={choice!r} is none of {_CLIENTS}."
            )
        if choice != "s3fs":
            from .obstore_client import ObstoreClient, obstore_fits, survived_fork

            wanted = choice == "obstore" or obstore_fits(self._address, options)
            if wanted and survived_fork():
                return ObstoreClient(self._address, options)
        return FsspecClient(self._address, options)

    def _nowhere(self, key: str) -> StoreError:
        return StoreError(
            f"Cannot write {self.url}/{key}: the bucket or folder does not exist. "
            "Create it, or correct the URL."
        )


def _again(
    url: str, options: Mapping[str, Any], patience: Patience, conditional: bool
) -> RemoteObjects:
    """Unpickle: connections stay in their process."""
    return RemoteObjects(url, options, patience=patience, conditional=conditional)

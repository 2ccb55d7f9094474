"""Errors of remote clients, told apart without their libraries; pauses; GCS, Azure."""

import errno
import sys
from typing import Any
from uuid import uuid4

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from torchlens.errors import StoreError
from torchlens.storage import open_run, open_store
from torchlens.storage.failures import classify
from torchlens.storage.fsspec_client import FsspecClient
from torchlens.storage.remote_objects import RemoteObjects
from torchlens.storage.retries import Patience, persist


class ClientError(Exception):
    """As botocore's: the answer lies in an attribute."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(f"An error occurred ({code})")
        self.response = {
            "Error": {"Code": code},
            "ResponseMetadata": {"HTTPStatusCode": status},
        }


class HttpError(Exception):
    """As gcsfs's: a number."""

    def __init__(self, code: int) -> None:
        super().__init__("from Google")
        self.code = code


class HttpResponseError(Exception):
    """As Azure's: a number and a word."""

    def __init__(self, status_code: int, error_code: str) -> None:
        super().__init__("from Azure")
        self.status_code = status_code
        self.error_code = error_code


class ResourceExistsError(HttpResponseError):
    """As Azure's for a blob that is there."""


class ServiceRequestError(Exception):
    """As Azure's for a connection that broke."""


class NoCredentialsError(Exception):
    """As botocore's."""


class BaseError(Exception):
    """As obstore's base."""


class GenericError(BaseError):
    """As obstore's: words only."""


def wrapped(cause: Exception) -> OSError:
    """Return an error of s3fs that hides a client's."""
    error = OSError(errno.EINVAL, "bad")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileExistsError("x"), "exists"),
        (wrapped(ClientError(412, "PreconditionFailed")), "exists"),
        (HttpError(412), "exists"),
        (ResourceExistsError(409, "BlobAlreadyExists"), "exists"),
        (FileNotFoundError("x"), "absent"),
        (HttpError(404), "absent"),
        (HttpResponseError(404, "BlobNotFound"), "absent"),
        (wrapped(ClientError(416, "InvalidRange")), "empty"),
        (wrapped(ClientError(501, "NotImplemented")), "unsupported"),
        (NotImplementedError(), "unsupported"),
        (wrapped(ClientError(500, "InternalError")), "again"),
        (wrapped(ClientError(503, "SlowDown")), "again"),
        (wrapped(ClientError(400, "RequestTimeout")), "again"),
        (wrapped(ClientError(409, "ConditionalRequestConflict")), "again"),
        (HttpError(429), "again"),
        (HttpError(502), "again"),
        (HttpResponseError(503, "ServerBusy"), "again"),
        (ServiceRequestError("connection reset"), "again"),
        (TimeoutError(), "again"),
        (ConnectionResetError(errno.ECONNRESET, "reset"), "again"),
        (OSError(errno.EBUSY, "busy"), "again"),
        (GenericError("error sending request"), "again"),
        (GenericError("Server returned error status code: 503 Service Unav"), "again"),
        (GenericError("status: 400, body <Code>InvalidArgument</Code>"), "final"),
        (wrapped(ClientError(403, "AccessDenied")), "final"),
        (PermissionError(errno.EACCES, "no"), "final"),
        (HttpError(401), "final"),
        (wrapped(ClientError(404, "NoSuchBucket")), "final"),
        (wrapped(ClientError(400, "InvalidArgument")), "final"),
        (OSError(errno.ENOSPC, "No space left on device"), "final"),
        (NoCredentialsError("Unable to locate credentials"), "final"),
        (ValueError("ours"), None),
        (TypeError("ours"), None),
    ],
    ids=repr,
)
def test_failures_are_told_apart(error: Exception, kind: str | None) -> None:
    failure = classify(error)
    assert (failure.kind if failure else None) == kind


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (wrapped(ClientError(404, "NoSuchBucket")), "create it, or correct the URL"),
        (wrapped(ClientError(403, "AccessDenied")), "The credentials may not do this"),
        (wrapped(ClientError(403, "RequestTimeTooSkewed")), "This machine's clock is"),
        (NoCredentialsError("none"), "Give credentials by the client's usual env"),
        (OSError(errno.ENOSPC, "full"), "Make room, then run the same command again"),
        (OSError(errno.EDQUOT, "quota"), "The quota is used up; make room"),
        (OSError(errno.EROFS, "read-only"), "Its file system is read-only"),
        (OSError(errno.ENAMETOOLONG, "long"), "Choose a place with a shorter path"),
    ],
    ids=repr,
)
def test_what_cannot_pass_is_told_at_once(error: Exception, remedy: str) -> None:
    tries = []

    def fail() -> None:
        tries.append(1)
        raise error

    with pytest.raises(StoreError, match=remedy) as caught:
        persist(fail, Patience(), "write", "s3://bucket/key")
    assert "Cannot write s3://bucket/key: " in str(caught.value)
    assert len(tries) == 1
    assert caught.value.__cause__ is error


def test_what_may_pass_is_tried_again_with_growing_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)

    def fail() -> None:
        raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")

    with pytest.raises(
        StoreError, match="Connection reset by peer .*, 10 times. Run the same command"
    ):
        persist(fail, Patience(), "read", "s3://bucket/key")
    longest = [0.25, 0.5, 1, 2, 4, 8, 16, 20, 20]
    assert len(pauses) == 9
    assert all(top / 2 <= p <= top for p, top in zip(pauses, longest, strict=True))
    assert len({p / top for p, top in zip(pauses, longest, strict=True)}) > 1
    assert 30 < sum(pauses) < 90


def test_errors_that_are_ours_pass_through() -> None:
    def fail() -> None:
        raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        persist(fail, Patience(), "read", "x")


class StandIn(MemoryFileSystem):
    """Objects in memory under any kind of URL."""

    store: dict[str, Any] = {}
    pseudo_dirs = [""]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.split("://", 1)[-1].strip("/")


class AzureLike(StandIn):
    """Takes the condition as adlfs does, and refuses in Azure's words."""

    protocol = "az"
    options_seen: list[dict[str, Any]] = []

    def pipe_file(
        self, path: str, value: bytes, overwrite: bool = True, **kwargs: Any
    ) -> None:
        """Put a blob."""
        self.options_seen.append({"overwrite": overwrite, **kwargs})
        if not overwrite and self.exists(path):
            raise ResourceExistsError(409, "BlobAlreadyExists")
        super().pipe_file(path, value)


class GoogleLike(StandIn):
    """Takes the condition as gcsfs does, and refuses with a number."""

    protocol = "gs"

    def pipe_file(
        self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any
    ) -> None:
        """Put an object."""
        if mode == "create" and self.exists(path):
            raise HttpError(412)
        super().pipe_file(path, value, mode="overwrite")


class Careless(StandIn):
    """Knows no condition and says so."""

    protocol = "careless"

    def pipe_file(
        self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any
    ) -> None:
        """Put an object."""
        if mode == "create":
            raise NotImplementedError("exclusive mode")
        super().pipe_file(path, value)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the URLs of Google and Azure open stand-ins with their manners."""
    known = sys.modules["fsspec.registry"].__dict__["_registry"]
    for kind in (AzureLike, GoogleLike, Careless):
        monkeypatch.setitem(known, kind.protocol, kind)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("protocol", ["gs", "az"])
def test_google_and_azure_refuse_a_second_put_in_their_own_words(
    protocol: str, sample: Any
) -> None:
    place = f"{protocol}://bucket/{uuid4().hex}"
    spec = sample.make_spec(num_rows=20)
    writer = open_run(place, spec)  # a warning would fail the test
    sample.write_all(writer)
    other = open_run(place, spec)
    assert other.missing() == () and other.run_id == writer.run_id
    assert not other.objects.put_new("samples.parquet", [b"x"])
    assert open_store(place).verify(deep=True).ok


@pytest.mark.usefixtures("stand_ins")
def test_azure_is_asked_in_its_own_words() -> None:
    AzureLike.options_seen.clear()
    client = FsspecClient(f"az://bucket/{uuid4().hex}", {})
    client.put("a", b"1", create=True)
    client.put("a", b"2", create=False)
    assert AzureLike.options_seen == [{"overwrite": False}, {"overwrite": True}]
    assert client.get("a") == b"2"


@pytest.mark.usefixtures("stand_ins")
def test_a_file_system_without_conditions_is_looked_at_first(sample: Any) -> None:
    place = f"careless://{uuid4().hex}"
    with pytest.warns(UserWarning, match="run one writer at a time there"):
        writer = open_run(place, sample.make_spec(num_rows=20))
    assert writer.objects.put_new("x", [b"1"])
    assert not writer.objects.put_new("x", [b"2"])
    assert writer.objects.get("x") == b"1"
    sample.write_all(writer)
    assert open_store(place).verify(deep=True).ok


def test_a_password_in_a_url_is_not_shown() -> None:
    objects = RemoteObjects("memory://user:hunter2@host/x")
    assert objects.url == "memory://host/x"
    with pytest.raises(FileNotFoundError, match="^memory://host/x/a$"):
        objects.get("a")

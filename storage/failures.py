"""What went wrong with a place: whether trying again can help, and what to tell.

Clients of remote stores raise errors of their own libraries.  They are told apart by
HTTP status, error code and the names of their classes, so that none of those libraries
is imported here.
"""

import errno
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Kind: TypeAlias = Literal["exists", "absent", "empty", "unsupported", "again", "final"]

_AGAIN_CODES = {
    "ConditionalRequestConflict",
    "InternalError",
    "OperationAborted",
    "RequestTimeout",
    "ServerBusy",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
}
_AGAIN_STATUS = {408, 409, 425, 429}
_AGAIN_ERRNO = {
    errno.EAGAIN,
    errno.EBUSY,
    errno.ECONNABORTED,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.EPIPE,
    errno.ETIMEDOUT,
    getattr(errno, "EREMOTEIO", errno.EIO),
}
# Names of classes that stand for a broken or slow connection.
_AGAIN_NAMES = {
    "ClientConnectionError",
    "ClientPayloadError",
    "ConnectionError",
    "HTTPClientError",
    "IncompleteRead",
    "IncompleteReadError",
    "ResponseParserError",
    "ServiceRequestError",
    "ServiceResponseError",
    "Timeout",
    "TimeoutError",
    "TransportError",
}
_EXISTS_NAMES = {"AlreadyExistsError", "FileExistsError", "ResourceExistsError"}
_NO_BUCKET = {"ContainerNotFound", "InvalidBucketName", "NoSuchBucket"}
_NO_CREDENTIALS = {
    "CredentialRetrievalError",
    "DefaultCredentialsError",
    "NoAuthTokenError",
    "NoCredentialsError",
    "PartialCredentialsError",
    "TokenRetrievalError",
}
_LIBRARY_BASES = {
    "AzureError",
    "BaseError",
    "BotoCoreError",
    "ClientError",
    "HttpError",
}
_REFUSED_NAMES = {"PermissionDeniedError", "PermissionError", "UnauthenticatedError"}
_CODE_IN_TEXT = re.compile(r"<Code>(\w+)</Code>")
_STATUS_IN_TEXT = re.compile(r"status(?: code)?:? (\d{3})\b")

_REMEDIES = {
    errno.EACCES: "Change its permissions, or choose another place.",
    errno.EPERM: "Change its permissions, or choose another place.",
    errno.EROFS: "Its file system is read-only; choose another place.",
    errno.ENOSPC: "Make room, then run the same command again.",
    errno.EDQUOT: "The quota is used up; make room, then run the same again.",
    errno.EFBIG: "Files may not grow that large there (ulimit -f, or the file system); "
    "raise the limit, or choose another place.",
    errno.ENAMETOOLONG: "Choose a place with a shorter path.",
    errno.ENOTDIR: "A file lies where a folder is needed; choose another place.",
    errno.EMFILE: "Raise the limit of open files (ulimit -n).",
    errno.ENFILE: "The machine has too many open files; run again when it has fewer.",
}
_RUN_AGAIN = "Run the same command again when the cause is gone."


@dataclass(frozen=True, slots=True)
class Failure:
    """What an error means.

    Attributes:
        kind: "exists" and "absent" speak of the object, "empty" of a range past its
            end, "unsupported" of the condition on a put; "again" may pass by itself,
            "final" will not.
        reason: What happened, in words.
        remedy: What the user can do about it.
    """

    kind: Kind
    reason: str
    remedy: str = _RUN_AGAIN


def explain(error: OSError) -> tuple[str, str]:
    """Return what an error of the operating system says, and what to do about it."""
    reason = error.strerror or str(error) or type(error).__name__
    return reason, _REMEDIES.get(error.errno or 0, _RUN_AGAIN)


def classify(error: Exception) -> Failure | None:
    """Return what an error of a remote client means; None if it is none of theirs."""
    chain = tuple(_chain(error))
    names = {base.__name__ for link in chain for base in type(link).__mro__}
    status, code = _answer(chain)
    reason = _reason(error, status, code)
    if names & _EXISTS_NAMES or status == 412 or code == "PreconditionFailed":
        return Failure("exists", reason)
    if code in _NO_BUCKET:
        remedy = "There is no such bucket: create it, or correct the URL."
        return Failure("final", reason, remedy)
    if names & _NO_CREDENTIALS:
        remedy = (
            "Give credentials by the client's usual environment or configuration, or "
            "by storage_options."
        )
        return Failure("final", reason, remedy)
    if code == "RequestTimeTooSkewed":
        remedy = "This machine's clock is wrong: set it, then run the same again."
        return Failure("final", reason, remedy)
    if status in (401, 403) or names & _REFUSED_NAMES:
        remedy = (
            "The credentials may not do this there: they need to list, read, write "
            "and delete. Correct them or the bucket's policy, then run the same again."
        )
        return Failure("final", reason, remedy)
    if status == 416 or code == "InvalidRange":
        return Failure("empty", reason)
    if status == 501 or code == "NotImplemented" or names & {"NotImplementedError"}:
        return Failure("unsupported", reason)
    if status == 404 or names & {"FileNotFoundError", "NotFoundError"}:
        return Failure("absent", reason)
    return _passing(error, chain, names, status, code, reason)


def _passing(
    error: Exception,
    chain: tuple[BaseException, ...],
    names: set[str],
    status: int | None,
    code: str,
    reason: str,
) -> Failure | None:
    """Tell what may pass by itself from what will not."""
    numbers = {link.errno for link in chain if isinstance(link, OSError)}
    if names & _AGAIN_NAMES:
        # Before any status: the parser of a cut answer calls itself a 400.
        again = True
    elif code or (status or 0) >= 400:
        again = code in _AGAIN_CODES or status in _AGAIN_STATUS or (status or 0) >= 500
    else:
        # obstore calls whatever reached no answer "GenericError".
        again = "GenericError" in names or bool(numbers & _AGAIN_ERRNO)
    if again:
        return Failure("again", reason)
    if not isinstance(error, OSError) and not names & _LIBRARY_BASES:
        return None
    known = [_REMEDIES[number] for number in numbers if number in _REMEDIES]
    return Failure("final", reason, known[0] if known else _RUN_AGAIN)


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    for _ in range(10):
        if link is None:
            return
        yield link
        link = link.__cause__


def _answer(chain: tuple[BaseException, ...]) -> tuple[int | None, str]:
    """Return the HTTP status and error code that a client's error carries."""
    for link in chain:
        response: Any = getattr(link, "response", None)
        if isinstance(response, dict):
            code = str(response.get("Error", {}).get("Code", ""))
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            if status is None and code.isdigit():
                status = int(code)
            return status, code
        for name in ("status_code", "status", "code"):
            value: Any = getattr(link, name, None)
            if isinstance(value, int) and 100 <= value < 600:
                return value, str(getattr(link, "error_code", "") or "")
    text = str(chain[0])
    found, code_found = _STATUS_IN_TEXT.search(text), _CODE_IN_TEXT.search(text)
    return int(found[1]) if found else None, code_found[1] if code_found else ""


def _reason(error: Exception, status: int | None, code: str) -> str:
    lines = str(error).strip().splitlines()
    text = (lines[0] if lines else type(error).__name__)[:300].rstrip(".")
    facts = " ".join(filter(None, [str(status or ""), code]))
    return f"{text} ({facts})" if facts else f"{text} ({type(error).__name__})"

"""Objects as files of a local or mounted directory, each created whole by a link."""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import final
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from torchlens.errors import StoreError

from .failures import explain
from .objects import ObjectStore, Parts

# Temporary files lie here and not beside their object, so that whatever a dead writer
# leaves is outside the data; a link needs only the same file system.
_SCRATCH = "_run/tmp"
_STALE_SECONDS = 3600.0
_NO_LINKS = {
    errno.EPERM,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.EXDEV,
    errno.EMLINK,
}
_MAX_PARTS = min(1024, os.sysconf("SC_IOV_MAX")) if hasattr(os, "sysconf") else 16


@final
class LocalObjects(ObjectStore):
    """Files under a directory, which is made when the first object is put."""

    def __init__(self, root: str | os.PathLike[str], *, fsync: bool = False) -> None:
        self._root = Path(os.path.abspath(os.path.expanduser(root)))
        self._fsync = fsync
        self._links = True
        self._begun = False
        # os.path: a place that may not even be looked at is not an error here.
        if os.path.exists(self._root) and not os.path.isdir(self._root):
            raise StoreError(
                f"{self._root} is a file; a store is a directory. Choose another place."
            )

    @property
    def url(self) -> str:
        """The directory's absolute path."""
        return str(self._root)

    def put_new(self, key: str, parts: Parts) -> bool:
        """Create the file whole; return False if there is one already."""
        path = self._root / key
        with self._explained("write", path):
            if path.exists():
                return False
            scratch = self._write_scratch(parts)
            try:
                created = self._publish(scratch, path)
            finally:
                scratch.unlink(missing_ok=True)
            if created and self._fsync:
                _sync_directory(path.parent)
            return created

    def give_up_conditions(self) -> None:
        """Puts find another way by themselves, see `_publish`."""

    def replace(self, key: str, parts: Parts) -> None:
        """Create or replace the file at once."""
        path = self._root / key
        with self._explained("write", path):
            scratch = self._write_scratch(parts)
            path.parent.mkdir(parents=True, exist_ok=True)
            os.replace(scratch, path)
            if self._fsync:
                _sync_directory(path.parent)

    def get(self, key: str) -> bytes:
        """Return the file's bytes."""
        return self.get_range(key, 0, None)

    def get_range(self, key: str, start: int, stop: int | None) -> bytes:
        """Return part of the file's bytes."""
        path = self._root / key
        with self._explained("read", path), open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            begin, end, _ = slice(start, stop).indices(size)
            file.seek(begin)
            return file.read(max(0, end - begin))

    def size(self, key: str) -> int | None:
        """Return the file's size."""
        path = self._root / key
        try:
            facts = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return facts.st_size if stat.S_ISREG(facts.st_mode) else None

    def list(self, prefix: str, *, recursive: bool = False) -> Mapping[str, int]:
        """Return key to size of the files in a folder."""
        path = self._root / prefix if prefix else self._root
        with self._explained("list", path):
            return dict(_scan(path, f"{prefix}/" if prefix else "", recursive))

    def delete(self, key: str) -> None:
        """Delete the file if it is there."""
        path = self._root / key
        with self._explained("delete", path):
            path.unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove temporary files that no living writer can still be filling."""
        with contextlib.suppress(OSError, StoreError):
            # The file system's own clock: this machine's may be wrong, and the file of
            # a living writer would look old.
            mark = self._write_scratch([])
            now = mark.stat().st_mtime
            mark.unlink()
            for entry in os.scandir(self._root / _SCRATCH):
                if now - entry.stat().st_mtime > _STALE_SECONDS:
                    os.unlink(entry)

    def prune(self) -> None:
        """Remove folders that deletion left empty, the root excepted."""
        for folder, _, _ in os.walk(self._root, topdown=False):
            if Path(folder) != self._root:
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
        self._begun = False

    def local_path(self, key: str) -> str | None:
        """Return the file behind a key."""
        return str(self._root / key)

    def _write_scratch(self, parts: Parts) -> Path:
        scratch = self._root / _SCRATCH / f"{os.getpid()}-{uuid4().hex}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        begun = self._begun  # read first: another thread may be making the folder now
        try:
            descriptor = os.open(scratch, flags, 0o666)
        except FileNotFoundError:
            if begun:
                raise  # somebody took the store away; a new one would hide that
            scratch.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(scratch, flags, 0o666)
        self._begun = True
        try:
            _write_all(descriptor, parts)
            if self._fsync:
                os.fsync(descriptor)
        except BaseException:
            scratch.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        return scratch

    def _publish(self, scratch: Path, path: Path) -> bool:
        path.parent.mkdir(parents=True, exist_ok=True)
        if self._links:
            try:
                os.link(scratch, path)
            except FileExistsError:
                # On NFS a lost reply makes a link that was made look refused.
                return scratch.stat().st_nlink == 2
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                self._links = False
            else:
                return True
        # Without links: an empty file claims the name, then the whole one takes its
        # place.  A writer killed in between leaves the empty file, which readers treat
        # as damaged and the next writer replaces.
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        except FileExistsError:
            return False
        os.replace(scratch, path)
        return True

    @contextlib.contextmanager
    def _explained(self, verb: str, path: Path) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            if verb != "write":
                raise
            raise StoreError(
                f"Cannot write {path}: a folder on the way to it cannot be made or was "
                "removed. Check that the place is mounted and that nobody deletes from "
                "it, or choose another, then run the same command again."
            ) from None
        except StoreError:
            raise
        except OSError as error:
            reason, remedy = explain(error)
            raise StoreError(f"Cannot {verb} {path}: {reason}. {remedy}") from error


def _write_all(descriptor: int, parts: Parts) -> None:
    pending = [_bytes_of(part) for part in parts if len(part)]
    while pending:
        written = os.writev(descriptor, pending[:_MAX_PARTS])
        while pending and written >= len(pending[0]):
            written -= len(pending.pop(0))
        if written:
            pending[0] = pending[0][written:]


def _bytes_of(part: bytes | NDArray[np.uint8]) -> memoryview:
    return memoryview(part) if isinstance(part, bytes) else part.data


def _scan(path: Path, prefix: str, recursive: bool) -> Iterator[tuple[str, int]]:
    try:
        entries = os.scandir(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    with entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if recursive:
                    inner = f"{prefix}{entry.name}/"
                    yield from _scan(Path(entry.path), inner, True)
            elif entry.is_file():
                with contextlib.suppress(FileNotFoundError):
                    yield f"{prefix}{entry.name}", entry.stat().st_size


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""A place for copies: any file system that fsspec opens, from a folder to a bucket.

Nothing is assumed but that an object, once `put` has returned, is there under its name. Objects are
streamed: one of gigabytes takes no memory. `replace` is atomic in a folder (a rename) and in an
object store (a put). fsspec gives each back end's own exceptions, whatever their classes: all of
them become `TargetFailed`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from atoll.optim.log.store_errors import NotStored

PIECE_BYTES = 1 << 20  # read and written at once
ANSWER_S = 60.0  # for a small request: a target that takes longer counts as unreachable
CONNECT_S, READ_S = 20.0, 60.0  # deadlines inside s3fs, which would wait forever for some answers
FULL = "it is full"
BUCKETS = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "az", "oss", "memory"})
"""Protocols without folders, whose puts are atomic."""

T = TypeVar("T")


class CopiesError(ValueError):
    """Copies cannot be kept, or none can be restored."""


class TargetFailed(CopiesError):
    """The target cannot be read or written."""


class NotOurs(CopiesError):
    """The target holds copies of another run, or under another recovery key."""


class CopyDamaged(CopiesError):
    """An object is missing, or not what its manifest says."""


class Superseded(CopiesError):
    """The run was restored on another machine."""


@dataclass(frozen=True, kw_only=True)
class CopyObject:
    """An object of a copy, as its manifest names it."""

    what: str
    """Names the content: an object of the same content is not written again."""
    name: str
    """Relative to the target."""
    bytes: int
    sha256: str


class Target:
    """A folder of objects, named by paths relative to it."""

    def __init__(self, url: str) -> None:
        """Open a target; nothing is read or written.

        Raises:
            TargetFailed: no file system has that URL, or its package is not installed.
        """
        import fsspec

        self.url = url
        protocol = str(fsspec.core.split_protocol(url)[0] or "file")
        try:
            self._fs, root = fsspec.core.url_to_fs(url, **_options(protocol))
        except ImportError as error:
            extra = "atoll[s3]" if protocol in ("s3", "s3a") else "the package that it names"
            raise TargetFailed(f"{url}: {error}; install {extra}") from None
        except Exception as error:  # each back end has its own
            raise TargetFailed(f"{url}: {error}; pass a folder or a URL of fsspec") from None
        self._root = root.rstrip("/")
        self._has_folders = protocol not in BUCKETS

    def put(self, name: str, what: str, chunks: Iterable[bytes]) -> CopyObject:
        """Write a new object.

        Raises:
            TargetFailed: it cannot be written; what is there of it is deleted, if that works.
        """
        digest, length = hashlib.sha256(), 0

        def counted() -> Iterator[bytes]:
            nonlocal length
            for chunk in chunks:
                digest.update(chunk)
                length += len(chunk)
                yield chunk

        try:
            self._write(name, counted())
        except TargetFailed:
            with contextlib.suppress(TargetFailed):  # else a full disk fills up with parts of tries
                self.delete(name)
            raise
        return CopyObject(what=what, name=name, bytes=length, sha256=digest.hexdigest())

    def replace(self, name: str, data: bytes) -> None:
        """Write a small object, whole or not at all, over an older one. Raises TargetFailed."""
        if not self._has_folders:
            self._write(name, [data])
            return
        self._write(f"{name}.new", [data])
        with self._telling(name, "written"):
            self._fs.mv(self._path(f"{name}.new"), self._path(name))

    def read(self, name: str, max_bytes: int) -> bytes:
        """Read a small object.

        Raises:
            CopyDamaged: it is not there, or longer.
            TargetFailed: it cannot be read.
        """
        data = b"".join(self._read(name, max_bytes))
        if len(data) > max_bytes:
            raise CopyDamaged(f"{self.url}/{name}: expected at most {max_bytes} bytes")
        return data

    def stream(self, piece: CopyObject) -> Iterator[bytes]:
        """Yield an object in pieces of at most 1 MiB; its digest is checked at its end.

        Raises:
            CopyDamaged: it is not there, or not what its manifest says: what was yielded is no use.
            TargetFailed: it cannot be read.
        """
        digest, length = hashlib.sha256(), 0
        for chunk in self._read(piece.name, piece.bytes):
            digest.update(chunk)
            length += len(chunk)
            if length > piece.bytes:
                break
            yield chunk
        if length != piece.bytes:
            raise CopyDamaged(
                f"{self.url}/{piece.name}: expected {piece.bytes} bytes, got "
                f"{'more' if length > piece.bytes else length}"
            )
        if digest.hexdigest() != piece.sha256:
            raise CopyDamaged(
                f"{self.url}/{piece.name}: expected the SHA-256 {piece.sha256[:12]}, got "
                f"{digest.hexdigest()[:12]}"
            )

    def names(self, folder: str = "") -> list[str]:
        """Return the names in a folder, without its own; none if it is not there."""
        path = self._path(folder) if folder else self._root
        with self._telling(folder or ".", "listed"):
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(path, detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
        return sorted({str(each).rstrip("/").rpartition("/")[2] for each in found} - {""})

    def delete(self, name: str) -> None:
        """Delete an object; one that is not there is no failure. Raises TargetFailed."""
        with self._telling(name, "deleted"), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    def delete_folder(self, folder: str) -> None:
        """Delete a folder and all in it. Raises TargetFailed."""
        for name in self.names(folder):
            self.delete(f"{folder}/{name}")
        if self._has_folders:
            with self._telling(folder, "deleted"):
                self._fs.rmdir(self._path(folder))

    def expect_writable(self) -> None:
        """Write an object, read it back and delete it. Raises TargetFailed."""
        name, data = f"probe-{os.urandom(4).hex()}", os.urandom(16)
        self.put(name, "", [data])
        try:
            found = self.read(name, len(data))
        except CopyDamaged as error:
            raise TargetFailed(f"{error}; choose a target that can be read too") from None
        if found != data:
            raise TargetFailed(f"{self.url}: it does not return what was written there")
        self.delete(name)

    # inside

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _write(self, name: str, chunks: Iterable[bytes]) -> None:
        path = self._path(name)
        with self._telling(name, "written"):
            if self._has_folders:
                self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            with self._fs.open(path, "wb") as file:
                for chunk in chunks:
                    file.write(chunk)
                file.flush()
                _sync(file)

    def _read(self, name: str, max_bytes: int) -> Iterator[bytes]:
        """Yield an object in pieces, not much beyond a length."""
        with self._telling(name, "read"):
            try:
                file = self._fs.open(self._path(name), "rb")
            except FileNotFoundError:
                raise CopyDamaged(f"{self.url}/{name}: it is not there") from None
            with file:
                read = 0
                while read <= max_bytes and (chunk := bytes(file.read(PIECE_BYTES))):
                    read += len(chunk)
                    yield chunk

    @contextlib.contextmanager
    def _telling(self, name: str, done: str) -> Iterator[None]:
        try:
            yield
        except (CopiesError, GeneratorExit):
            raise
        except Exception as error:
            raise TargetFailed(f"{self.url}: {name} cannot be {done}: {reason(error)}") from error


def _options(protocol: str) -> dict[str, Any]:
    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    if protocol in ("s3", "s3a"):
        options["config_kwargs"] = {"connect_timeout": CONNECT_S, "read_timeout": READ_S}
    return options


def _sync(file: Any) -> None:  # noqa: ANN401  # a file of any back end
    """Put a file of a local folder on the disk; others have none of ours."""
    with contextlib.suppress(AttributeError, io.UnsupportedOperation):
        descriptor = file.fileno()
        if isinstance(descriptor, int):
            os.fsync(descriptor)


def reason(error: BaseException) -> str:
    """Return why a target failed, in a few words that name none of its paths."""
    match error:
        case TargetFailed() if error.__cause__ is not None:
            return reason(error.__cause__)
        case PermissionError():
            return "no permission"
        case FileNotFoundError() | NotADirectoryError():
            return "the folder or bucket is not there"
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return FULL
        case TimeoutError():
            return "it does not answer"
        case NotOurs():
            return "it holds the copies of another run"
        case NotStored():
            return "a part of the log to copy is damaged or gone"
        case _:
            return type(error).__name__


def is_full(error: TargetFailed) -> bool:
    """Return whether a target failed for want of room."""
    return reason(error) == FULL


def within(timeout_s: float, work: Callable[[], T]) -> T:
    """Return what `work` returns, in a thread that is left behind if it takes too long.

    Raises:
        TargetFailed: it does.
    """
    results: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put((work(), None))
        except BaseException as error:
            results.put((None, error))

    threading.Thread(target=run, name="copies", daemon=True).start()
    try:
        result, failure = results.get(timeout=timeout_s)
    except queue.Empty:
        raise TargetFailed(f"the target did not answer within {timeout_s:.0f} s") from None
    if failure is not None:
        raise failure
    return result  # type: ignore[return-value]

"""A store in a local directory, for one machine or a shared POSIX file system that honours ``flock`` and ``link``.

An object is a file; a parent part of its key is a directory, so ``a`` and ``a/b`` cannot both be objects here. It goes
with the last object in it.
Unfinished writes lie in ``.tmp`` below the root, are never listed, and are removed a day later if their writer
died.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import xxhash

from weight_store.errors import (
    FormatError,
    ObjectNotFound,
    ObjectTooLarge,
    PreconditionFailed,
    StoreError,
    StoreRefused,
    StoreUnavailable,
)
from weight_store.finishing import in_thread
from weight_store.local_errors import refusal, translated
from weight_store.object_keys import check_key_prefix, check_object_key
from weight_store.store import Blob, Entry

_TEMPORARY = ".tmp"
_STALE_AFTER_S = 86400.0
# Hashing whole shards to list a directory would read the bucket; nothing is ever replaced above this size.
_ETAG_LIMIT_BYTES = 8 * 2**20
_PLACINGS = 100
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a FIFO that somebody left there must not wait for its writer.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_LOCK = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITE_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class LocalStore:
    """Objects as files below ``root``, which is created if need be.

    A created object is written aside, synced and linked into place; a replaced one is compared and renamed under
    an exclusive ``flock``. Every path is walked with ``O_NOFOLLOW``: no symbolic link below the root is followed.
    """

    def __init__(self, root: str | os.PathLike[str], *, clock: Callable[[], float] = time.time) -> None:
        self._root = Path(root).absolute()
        self._clock = clock
        self._swept = False

    def __repr__(self) -> str:
        return f"LocalStore({str(self._root)!r})"

    async def get(self, key: str, *, max_bytes: int) -> Blob:
        """See :meth:`~weight_store.store.Store.get`."""
        return await in_thread(self._get, check_object_key(key), max_bytes)

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """See :meth:`~weight_store.store.Store.read_into`."""
        await in_thread(self._read_into, check_object_key(key), offset, buffer)

    async def create(self, key: str, data: bytes) -> str:
        """See :meth:`~weight_store.store.Store.create`."""
        return await in_thread(self._create, _check_key(key), data)

    async def replace(self, key: str, data: bytes, *, etag: str) -> str:
        """See :meth:`~weight_store.store.Store.replace`."""
        return await in_thread(self._replace, _check_key(key), data, etag)

    @asynccontextmanager
    async def upload(self, key: str) -> AsyncIterator[LocalUpload]:
        """See :meth:`~weight_store.store.Store.upload`."""
        _check_key(key)
        # Not in a thread: a task cancelled meanwhile would never learn what to close.
        temporary = Temporary(self._temporary_directory(), key)
        try:
            yield LocalUpload(self, key, temporary)
        finally:
            temporary.close()

    async def delete(self, key: str) -> None:
        """See :meth:`~weight_store.store.Store.delete`."""
        await in_thread(self._delete, _check_key(key))

    async def list(self, prefix: str) -> AsyncIterator[Entry]:
        """See :meth:`~weight_store.store.Store.list`. The ETag of an object above 8 MiB is empty here."""
        check_key_prefix(prefix)
        for key in await in_thread(self._keys, prefix):
            entry = await in_thread(self._entry, key)
            if entry is not None:
                yield entry

    async def close(self) -> None:
        """Do nothing: no descriptor outlives a call."""

    def place(self, key: str, temporary: Temporary) -> None:
        """Give a finished temporary file its name; ``PreconditionFailed`` if that is taken."""
        with translated(key, writing=True):
            temporary.sync()
            for left in reversed(range(_PLACINGS)):
                try:
                    self._link(key, temporary)
                    break
                except FileNotFoundError:  # whoever deleted the last object beside it took the directory away
                    if not left:
                        raise

    def _link(self, key: str, temporary: Temporary) -> None:
        with self._parent(key, create=True) as (directory, name):
            try:
                os.link(
                    temporary.name, name, src_dir_fd=temporary.directory, dst_dir_fd=directory, follow_symlinks=False
                )
            except FileExistsError:
                raise PreconditionFailed(f"object {key} exists already", key=key) from None
            os.fsync(directory)

    def _get(self, key: str, max_bytes: int) -> Blob:
        with self._opened(key) as (file, size):
            if size > max_bytes:
                raise ObjectTooLarge(f"object {key} has {size} bytes; at most {max_bytes} are allowed here")
            data = _read_exactly(file, key, 0, memoryview(bytearray(size)))
        return Blob(bytes(data), _etag(data))

    def _read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        with self._opened(key) as (file, size):
            end = offset + len(buffer)
            if offset < 0 or end > size:
                raise FormatError(f"object {key} ends at byte {size}, before the wanted {offset}..{end}")
            _read_exactly(file, key, offset, buffer)

    def _create(self, key: str, data: bytes) -> str:
        with contextlib.closing(Temporary(self._temporary_directory(), key)) as temporary:
            temporary.append(data)
            self.place(key, temporary)
        return _etag(data)

    def _replace(self, key: str, data: bytes, etag: str) -> str:
        with (
            self._locked(key),
            contextlib.closing(Temporary(self._temporary_directory(), key)) as temporary,
            translated(key, writing=True),
        ):
            if self._current_etag(key) != etag:
                raise PreconditionFailed(f"object {key} changed or is gone", key=key)
            temporary.append(data)
            temporary.sync()
            with self._parent(key, create=False) as (directory, name):
                os.rename(temporary.name, name, src_dir_fd=temporary.directory, dst_dir_fd=directory)
                os.fsync(directory)
        return _etag(data)

    def _current_etag(self, key: str) -> str:
        try:
            with self._opened(key) as (file, size):
                return _etag(_read_exactly(file, key, 0, memoryview(bytearray(size))))
        except ObjectNotFound:
            return ""

    def _delete(self, key: str) -> None:
        # Under the lock, or a replace that has already compared would bring the object back.
        with (
            self._locked(key),
            translated(key, writing=True),
            contextlib.suppress(FileNotFoundError, NotADirectoryError),
        ):
            with self._parent(key, create=False) as (directory, name):
                os.unlink(name, dir_fd=directory)
                os.fsync(directory)
            self._prune(key)

    def _prune(self, key: str) -> None:
        """Remove the directories that the object was the last in, as a store without directories looks."""
        with contextlib.suppress(OSError):  # it is not empty, or gone
            while "/" in key:
                key = key.rpartition("/")[0]
                with self._parent(key, create=False) as (directory, name):
                    os.rmdir(name, dir_fd=directory)

    def _keys(self, prefix: str) -> Sequence[str]:
        found: list[str] = []
        # Only the directory that the prefix names in full is walked.
        start = self._root / prefix.rpartition("/")[0]
        with translated(prefix, writing=True):
            for directory, names, files in os.walk(start, followlinks=False, onerror=_raise_unless_gone):
                relative = os.path.relpath(directory, self._root)
                if relative == ".":
                    names[:] = [name for name in names if name != _TEMPORARY]
                below = "" if relative == "." else relative + "/"
                found.extend(
                    below + name
                    for name in files
                    if (below + name).startswith(prefix) and not os.path.islink(os.path.join(directory, name))
                )
        # S3 orders by UTF-8 bytes, which is the order of code points, which is how Python compares.
        return sorted(found)

    def _entry(self, key: str) -> Entry | None:
        try:
            with self._opened(key) as (file, size):
                etag = ""
                if size <= _ETAG_LIMIT_BYTES:
                    etag = _etag(_read_exactly(file, key, 0, memoryview(bytearray(size))))
                return Entry(key, size, etag, os.fstat(file).st_mtime)
        except ObjectNotFound:
            return None

    @contextmanager
    def _opened(self, key: str) -> Iterator[tuple[int, int]]:
        """Yield (descriptor, size in bytes) of an object."""
        with translated(key), self._parent(key, create=False) as (directory, name):
            file = os.open(name, _READ, dir_fd=directory)
            try:
                status = os.fstat(file)
                if not stat.S_ISREG(status.st_mode):
                    raise ObjectNotFound(f"no object {key}: it is a directory or a special file", key=key)
                yield file, status.st_size
            finally:
                os.close(file)

    @contextmanager
    def _parent(self, key: str, *, create: bool) -> Iterator[tuple[int, str]]:
        """Yield (descriptor of the directory that holds ``key``, file name), following no link below the root."""
        *parts, name = key.split("/")
        directory = self._open_root(create=create)
        try:
            for part in parts:
                if create:
                    _make_directory(part, directory)
                inner = os.open(part, _DIRECTORY, dir_fd=directory)
                os.close(directory)
                directory = inner
            yield directory, name
        finally:
            os.close(directory)

    def _open_root(self, *, create: bool) -> int:
        # The root itself may be reached over links: it is the user's choice, not a key's.
        if create:
            _make_root(self._root)
        return os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def _temporary_directory(self) -> int:
        """Open the directory of unfinished writes; the caller closes the descriptor."""
        try:
            root = self._open_root(create=True)
            try:
                _make_directory(_TEMPORARY, root)
                directory = os.open(_TEMPORARY, _DIRECTORY, dir_fd=root)
            finally:
                os.close(root)
        except OSError as error:
            raise refusal(error, f"the store's directory {self._root} cannot be made or written") from error
        if not self._swept:
            self._swept = True
            _remove_stale(directory, self._clock() - _STALE_AFTER_S)
        return directory

    @contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        with translated(key, writing=True):
            directory = self._temporary_directory()
            try:
                lock = os.open("lock", _LOCK, 0o600, dir_fd=directory)
            finally:
                os.close(directory)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
            finally:
                os.close(lock)


class LocalUpload:
    """An upload that is a file aside until it is committed."""

    def __init__(self, store: LocalStore, key: str, temporary: Temporary) -> None:
        self._store = store
        self._key = key
        self._temporary = temporary

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """See :meth:`~weight_store.store.Upload.write`."""
        await in_thread(self._temporary.append, data)

    async def commit(self) -> None:
        """See :meth:`~weight_store.store.Upload.commit`."""
        await in_thread(self._store.place, self._key, self._temporary)


class Temporary:
    """A file in ``.tmp`` that is removed unless the process dies; owns the ``directory`` descriptor given to it."""

    def __init__(self, directory: int, key: str) -> None:
        self.directory = directory
        self.name = uuid.uuid4().hex
        self._key = key
        try:
            with translated(key, writing=True):
                self._file = os.open(self.name, _WRITE_NEW, 0o644, dir_fd=directory)
        except StoreError:
            os.close(directory)
            raise
        self._open = True

    def append(self, data: bytes | bytearray | memoryview) -> None:
        """Write all of ``data`` at the end."""
        view = memoryview(data).cast("B")
        with translated(self._key, writing=True):
            while view:
                view = view[os.write(self._file, view) :]

    def sync(self) -> None:
        """Force the content to stable storage, before anything names it."""
        os.fsync(self._file)

    def close(self) -> None:
        """Remove the file's temporary name; what was linked elsewhere stays. Calling it twice is allowed."""
        if not self._open:
            return
        self._open = False
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.name, dir_fd=self.directory)
        os.close(self._file)
        os.close(self.directory)


def _check_key(key: str) -> str:
    check_object_key(key)
    if key.split("/", 1)[0] == _TEMPORARY:
        raise StoreRefused(f"the object key {key!r} is reserved for a local store's unfinished writes", key=key)
    return key


def _make_root(root: Path) -> None:
    """Make ``root`` and what is missing above it, each name as durable as those below."""
    if root.is_dir():
        return
    _make_root(root.parent)
    root.mkdir(exist_ok=True)
    parent = os.open(root.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)


def _make_directory(name: str, parent: int) -> None:
    try:
        os.mkdir(name, dir_fd=parent)
    except FileExistsError:
        return
    # The new name must survive a power cut, or an object synced below it would not.
    os.fsync(parent)


def _remove_stale(directory: int, before_s: float) -> None:
    for name in os.listdir(directory):
        with contextlib.suppress(OSError):
            if name != "lock" and os.stat(name, dir_fd=directory, follow_symlinks=False).st_mtime < before_s:
                os.unlink(name, dir_fd=directory)


def _read_exactly(file: int, key: str, offset: int, buffer: memoryview) -> memoryview:
    done = 0
    while done < len(buffer):
        count = os.preadv(file, [buffer[done:]], offset + done)
        if count == 0:
            raise StoreUnavailable(f"object {key} shrank while it was read: something else writes there", key=key)
        done += count
    return buffer


def _etag(data: bytes | memoryview) -> str:
    return f'"{xxhash.xxh3_128_hexdigest(data)}"'


def _raise_unless_gone(error: OSError) -> None:
    if error.errno not in {errno.ENOENT, errno.ENOTDIR}:
        raise error

"""The port through which every effect on the local file system passes, and the real disk behind it.

Crash safety is an argument about the order of these calls, so there is no other way to the disk: a simulated one, which
forgets what was not synced, can stand in its place. Errors of the operating system leave as
:class:`~rollout_agent.errors.DiskError`, with the path and what to do.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rollout_agent.errors import DiskError, DiskFailed
from rollout_agent.linux import Flock, copy_some, filesystem, open_lock, translated
from weight_store.records import Part

COPY_BYTES = 64 << 20
"""How much of a file is copied between two looks at what else there is to do."""
_VOLATILE = frozenset({"tmpfs", "ramfs"})
"""File systems whose content does not survive a reboot."""


_SECOND_NS = 10**9


class Stamp(Part):
    """What the file system tells of a file without its being read. Whoever writes to a file changes its stamp.

    Reading changes none of it. ``ctime_ns`` changes with owner, mode and links too, so a difference asks for a look
    at the content and says nothing about it. The device is left out: it may be another in a container.
    """

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int


class Appender(Protocol):
    """A file that grows at its end."""

    def write(self, data: bytes | memoryview) -> None:
        """Append all of ``data``."""

    def sync(self) -> None:
        """Force content and size to stable storage (``fdatasync``)."""

    def close(self) -> None:
        """Release the file. Calling it twice is allowed."""


class Mapped(Protocol):
    """A whole file in memory, shared with everybody who maps it."""

    @property
    def data(self) -> NDArray[np.uint8]:
        """The bytes of the file; writable if mapped so. Change them only inside :meth:`change`."""

    def change(self, apply: Callable[[], None]) -> None:
        """Run ``apply``, which stores into :attr:`data`. A crash may leave any part of its stores."""

    def in_place(self) -> bool:
        """Whether the path still leads to this file, at the size that was mapped: reading what was cut off kills."""

    def sync(self) -> None:
        """Force the content to stable storage (``fsync``)."""

    def close(self) -> None:
        """Release the file; views that are still in use keep their memory. Calling it twice is allowed."""


class Lock(Protocol):
    """A lock that is held until it is released, or its process and all that inherited :attr:`descriptor` have ended."""

    @property
    def descriptor(self) -> int | None:
        """The open file that carries it; None if no process can inherit it."""

    def in_place(self) -> bool:
        """Whether the path still leads to the locked file: else others lock another one."""

    def release(self) -> None:
        """Let go. Calling it twice is allowed."""


class Disk(Protocol):
    """A file system. Paths are absolute; names come from :mod:`rollout_agent.places` alone."""

    def boot_id(self) -> str:
        """Return an id of this boot: files written without a sync may be lost when it changes."""

    def is_volatile(self, path: Path) -> bool:
        """Whether what lies at ``path`` is gone after a reboot (tmpfs)."""

    def make_dir(self, path: Path) -> None:
        """Make a directory and its parents, durably; one that exists is left alone."""

    def names(self, path: Path) -> list[str]:
        """Names in a directory, sorted; empty if there is no such directory."""

    def size(self, path: Path) -> int | None:
        """Size of a regular file in bytes; None if there is none."""

    def stat(self, path: Path) -> Stamp | None:
        """Stamp of a regular file; None if there is none."""

    def mark(self, path: Path) -> Stamp | None:
        """Give a file a time of change that no write leaves by itself; its stamp, or None if there is no such file.

        Clocks of file systems are coarse: without this a write just after a look could leave the stamp as it was.
        """

    def read(self, path: Path, *, max_bytes: int) -> bytes | None:
        """Content of a file; None if there is none. ``DiskFailed`` if it is larger than ``max_bytes``."""

    def append(self, path: Path) -> Appender:
        """Start an empty file in place of whatever has that name."""

    def allocate(self, path: Path, size: int) -> None:
        """Make a file of ``size`` zero bytes with its blocks reserved, so that stores into a map cannot fail."""

    def copy(self, source: Path, target: Path, start: int, count: int) -> None:
        """Copy ``count`` bytes at ``start`` of a file over the same bytes of another, also between file systems.

        ``target`` is there already (:meth:`allocate`). Durable after the sync of a map of it.
        """

    def map(self, path: Path, *, writable: bool) -> Mapped:
        """Map a file that is not empty."""

    def rename(self, source: Path, target: Path) -> None:
        """Move within one file system, replacing ``target`` atomically; durable after :meth:`sync_dir` of both."""

    def remove(self, path: Path) -> None:
        """Remove a file; none there is success."""

    def remove_dir(self, path: Path) -> None:
        """Remove a directory and the files in it; none there is success."""

    def sync_dir(self, path: Path) -> None:
        """Force names created, moved or removed in a directory to stable storage."""

    def try_lock(self, path: Path, *, shared: bool) -> Lock | None:
        """Take an advisory lock (``flock``) at once or not at all; the lock's file is made if need be."""


def write_file(disk: Disk, path: Path, data: bytes | memoryview) -> None:
    """Replace ``path`` atomically and durably: temporary, sync, rename, sync of the directory."""
    temporary = path.with_name(path.name + ".tmp")
    file = disk.append(temporary)
    try:
        file.write(data)
        file.sync()
    except DiskError:
        disk.remove(temporary)
        raise
    finally:
        file.close()
    disk.rename(temporary, path)
    disk.sync_dir(path.parent)


def sync_file(disk: Disk, path: Path) -> None:
    """Force the content of a file that is not empty to stable storage."""
    mapped = disk.map(path, writable=True)
    try:
        mapped.sync()
    finally:
        mapped.close()


def copy_file(disk: Disk, source: Path, target: Path) -> Iterator[None]:
    """Copy a file's content over that of one of the same size, a piece at each step."""
    size = disk.size(target) or 0
    for start in range(0, size, COPY_BYTES):
        disk.copy(source, target, start, min(COPY_BYTES, size - start))
        yield


class LocalDisk:
    """The machine's own file systems (Linux)."""

    def boot_id(self) -> str:
        """See :meth:`Disk.boot_id`."""
        with translated(Path("/proc/sys/kernel/random/boot_id"), "read"):
            return Path("/proc/sys/kernel/random/boot_id").read_text().strip()

    def is_volatile(self, path: Path) -> bool:
        """See :meth:`Disk.is_volatile`."""
        with translated(path, "look at"):
            return filesystem(path) in _VOLATILE

    def make_dir(self, path: Path) -> None:
        """See :meth:`Disk.make_dir`."""
        with translated(path, "make"):
            missing = [p for p in (path, *path.parents) if not p.is_dir()]
            for directory in reversed(missing):
                directory.mkdir(exist_ok=True)
                self.sync_dir(directory.parent)

    def names(self, path: Path) -> list[str]:
        """See :meth:`Disk.names`."""
        with translated(path, "list"):
            try:
                return sorted(os.listdir(path))
            except FileNotFoundError:
                return []

    def size(self, path: Path) -> int | None:
        """See :meth:`Disk.size`."""
        with translated(path, "look at"):
            return path.stat().st_size if path.is_file() else None

    def stat(self, path: Path) -> Stamp | None:
        """See :meth:`Disk.stat`."""
        with translated(path, "look at"):
            try:
                found = path.stat()
            except FileNotFoundError:
                return None
        if not stat.S_ISREG(found.st_mode):
            return None
        times = {"mtime_ns": found.st_mtime_ns, "ctime_ns": found.st_ctime_ns}
        return Stamp(size=found.st_size, inode=found.st_ino, **times)

    def mark(self, path: Path) -> Stamp | None:
        """See :meth:`Disk.mark`."""
        found = self.stat(path)
        if found is not None:
            # Within the second before the last change: a time in the future confuses make and rsync.
            time_ns = found.ctime_ns - 1 - secrets.randbelow(_SECOND_NS)
            # Whoever may write a file but does not own it cannot choose its times; what is left is the clock's grain.
            with translated(path, "mark"), contextlib.suppress(PermissionError):
                os.utime(path, ns=(time_ns, time_ns))
        return self.stat(path)

    def read(self, path: Path, *, max_bytes: int) -> bytes | None:
        """See :meth:`Disk.read`."""
        with translated(path, "read"):
            try:
                with path.open("rb") as file:
                    data = file.read(max_bytes + 1)
            except FileNotFoundError:
                return None
        if len(data) > max_bytes:
            raise DiskFailed(f"{path} has more than {max_bytes} bytes, which no file of its kind has: remove it")
        return data

    def append(self, path: Path) -> Appender:
        """See :meth:`Disk.append`."""
        with translated(path, "make"):
            path.unlink(missing_ok=True)
            return _File(path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))

    def allocate(self, path: Path, size: int) -> None:
        """See :meth:`Disk.allocate`."""
        with translated(path, "make"):
            path.unlink(missing_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            try:
                if size:
                    os.posix_fallocate(file, 0, size)
            finally:
                os.close(file)

    def copy(self, source: Path, target: Path, start: int, count: int) -> None:
        """See :meth:`Disk.copy`."""
        with translated(target, "copy to"), source.open("rb") as old, target.open("r+b") as new:
            at, end = start, start + count
            while at < end:
                done = copy_some(old.fileno(), new.fileno(), at, end - at)
                if done == 0:
                    raise DiskFailed(f"{source} shrank while it was copied: something else writes there")
                at += done
            # Not for durability: gigabytes of unwritten pages would make the next commit wait for them.
            os.fdatasync(new.fileno())

    def map(self, path: Path, *, writable: bool) -> Mapped:
        """See :meth:`Disk.map`."""
        with translated(path, "map"):
            return _Map(path, writable)

    def rename(self, source: Path, target: Path) -> None:
        """See :meth:`Disk.rename`."""
        with translated(source, "rename"):
            if target.is_dir() and not target.is_symlink():
                raise DiskFailed(f"{target} is a directory, where a file of that name belongs: remove it")
            source.replace(target)

    def remove(self, path: Path) -> None:
        """See :meth:`Disk.remove`."""
        with translated(path, "remove"):
            path.unlink(missing_ok=True)

    def remove_dir(self, path: Path) -> None:
        """See :meth:`Disk.remove_dir`."""
        with translated(path, "remove"), contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)

    def sync_dir(self, path: Path) -> None:
        """See :meth:`Disk.sync_dir`."""
        with translated(path, "sync"):
            directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)

    def try_lock(self, path: Path, *, shared: bool) -> Lock | None:
        """See :meth:`Disk.try_lock`."""
        with translated(path, "lock"):
            file = open_lock(path)
            try:
                fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
                return None
            except OSError:
                os.close(file)
                raise
            return Flock(file, path)


class _File:
    def __init__(self, path: Path, file: int) -> None:
        self._path = path
        self._file: int | None = file

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        with translated(self._path, "write"):
            while view:
                view = view[os.write(self._descriptor, view) :]

    def sync(self) -> None:
        with translated(self._path, "sync"):
            os.fdatasync(self._descriptor)

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    @property
    def _descriptor(self) -> int:
        if self._file is None:
            raise DiskFailed(f"{self._path} is closed")
        return self._file


class _Map:
    def __init__(self, path: Path, writable: bool) -> None:
        self._path = path
        self._file = path.open("r+b" if writable else "rb")
        try:
            self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            self._file.close()
            raise DiskFailed(f"cannot map {path}: {error}") from None
        self._data: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    @property
    def data(self) -> NDArray[np.uint8]:
        return self._data

    def change(self, apply: Callable[[], None]) -> None:
        apply()

    def in_place(self) -> bool:
        with translated(self._path, "look at"):
            mapped = os.fstat(self._file.fileno())
            try:
                named = self._path.stat()
            except FileNotFoundError:
                return False
        return os.path.samestat(named, mapped) and mapped.st_size == len(self._data)

    def sync(self) -> None:
        # Linux counts pages stored to through a map as the file's dirty pages, so msync has nothing to add; and
        # mmap.flush would keep every other thread of this process waiting for the disk.
        with translated(self._path, "sync"):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._data = np.empty(0, np.uint8)
        # A view handed out keeps the map alive; the memory goes when the last view does.
        with contextlib.suppress(BufferError):
            self._map.close()
        self._file.close()

"""What is asked of Linux: errors in words, kinds of file systems, copies within the kernel, a heap that stays small."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollout_agent.errors import DiskError, DiskFailed, DiskFull

_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = 1 << 20


def give_back_large_blocks() -> None:
    """Make this process return every large block to the system when it is freed, where the C library is glibc.

    glibc raises its threshold to the largest block freed so far, up to 32 MiB, and from then on keeps such blocks in a
    heap for each thread: buffers of groups that are long gone then count twice and three times.
    """
    # Other C libraries have no such call; musl, for one, always gives large blocks back.
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def open_lock(path: Path) -> int:
    """Open the file of a lock, made if need be. Read-only will do: ``flock`` does not ask for more."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        # An engine that may only read the directory can still take a lock on what the agent made.
        if error.errno not in {errno.EACCES, errno.EPERM, errno.EROFS}:
            raise
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def filesystem(path: Path) -> str:
    """Type of the file system that ``path`` is or would be on; empty where that cannot be found out."""
    existing = os.path.realpath(next(p for p in (path, *path.parents) if p.exists()))
    best, kind = "", ""
    with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as mounts:
        for line in mounts:
            point, found = line.split()[1:3]
            point = point.replace("\\040", " ")
            inside = existing == point or existing.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best):
                best, kind = point, found
    return kind


@contextmanager
def translated(path: Path, doing: str) -> Iterator[None]:
    """Errors of the operating system leave the block as ``DiskError``, naming ``path`` and what to do."""
    try:
        yield
    except OSError as error:
        raise _classify(error, path, doing) from error


def _classify(error: OSError, path: Path, doing: str) -> DiskError:
    what = error.strerror or str(error)
    if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
        return DiskFull(f"cannot {doing} {path}: {what}; free space or raise the limit there; nothing was half applied")
    return DiskFailed(f"cannot {doing} {path}: {what}; check the disk and the permissions of the directory")


def copy_some(source: int, target: int, at: int, count: int) -> int:
    """Copy at most ``count`` bytes at ``at`` to the same place in another file; returns how many, 0 at the end."""
    try:
        return os.copy_file_range(source, target, count, at, at)
    except OSError as error:
        # Between file systems, tmpfs and disk above all, not every kernel can; nothing has been copied then.
        if error.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    os.lseek(target, at, os.SEEK_SET)
    return os.sendfile(target, source, at, count)


class Flock:
    """A lock held on an open file, until it is released or no process has that open any more."""

    def __init__(self, file: int, path: Path) -> None:
        self._file: int | None = file
        self._path = path

    @property
    def descriptor(self) -> int | None:
        """The open file."""
        return self._file

    def in_place(self) -> bool:
        """Whether the path still leads to the locked file."""
        with translated(self._path, "look at"):
            try:
                return self._file is not None and os.path.samestat(self._path.stat(), os.fstat(self._file))
            except FileNotFoundError:
                return False

    def release(self) -> None:
        """Let go. Calling it twice is allowed."""
        file, self._file = self._file, None
        if file is not None:
            # A process that inherited the open file would keep the lock beyond this.
            fcntl.flock(file, fcntl.LOCK_UN)
            os.close(file)

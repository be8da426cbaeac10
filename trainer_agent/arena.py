"""The shared memory of one rank: a directory in ``/dev/shm`` with two slots, the layout and a small state file.

The trainer makes the directory (mode 0700, unguessable name, files 0600) and holds a lock on it for as long as it
lives, so that whoever starts next can tell an arena that a crash left behind and removes it. Slots are allocated, not
only sized: a full ``/dev/shm`` is an error here and not a bus error in the middle of a copy.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from trainer_agent.errors import ArenaTooSmall
from trainer_agent.state import SLOTS

DEFAULT_ROOT = Path("/dev/shm")  # noqa: S108 - the kernel's shared memory; the directory made in it is private
MARGIN_BYTES = 16 << 20
"""Left free in ``/dev/shm``: offer, layout and state, and other users of it."""

SOCKET_PATH_BYTES = 107
"""The longest name of a socket (unix(7): 108 bytes with the NUL at its end)."""

_PREFIX = "weightcast-"


class Arena:
    """One rank's directory. ``create`` in the trainer, ``open`` in the sidecar."""

    def __init__(self, path: Path, lock_fd: int | None = None) -> None:
        self.path = path
        self._lock_fd = lock_fd

    def __repr__(self) -> str:
        return f"Arena({str(self.path)!r}, owned={self._lock_fd is not None})"

    @classmethod
    def create(cls, root: Path = DEFAULT_ROOT) -> Arena:
        """Make a new arena under ``root`` and hold its lock; remove those that crashed trainers left there."""
        remove_abandoned(root)
        name = f"{_PREFIX}{os.getuid()}-{secrets.token_hex(8)}"
        hidden = root / f".{name}"
        hidden.mkdir(mode=0o700)
        lock_fd = os.open(hidden / "lock", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock_fd, fcntl.LOCK_EX)
        # Renamed only once locked: an arena that can be found is never mistaken for an abandoned one.
        hidden.rename(root / name)
        return cls(root / name, lock_fd)

    @property
    def socket_path(self) -> Path:
        """Where the sidecar listens."""
        return self.path / "socket"

    def slot_path(self, slot: int) -> Path:
        """The file of a slot."""
        return self.path / f"slot{slot}"

    def write(self, name: str, data: bytes) -> None:
        """Replace a small file atomically: a reader, or a restart after a kill, finds the old or the new bytes."""
        temporary = self.path / f"{name}.{secrets.token_hex(4)}"
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                file.write(data)
            temporary.replace(self.path / name)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            if error.errno == errno.ENOSPC:
                raise ArenaTooSmall(f"{self.path.parent} is full: {len(data)} bytes for {name} do not fit") from None
            raise

    def read(self, name: str) -> bytes | None:
        """The bytes of a small file, or None."""
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None

    def allocate(self, name: str, nbytes: int) -> None:
        """Take ``nbytes`` of shared memory for a file; ``ArenaTooSmall`` names what is there and what is needed."""
        fd = os.open(self.path / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            os.unlink(self.path / name)
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            raise ArenaTooSmall(room_sentence(self.path.parent, free_bytes(self.path.parent), nbytes)) from None
        finally:
            os.close(fd)

    def allocate_slots(self, nbytes: int) -> None:
        """Take memory for both slots, ``nbytes`` each."""
        need = SLOTS * nbytes + MARGIN_BYTES
        free = free_bytes(self.path.parent)
        held = sum(self.slot_path(slot).stat().st_size for slot in range(SLOTS) if self.slot_path(slot).exists())
        if free + held < need:
            raise ArenaTooSmall(room_sentence(self.path.parent, free + held, need))
        for slot in range(SLOTS):
            self.allocate(f"slot{slot}", nbytes)

    def map(self, name: str) -> mmap.mmap:
        """Map a file, shared and writable."""
        fd = os.open(self.path / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return mmap.mmap(fd, 0)
        finally:
            os.close(fd)

    def discard(self, name: str) -> None:
        """Remove a file; one that is not there is fine."""
        with contextlib.suppress(FileNotFoundError):
            (self.path / name).unlink()

    def remove(self) -> None:
        """Remove the directory. Maps that are still open stay valid until they are closed."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


def free_bytes(root: Path) -> int:
    """Free space of the file system that holds ``root``."""
    found = os.statvfs(root)
    return found.f_bavail * found.f_frsize


def room_sentence(root: Path, free: int, need: int) -> str:
    """What to tell a user whose shared memory is too small."""
    return (
        f"{root} has {_mib(free)} MiB free; this rank needs {_mib(need)} MiB (two copies of its part of the weights). "
        "Enlarge it (mount -o remount,size=..., docker run --shm-size, a Kubernetes emptyDir with medium: Memory) "
        "or pass shm_dir with a larger tmpfs"
    )


def _mib(nbytes: int) -> int:
    return -(-nbytes // (1 << 20))


def remove_abandoned(root: Path) -> list[Path]:
    """Remove arenas of this user whose trainer is gone; returns those removed."""
    return [path for path in _arenas(root) if _remove_if_abandoned(path)]


def _arenas(root: Path) -> Iterator[Path]:
    uid = os.getuid()
    for path in root.glob(f"{_PREFIX}{uid}-*"):
        if path.is_dir() and not path.is_symlink() and path.stat().st_uid == uid:
            yield path


def _remove_if_abandoned(path: Path) -> bool:
    try:
        fd = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        shutil.rmtree(path, ignore_errors=True)
        return True
    finally:
        os.close(fd)

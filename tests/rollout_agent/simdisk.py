"""A simulated disk that counts every effect, can fail at any of them, and forgets at a power loss what was not synced.

Files are inodes; a directory maps names to inodes. Both exist twice: as the running system sees them, and as a power
loss would leave them: ``simvolume.py``.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np

from rollout_agent.disk import Stamp
from rollout_agent.errors import DiskFailed, DiskFull
from tests.rollout_agent.simvolume import PIECE, Inode, Volume, begin_of, change_names, parent_of


class Crash(BaseException):
    """The process or the machine ended here."""


class SimDisk:
    """The port over a :class:`Volume`. ``crash_at``: the number of the effect at which the process ends."""

    def __init__(self, volume: Volume, *, volatile: tuple[Path, ...] = (), seed: int = 0) -> None:
        self.volume = volume
        self.volatile = volatile
        self.random = random.Random(seed)
        self.effects = 0
        self.crash_at: int | None = None
        self.fail_sync_at: int | None = None
        self.full_at: int | None = None
        self.dead = False
        self.trace: list[str] = []
        self.forks: list[tuple[str, Volume]] | None = None
        """If a list: for every effect, what there would be if the process had ended in the middle of it."""

    def effect(self, what: str) -> bool:
        """Count one effect; True if the process ends in the middle of it: then do a part of it and call :meth:`end`."""
        if self.dead:
            raise Crash
        self.effects += 1
        self.trace.append(what)
        if self.effects == self.full_at:
            raise DiskFull(f"no space for {what}")
        if self.effects == self.crash_at:
            self.dead = True
            return True
        return self.forks is not None

    def end(self) -> None:
        """End here; or, while forks are made, note what is there and return to do the rest."""
        if self.dead or self.forks is None:
            raise Crash
        self.forks.append((self.trace[-1], self.volume.clone()))

    def alive(self) -> None:
        if self.dead:
            raise Crash

    def kill(self) -> SimDisk:
        """Another process on the same machine."""
        return SimDisk(self.volume, volatile=self.volatile, seed=self.random.randrange(1 << 30))

    def power_loss(self) -> SimDisk:
        """The machine after a reboot."""
        self.dead = True
        volume = self.volume
        names = dict(volume.durable_names)
        stopped: set[str] = set()
        for directories, changed in volume.pending:
            if directories & stopped or self.random.random() < 0.3:
                stopped |= directories
            else:
                change_names(names, changed)
        after = Volume(dirs=set(volume.dirs), boot=volume.boot + 1)
        copies: dict[int, Inode] = {}
        for path, inode in names.items():
            if not self.is_volatile(Path(path)):
                copies.setdefault(id(inode), self._torn(inode))
                after.names[path] = copies[id(inode)]
        after.durable_names = dict(after.names)
        # A directory is removed after its files: where one of those is back, so is the directory.
        after.dirs.update(map(parent_of, after.names))
        return SimDisk(after, volatile=self.volatile, seed=self.random.randrange(1 << 30))

    def _torn(self, inode: Inode) -> Inode:
        """Often all or nothing of what was not synced, else any pieces of it."""
        old, new = inode.durable, inode.reachable()
        luck = self.random.random()
        if luck < 0.6:
            data = old if luck < 0.3 else new
            return Inode(bytearray(data), data)
        size = self.random.choice([len(old), len(new)])
        old, new = old.ljust(size, b"\0")[:size], new.ljust(size, b"\0")[:size]
        data = b"".join(self.random.choice((old, new))[at : at + PIECE] for at in range(0, size, PIECE))
        return Inode(bytearray(data), data)

    # ---- the port

    def boot_id(self) -> str:
        return f"boot-{self.volume.boot}"

    def is_volatile(self, path: Path) -> bool:
        return any(path.is_relative_to(root) for root in self.volatile)

    def make_dir(self, path: Path) -> None:
        self.alive()
        if str(path) not in self.volume.dirs:
            self.volume.dirs.update(map(str, (path, *path.parents)))

    def names(self, path: Path) -> list[str]:
        self.alive()
        inside = begin_of(path)
        entries = (self.volume.names, self.volume.dirs)
        rests = [found[len(inside) :] for names in entries for found in names if found.startswith(inside)]
        return sorted(rest for rest in rests if rest and "/" not in rest)

    def size(self, path: Path) -> int | None:
        self.alive()
        inode = self.volume.names.get(str(path))
        return None if inode is None else len(inode.data)

    def stat(self, path: Path) -> Stamp | None:
        self.alive()
        inode = self.volume.names.get(str(path))
        time_ns = int(inode.written) if inode is not None else 0
        return inode and _stamp(len(inode.data), time_ns)

    def mark(self, path: Path) -> Stamp | None:
        self.alive()
        inode = self.volume.names.get(str(path))
        if inode is not None:
            inode.written = False
        return self.stat(path)

    def read(self, path: Path, *, max_bytes: int) -> bytes | None:
        self.alive()
        inode = self.volume.names.get(str(path))
        if inode is not None and len(inode.data) > max_bytes:
            raise DiskFailed("too large")
        return None if inode is None else bytes(inode.data)

    def append(self, path: Path) -> SimAppender:
        inode = Inode()
        self._change(f"create {path.name}", str(path), inode)
        return SimAppender(self, path, inode)

    def allocate(self, path: Path, size: int) -> None:
        inode = Inode(bytearray(size))
        self._change(f"allocate {path.name}", str(path), inode)

    def copy(self, source: Path, target: Path, start: int, count: int) -> None:
        for path in (source, target):
            if str(path) not in self.volume.names:
                raise DiskFailed(f"no {path}")
        old, new = self.volume.names[str(source)].data, self.volume.names[str(target)].data
        self.volume.names[str(target)].written = True
        self.volume.names[str(target)].stored(start, start + count)
        crashed = self.effect(f"copy to {target.name}")
        if crashed:
            end = start + self.random.randrange(count + 1)
            new[start:end] = old[start:end]
            self.end()
        new[start : start + count] = old[start : start + count]

    def map(self, path: Path, *, writable: bool) -> SimMap:
        self.alive()
        inode = self.volume.names.get(str(path))
        if inode is None:
            raise DiskFailed(f"no {path}")
        return SimMap(self, path, inode)

    def rename(self, source: Path, target: Path) -> None:
        inode = self.volume.names.get(str(source))
        if inode is None:
            raise DiskFailed(f"no {source}")
        old, new = str(source), str(target)
        self._rename_like(
            f"rename {source.name} -> {new}", frozenset((parent_of(old), parent_of(new))), {old: None, new: inode}
        )

    def remove(self, path: Path) -> None:
        self.alive()
        if str(path) in self.volume.names:
            self._change(f"remove {path.name}", str(path), None)

    def remove_dir(self, path: Path) -> None:
        for name in self.names(path):
            self.remove(path / name)
        self.volume.dirs.discard(str(path))

    def sync_dir(self, path: Path) -> None:
        if self.effect(f"sync dir {path.name}"):
            self.end()
        if self.effects == self.fail_sync_at:
            # Names are in a journal: what did not get there may yet, or the file system stops for good.
            raise DiskFailed(f"sync of {path} failed")
        kept, synced = [], str(path)
        for directories, changed in self.volume.pending:
            # A rename between two directories lasts once either of them is synced.
            if synced in directories:
                change_names(self.volume.durable_names, changed)
            else:
                kept.append((directories, changed))
        self.volume.pending = kept

    def try_lock(self, path: Path, *, shared: bool) -> SimLock:
        self.alive()
        return SimLock()

    def _change(self, what: str, path: str, inode: Inode | None) -> None:
        self._rename_like(what, frozenset((parent_of(path),)), {path: inode})

    def _rename_like(self, what: str, directories: frozenset[str], changed: dict[str, Inode | None]) -> None:
        for directory in directories:
            if directory not in self.volume.dirs:
                raise DiskFailed(f"no directory {directory}")
        crashed = self.effect(what)
        before = crashed and self.random.random() < 0.5
        if before:
            self.end()
        change_names(self.volume.names, changed)
        self.volume.pending.append((directories, changed))
        if crashed and not before:
            self.end()


@lru_cache(maxsize=1024)
def _stamp(size: int, time_ns: int) -> Stamp:
    # One inode for all: which of them were made in which order must not tell two crashes apart.
    return Stamp(size=size, mtime_ns=time_ns, ctime_ns=time_ns, inode=1)


class SimLock:
    descriptor = None

    def in_place(self) -> bool:
        return True

    def release(self) -> None:
        pass


class SimAppender:
    def __init__(self, disk: SimDisk, path: Path, inode: Inode) -> None:
        self.disk, self.path, self.inode = disk, path, inode

    def write(self, data: bytes | memoryview) -> None:
        raw, start = bytes(data), len(self.inode.data)
        self.inode.written = True
        self.inode.stored(start, start + len(raw))
        if self.disk.effect(f"write {self.path.name}"):
            self.inode.data += raw[: self.disk.random.randrange(len(raw) + 1)]
            self.disk.end()
        self.inode.data[start:] = raw

    def sync(self) -> None:
        _sync(self.disk, self.path, self.inode)

    def close(self) -> None:
        pass


class SimMap:
    def __init__(self, disk: SimDisk, path: Path, inode: Inode) -> None:
        self.disk, self.path, self.inode = disk, path, inode
        self.data = np.frombuffer(inode.data, np.uint8)

    def change(self, apply: Callable[[], None]) -> None:
        crashed = self.disk.effect(f"store {self.path.name}")
        self.inode.written = True
        if self.inode.lost:
            self._note_stores(apply)
        if crashed:
            before = self.data.copy()
            apply()
            undone = np.flatnonzero(self.data != before)
            undone = undone[np.random.default_rng(self.disk.random.randrange(1 << 30)).random(undone.size) < 0.5]
            self.data[undone] = before[undone]
            self.disk.end()
        apply()

    def _note_stores(self, apply: Callable[[], None]) -> None:
        """Which bytes are stored, also those that do not change: found by storing over other ones."""
        before = self.data.copy()
        self.data[:] = ~before
        apply()
        for at in np.flatnonzero(self.data != ~before).tolist():
            self.inode.stored(at, at + 1)
        self.data[:] = before

    def in_place(self) -> bool:
        return self.disk.volume.names.get(str(self.path)) is self.inode and len(self.inode.data) == len(self.data)

    def sync(self) -> None:
        _sync(self.disk, self.path, self.inode)

    def close(self) -> None:
        self.data = np.empty(0, np.uint8)


def _sync(disk: SimDisk, path: Path, inode: Inode) -> None:
    if disk.effect(f"sync {path.name}"):
        if disk.random.random() < 0.5:
            inode.durable = inode.reachable()
        disk.end()
    if disk.effects == disk.fail_sync_at:
        inode.lose(disk.random)
        raise DiskFailed(f"sync of {path} failed")
    inode.durable = inode.reachable()

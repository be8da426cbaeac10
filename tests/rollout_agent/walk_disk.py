"""What a walking replica stands on: a disk that watches what an engine reads, and a store that can break off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rollout_agent.disk import Stamp
from rollout_agent.errors import DiskFailed, DiskFull
from rollout_agent.places import Places
from tests.rollout_agent.crashing import MODEL
from tests.rollout_agent.simdisk import SimDisk, SimLock
from tests.rollout_agent.simvolume import Volume
from weight_store.errors import StoreUnavailable
from weight_store.memory import MemoryStore


@dataclass
class Inside:
    """An engine that went through the gate and loads."""

    polls: int
    """How often the agent finds the lock taken before the engine leaves."""
    stops_at: int | None
    """At which of these the agent is told to stop instead."""


class WalkLock(SimLock):
    def __init__(self, path: Path) -> None:
        self.path, self.removed = path, False

    def in_place(self) -> bool:
        return not self.removed


class WalkDisk(SimDisk):
    """Also sees whether what an engine reads stays as it is, knows who is inside the gate, and can be full."""

    gate_lock = Places.of(MODEL).gate_lock
    inside: Inside | None = None
    stop: Callable[[], None] = staticmethod(lambda: None)
    """Tells the agent to stop waiting."""
    told_to_stop = False
    still: dict[str, bytes] | None = None
    full_from: int | None = None
    """From this effect on there is no space for anything new."""
    fail_sync_from: int | None = None
    """The first sync from this effect on fails: of a file called ``fail_sync_of`` and more, or of a directory."""
    fail_sync_of = ""
    ends_after_failing: int | None = None
    """If a sync fails that way the process ends so many effects later."""
    locks: list[WalkLock] = []  # noqa: RUF012 - replaced, never changed
    """Those that an agent keeps."""
    faulted = False
    """Whether a fault was met since this was last set to False."""

    def effect(self, what: str) -> bool:
        self.look()
        if self.fail_sync_from is not None and self.effects + 1 >= self.fail_sync_from and self._fails(what):
            self.fail_sync_at, self.fail_sync_from = self.effects + 1, None
            if self.ends_after_failing is not None:
                self.crash_at = self.fail_sync_at + self.ends_after_failing
        if self.effects + 1 in (self.full_at, self.fail_sync_at):
            self.faulted = True
        if self._is_full and what.startswith(("create", "write", "allocate", "copy")):
            self.effects += 1
            self.trace.append(what)
            self.faulted = True
            raise DiskFull(f"no space for {what}")
        return super().effect(what)

    def _fails(self, what: str) -> bool:
        if self.fail_sync_of != "dir " and what.startswith("sync dir "):
            return False
        return what.startswith(f"sync {self.fail_sync_of}")

    def no_faults(self) -> None:
        """From now on everything works."""
        self.crash_at = self.full_at = self.fail_sync_at = self.full_from = None
        self.fail_sync_from = self.ends_after_failing = None
        self.fail_sync_of = ""
        self.faulted = self.told_to_stop = False

    def try_lock(self, path: Path, *, shared: bool) -> SimLock | None:  # type: ignore[override]
        self.alive()
        if str(path.parent) not in self.volume.dirs:
            raise DiskFailed(f"no directory {path.parent}")
        if path == self.gate_lock and not shared and self.inside is not None:
            self._poll(self.inside)
            return None
        lock = WalkLock(path)
        if path.name in ("agent.lock", "gate.told"):
            self.locks = [*self.locks, lock]
        return lock

    def _poll(self, inside: Inside) -> None:
        self.look()
        inside.polls -= 1
        if inside.polls == inside.stops_at:
            self.stop()
        if inside.polls <= 0:
            self.leaves()

    def leaves(self) -> None:
        """The engine that is inside has loaded."""
        self.look()
        self.inside = self.still = None

    def remove_tree(self, path: str, *, durably: bool = False) -> None:
        """``rm -rf``, by hand."""
        volume = self.volume
        for name in [name for name in volume.names if name == path or name.startswith(f"{path}/")]:
            volume.put(name, None)
        volume.dirs -= {name for name in volume.dirs if name == path or name.startswith(f"{path}/")}
        if durably:
            volume.durable_names, volume.pending = dict(volume.names), []
        for lock in self.locks:
            lock.removed |= f"{lock.path}/".startswith(f"{path}/")

    def mark(self, path: Path) -> Stamp | None:
        # Each mark is another one, as the times are that the real disk gives a file.
        super().mark(path)
        inode = self.volume.names.get(str(path))
        if inode is not None:
            inode.written = 2 + self.random.randrange(1 << 60)  # type: ignore[assignment]
        return self.stat(path)

    @property
    def _is_full(self) -> bool:
        return self.full_from is not None and self.effects + 1 >= self.full_from and not self.dead

    def look(self) -> None:
        if self.still is not None:
            found = engine_files(self.volume)
            changed = sorted(name for name in found.keys() | self.still if found.get(name) != self.still.get(name))
            last = self.trace[-1] if self.trace else "nothing"
            if changed:
                raise AssertionError(f"{changed} changed while an engine read them, after {last!r}")

    def after(self, kind: str) -> WalkDisk:
        """What the next agent finds after a ``kill`` or a ``power`` loss."""
        left = self.kill() if kind == "kill" else self.power_loss()
        disk = WalkDisk(left.volume, volatile=self.volatile, seed=self.random.randrange(1 << 30))
        disk.stop = self.stop
        if kind == "kill":
            disk.still, disk.inside = self.still, self.inside
        return disk

    def apart(self, seed: int) -> WalkDisk:
        """The same, to try something on that the walk does not go on from."""
        return WalkDisk(self.volume.clone(), volatile=self.volatile, seed=seed)


def engine_files(volume: Volume) -> dict[str, bytes]:
    """All that an engine could load."""
    return {name: bytes(inode.data) for name, inode in volume.files_in(MODEL).items()}


class Wire:
    """The store as the replica reaches it: counts what is read, and can break off."""

    def __init__(self, store: MemoryStore) -> None:
        self.store, self.read = store, 0
        self.left: int | None = None
        """Requests that are still answered; None: all of them."""

    def __getattr__(self, name: str) -> object:
        return getattr(self.store, name)

    async def get(self, key: str, *, max_bytes: int) -> object:
        self._one(key)
        return await self.store.get(key, max_bytes=max_bytes)

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self._one(key)
        self.read += len(buffer)
        await self.store.read_into(key, offset, buffer)

    def _one(self, key: str) -> None:
        if self.left is not None:
            if self.left <= 0:
                raise StoreUnavailable("broken off", key=key)
            self.left -= 1

"""What a walking replica stands on: a disk that watches what an engine reads, and a store that can break off."""

from __future__ import annotations

from pathlib import Path

from rollout_agent.disk import Stamp
from rollout_agent.errors import DiskFull
from tests.rollout_agent.crashing import MODEL
from tests.rollout_agent.simdisk import SimDisk, Volume
from weight_store.errors import StoreUnavailable
from weight_store.memory import MemoryStore


class WalkDisk(SimDisk):
    """Also sees whether what an engine was told to read stays as it is, and can be full for a while."""

    still: dict[str, bytes] | None = None
    full_from: int | None = None
    """From this effect on there is no space for anything new."""
    faulted = False
    """Whether a fault was met since this was last set to False."""

    def effect(self, what: str) -> bool:
        self.look()
        if self.effects + 1 in (self.full_at, self.fail_sync_at):
            self.faulted = True
        if self._is_full and what.startswith(("create", "write", "allocate", "copy")):
            self.effects += 1
            self.trace.append(what)
            self.faulted = True
            raise DiskFull(f"no space for {what}")
        return super().effect(what)

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
        disk.still = self.still if kind == "kill" else None
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

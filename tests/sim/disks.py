"""The simulated disk of an agent, and engines that look at its model directory at every moment they could."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from rollout_agent.disk import Stamp
from rollout_agent.errors import DamagedFiles
from rollout_agent.gate import Visitor, holds
from rollout_agent.places import Places
from rollout_agent.state import Whole
from tests.rollout_agent.simdisk import SimDisk, SimLock
from tests.rollout_agent.simvolume import Inode, Volume
from tests.rollout_agent.training import read_model
from tests.sim.errors import Violation

MODEL, STATE = Path("/model"), Path("/state")
PLACES = Places.of(MODEL)


class _GateLock(SimLock):
    def __init__(self, disk: ObservedDisk) -> None:
        self._disk = disk

    def release(self) -> None:
        self._disk.shut = False


class _AgentLock(SimLock):
    def __init__(self, disk: ObservedDisk, path: Path) -> None:
        self._held, self._path = disk.locks, path
        disk.locks.add(path)

    def in_place(self) -> bool:
        return self._path in self._held


class _DoubtLock(SimLock):
    def __init__(self, disk: ObservedDisk) -> None:
        self._disk = disk
        disk.doubts.add(self)

    def release(self) -> None:
        self._disk.doubts.discard(self)


class ObservedDisk(SimDisk):
    """Between any two effects an engine may begin to load, or read one more file of what it is loading.

    It enters through the gate, so the agent's exclusive lock waits for it: then it reads the rest at once.
    """

    def __init__(
        self,
        volume: Volume,
        *,
        check: Callable[[int, dict[str, bytes], dict[str, bytes]], None],
        chance: random.Random,
        volatile: tuple[Path, ...] = (),
    ) -> None:
        super().__init__(volume, volatile=volatile)
        self.random = chance
        self.check = check
        self.shut = False
        self.blind = False
        self.sound = True
        """False once an effect has failed: what the disk holds is then nobody's promise."""
        self.looks, self.reads = 0.2, 0.3
        self.doubts: set[_DoubtLock] = set()
        self.locks: set[Path] = set()
        """The agent's, as long as nobody removes their files."""
        self._visitor: Visitor | None = None
        """An engine that looks at the files first, once somebody has had his hands in them."""
        self._verify = False
        self.handled_s = -1e9
        self._load: tuple[int, list[str], dict[str, bytes]] | None = None

    def effect(self, what: str) -> bool:
        if not self.dead:
            self.look()
        return super().effect(what)

    def look(self, *, whole: bool = False) -> None:
        """Let an engine go on; ``whole``: load all there is to see, now."""
        if self.blind:
            return
        if self._load is None and not self.shut and (whole or self.random.random() < self.looks):
            mark = self.entered()
            if mark is not None:
                self._load = mark.position.version, self.weight_files(), {}
        if self._load is not None and (whole or self.random.random() < self.reads):
            self._read_on(1 if not whole else len(self._load[1]))

    def entered(self) -> Whole | None:
        """What the directory holds, if an engine that looks at it as the gate does gets in now."""
        if self.dead:
            return None  # between two processes of the agent: this disk is about to be replaced
        mark = holds(self, PLACES)
        if mark is None or self._visitor is None:
            return mark
        try:
            entered = self._visitor.enter()
        except DamagedFiles as error:
            raise Violation(str(error)) from None
        if entered is None:
            return None
        self._visitor.stop_asking()
        entered[0].release()
        return entered[1]

    def handled(self, now_s: float, *, silently: bool) -> None:
        """Somebody has his hands in the files: an engine that was reading them has no promise, and the next one looks.

        ``silently``: it reads them all, for nothing else would show.
        """
        self._load = None
        self.handled_s = now_s
        if self._visitor is not None:
            self._visitor.stop_asking()
        self._verify = self._verify or silently
        self._visitor = Visitor(self, PLACES, verify=self._verify)

    @property
    def distrusted(self) -> bool:
        """Whether engines look before they load: somebody had his hands in the files, lately or long ago."""
        return self._visitor is not None

    def weight_files(self) -> list[str]:
        """What an engine reads, by name in the model directory."""
        return [name for name in self.volume.files_in(MODEL) if name.endswith(".safetensors")]

    def inode(self, name: str) -> Inode | None:
        """A file of the model directory."""
        return self.volume.names.get(f"{MODEL}/{name}")

    def _read_on(self, files: int) -> None:
        if self._load is None:
            return
        version, left, found = self._load
        for name in left[:files]:
            inode = self.inode(name)
            if inode is None:
                raise Violation(f"{name} went away while an engine was loading version {version}")
            found[name] = bytes(inode.data)
        del left[:files]
        if not left:
            self._load = None
            beside = {
                name: bytes(inode.data) for name, inode in self.volume.files_in(MODEL).items() if name not in found
            }
            try:
                tensors = read_model(found)
            except ValueError as error:
                raise Violation(f"an engine cannot read the files of version {version}: {error}") from None
            self.check(version, tensors, beside)

    def mark(self, path: Path) -> Stamp | None:
        """As the real one does: a time that no file had before. Any write replaces it."""
        inode = self.volume.names.get(str(path))
        if inode is None:
            return super().mark(path)
        self.alive()
        inode.written = -1 - self.random.getrandbits(32)  # type: ignore[assignment]
        return self.stat(path)

    def try_lock(self, path: Path, *, shared: bool) -> SimLock | None:
        if path == PLACES.gate_doubt:
            return _DoubtLock(self) if shared else None if self.doubts else SimLock()
        if path.name == "agent.lock" and not shared:
            return _AgentLock(self, path)
        if shared or path != PLACES.gate_lock:
            return super().try_lock(path, shared=shared)
        self.alive()
        if self._load is not None:
            self._read_on(len(self._load[1]))
        self.shut = True
        return _GateLock(self)

    def kill(self) -> ObservedDisk:
        """Another process on the same machine; engines go on."""
        self.dead = True
        found = self._like(self.volume)
        found.blind, found.sound, found._load = self.blind, self.sound, self._load
        return found

    def power_loss(self) -> ObservedDisk:
        found = self._like(super().power_loss().volume)
        found.sound = self.sound
        return found

    def _like(self, volume: Volume) -> ObservedDisk:
        found = ObservedDisk(volume, check=self.check, chance=self.random, volatile=self.volatile)
        if self._visitor is not None:
            found.handled(self.handled_s, silently=self._verify)
        return found

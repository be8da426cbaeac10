"""Random walks of one replica: any sequence of steps, crashes, failures of the disk, damage and silence of the store.

The fixed scenarios of ``test_crash.py`` crash at every effect of a few sequences; a walk takes a sequence that nobody
has thought of and crashes here and there in it. After every step what an engine would load has to be exactly one
published version, not older than what was shown before (decision 0012 says when it may be), or hidden; and whenever the
faults end the replica has to get to the head, to keep that through a power loss, and to leave nothing behind.

Walked by ``walks.py``; the steps are in ``walk_steps.py``.
"""

from __future__ import annotations

import asyncio
import json
import random
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from rollout_agent import gate
from rollout_agent.errors import DiskError, EngineLoading, RolloutError, RunError
from rollout_agent.places import INDEX, Places, is_weights_name
from rollout_agent.replica import Replica
from tests.rollout_agent.courses import ASSETS, COURSES, course
from tests.rollout_agent.crashing import MODEL, STATE, Down, World
from tests.rollout_agent.simdisk import Crash, SimDisk, Volume
from tests.rollout_agent.training import read_model
from tests.rollout_agent.walk_disk import WalkDisk, Wire, engine_files
from tests.rollout_agent.walk_harms import Harm
from tests.rollout_agent.walk_steps import OPERATIONS
from tests.walks import Broken
from weight_store.errors import StoreUnavailable, WeightStoreError
from weight_store.position import Position
from weight_store.records import sha256_hex

STEPS = 14
"""Steps of a walk at least; half as many more at most."""
TRIES = 12
"""How often an agent may have to try once the faults have ended."""


@dataclass
class Walk:
    """One walk. Everything in it is drawn from ``seed``."""

    seed: int
    says: Callable[[str], None] = lambda line: None
    notes: list[str] = field(default_factory=list)
    harms: list[Harm] = field(default_factory=list)
    """Damage since everything was last known to be right."""
    shown: int | None = None
    """The version that was visible last."""
    kept: int | None = None
    """What a power loss must leave at least."""
    reading: int | None = None
    """The version that an engine was told of and has not answered to."""
    collected: int = 0
    """Versions below this are gone from the store."""
    forgot: bool = False
    """Whether records were damaged: without any nobody knows which assets earlier versions had, and they stay."""
    rebooted: bool = False
    """Whether no agent has been here since the power was lost."""
    suspect: bool = False
    """Whether a sync has failed since the replica was at the head last."""
    steps: int = 0
    crashes: int = 0

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.tmpfs = self.chance.random() < 0.5
        self.world: World = course(self.chance.randrange(COURSES), tmpfs=self.tmpfs)
        self.places = Places.of(MODEL, STATE if self.tmpfs else None)
        volatile = (MODEL,) if self.tmpfs else ()
        self.disk = WalkDisk(Volume(), volatile=volatile, seed=self.chance.randrange(1 << 30))
        self.wire = Wire(self.world.store)
        self.versions = sorted(self.world.training.positions)
        self.may_harm = self.chance.random() < 0.4
        self.replica: Replica | None = None

    # ---- the walk

    async def walk(self) -> None:
        """Walk it. Raises ``Broken``."""
        try:
            await self.world.head(self.versions[0])
            await self.reopen()
            for _ in range(STEPS + self.chance.randrange(STEPS // 2)):
                await self._step()
            await self.settle()
        except (Exception, asyncio.CancelledError) as error:
            told = "\n".join(self.notes)
            raise Broken(
                f"{told}\n{traceback.format_exc()}seed {self.seed}: {type(error).__name__}: {error}\n"
                f"walk it again: python -m tests.rollout_agent.walks --seed {self.seed}"
            ) from error

    def note(self, line: str) -> None:
        self.notes.append(line)
        self.says(line)

    async def _step(self) -> None:
        self.steps += 1
        names = [name for name in OPERATIONS if name not in (("answer",) if self.reading is None else ("tell",))]
        name = self.chance.choices(names, [OPERATIONS[name][0] for name in names])[0]
        await self._with_faults(name, OPERATIONS[name][1])

    async def _with_faults(self, name: str, operation: Callable[[Walk], Awaitable[None]]) -> None:
        """One operation, in the middle of which the process may end or the disk or the store may fail."""
        fault = self._draw_fault()
        self.note(f"{self.steps}. {name} (head {self.world.now}, shown {self.shown}){f': {fault}' if fault else ''}")
        try:
            await operation(self)
        except Crash:
            pass
        finally:
            self.no_faults()
        if self.disk.dead:
            await self._crashed()
        self._look()

    def _draw_fault(self) -> str:
        chance, disk = self.chance, self.disk
        soon = disk.effects + 1 + int(chance.random() ** 2 * 60)
        luck = chance.random()
        if luck < 0.3:
            disk.crash_at = soon
            return f"crash at effect {soon - disk.effects}"
        if luck < 0.36:
            disk.fail_sync_at = soon
            return f"a sync fails at effect {soon - disk.effects}"
        if luck < 0.40:
            disk.full_at = soon
            return f"no space at effect {soon - disk.effects}"
        if luck < 0.44:
            disk.full_from = soon
            return f"no space from effect {soon - disk.effects} on"
        if luck < 0.52:
            self.wire.left = int(chance.random() ** 2 * 30)
            return f"the store breaks off after {self.wire.left} requests"
        return ""

    def no_faults(self) -> None:
        disk = self.disk
        self.suspect |= disk.fail_sync_at is not None and disk.faulted
        disk.crash_at = disk.full_at = disk.fail_sync_at = disk.full_from = None
        disk.faulted = False
        self.wire.left = None

    async def attempt(self, *calls: Awaitable[object]) -> None:
        """Run these beside each other. Errors that what is going on explains are noted, others break the walk."""
        found = await asyncio.gather(*calls, return_exceptions=True)
        for error in found:
            if isinstance(error, Crash) or not isinstance(error, BaseException):
                continue
            if not self._explains(error):
                raise error
            self.note(f"   {type(error).__name__}: {str(error)[:150]}")
        if self.disk.dead:
            raise Crash

    def _explains(self, error: BaseException) -> bool:
        if self.disk.dead:
            return True
        if isinstance(error, RunError) or not isinstance(error, RolloutError | WeightStoreError):
            return False
        if isinstance(error, EngineLoading):
            return self.reading is not None
        if isinstance(error, StoreUnavailable) and self.wire.left is not None:
            return True
        if isinstance(error, DiskError) and self.disk.faulted:
            return True
        return bool(self.harms)

    @property
    def open(self) -> Replica:
        assert self.replica is not None
        return self.replica

    # ---- crashes

    async def _crashed(self) -> None:
        kind = self.chance.choice(("kill", "power"))
        last = self.disk.trace[-1] if self.disk.trace else "nothing"
        self.note(f"   {kind} in {last!r}")
        self.crashes += 1
        self.disk = self.disk.after(kind)
        if kind == "power":
            self._power_lost()
        else:
            self._look()
        await self.reopen()

    def _power_lost(self) -> None:
        assert gate.holds(self.disk, self.places) is None, "visible after a power loss, before anybody has looked"
        self.shown, self.reading = self.kept, None
        self.rebooted = True

    async def reopen(self) -> None:
        """Another agent, which may be ended while it recovers, and the next one too."""
        self.replica = None
        for attempt in range(4):
            soon = self.disk.effects + 1 + int(self.chance.random() ** 2 * 30)
            fault = ""
            if attempt < 3 and self.chance.random() < 0.3:
                fault = self.chance.choice(("crash_at", "crash_at", "fail_sync_at", "full_at"))
                setattr(self.disk, fault, soon)
            self.note(f"   opened{f', {fault} {soon - self.disk.effects}' if fault else ''}")
            try:
                self.replica = await self.world.open(self.disk, self.wire)
            except Crash:
                assert self.disk.dead
            except DiskError:
                if not (self.disk.faulted or self.harms):
                    raise
            finally:
                self.no_faults()
            if self.disk.dead:
                self.crashes += 1
                kind = self.chance.choice(("kill", "power"))
                self.note(f"   {kind} in {self.disk.trace[-1]!r}")
                self.disk = self.disk.after(kind)
                if kind == "power":
                    self._power_lost()
                else:
                    self._look()
            elif self.replica is not None:
                break
        self._recovered()

    def _recovered(self) -> None:
        """What a start without a store leads to."""
        replica = self.open
        self.suspect = False
        found = self._look()
        if not self.harms:
            assert self.shown is None or found is not None, f"nothing held after recovery, {self.shown} was shown"
        assert replica.telling is None or not self.rebooted, "waits for an engine that is gone"
        self.rebooted = False
        if replica.telling is not None and self.reading is None:
            replica.told()  # killed between the note and the call, or between the answer and its end
        if self.reading is not None:
            position = self.world.training.positions[self.reading]
            assert replica.telling == position, f"forgot that an engine was told of {self.reading}"

    # ---- what steps tell

    def harmed(self, harm: Harm) -> None:
        self.harms.append(harm)
        self.forgot |= harm.path in map(str, (self.places.checkpoint, self.places.pending, self.places.digests))
        self.disk.still = None

    def tells(self, position: Position) -> None:
        self.reading = position.version
        self.disk.still = None if self.harms else engine_files(self.disk.volume)

    def answered(self) -> None:
        self.reading = self.disk.still = None

    # ---- what must hold

    def _look(self) -> int | None:
        """What is visible, which has to be right."""
        self.disk.look()
        found = visible(self.world, self.disk, self.places, self.harms, forgot=self.forgot)
        if found is not None:
            assert found <= self.world.now, f"shows {found}, which is not published yet"
            if not self.harms:
                assert self.shown is None or found >= self.shown, f"went back from {self.shown} to {found}"
            self.shown = found
            if not self.tmpfs or str(self.places.pending) not in self.disk.volume.names:
                self.kept = found
        return found

    async def settle(self) -> None:
        """The faults end: the replica gets to the head, keeps it through a power loss, and leaves nothing behind."""
        self.note(f"{self.steps}. the faults end (head {self.world.now}, shown {self.shown})")
        if self.reading is not None:
            await OPERATIONS["answer"][1](self)
        if self.harms:
            # What nobody reads is not known to be damaged: it is read when an agent starts.
            for _ in range(2):
                await self._get_to_the_head()
                await self.open.close()
                self.disk = self.disk.after("power")
                self._power_lost()
                self.note("   power loss, so that everything is read")
                self.replica = await self.world.open(self.disk, self.wire)
                self._recovered()
        before = len(self.disk.trace)
        await self._get_to_the_head()
        done = self.disk.trace[before:]
        self.harms.clear()
        assert self._look() == self.world.now
        self.kept = self.world.now
        self.suspect = False
        self._check_tidy(done)
        for kind in ("kill", "power"):
            left = self.disk.apart(self.chance.randrange(1 << 30)).after(kind)
            async with await self.world.open(left, Down()):
                found = visible(self.world, left, self.places, [], forgot=self.forgot)
                assert found == self.world.now, f"{found} is left of {self.world.now} after a {kind}"

    async def _get_to_the_head(self) -> None:
        target = self.world.training.positions[self.world.now]
        replica = self.open
        for attempt in range(TRIES):
            try:
                assert await replica.catch_up() == target
                if any(item.unseen for item in self.harms):
                    await replica.repair()
                await replica.check()
                await replica.checkpoint(force=True)
            except (RolloutError, WeightStoreError) as error:
                self.note(f"   {type(error).__name__}: {str(error)[:150]}")
                if attempt == TRIES - 1 or isinstance(error, RunError) or not (self.harms or self.suspect):
                    raise
            else:
                if replica.position == target:
                    return
        raise AssertionError(f"stays at {replica.position}")

    def _check_tidy(self, done: list[str]) -> None:
        """The names are those that a replica would have which had fetched this version and nothing else.

        What a crash leaves behind stays until the next version comes and the next checkpoint: if these were ``done``.
        """
        saved = any(what.startswith("rename state.json.tmp") for what in done)
        moved = any(what.startswith(("create change-", "rename pending.json.tmp")) for what in done)
        names, manifest = self.disk.volume.names, self.world.training.manifests[self.world.now]
        layout = self.world.training.layouts[self.world.now]
        files = [name for name in engine_files(self.disk.volume) if is_weights_name(name)]
        expected = {str(MODEL / name) for name in (*files, INDEX, *(asset.name for asset in manifest.assets))}
        expected |= {str(self.places.private / name) for name in ("owner.json", "whole.json", "digests.json")}
        expected |= {
            str(self.places.checkpoint),
            str(self.places.layout(layout)),
            str(self.places.shown_layout(layout)),
        }
        expected |= {str(self.places.asset(asset.sha256)) for asset in manifest.assets}
        copies = {name.split("/")[2] for name in names if name.startswith(f"{STATE}/checkpoint-")}
        expected |= {str(STATE / copy / name) for copy in copies for name in files}
        assert len(copies) >= self.tmpfs
        if not saved:
            return
        assert len(copies) == self.tmpfs, copies
        assert expected <= names.keys(), sorted(expected - names.keys())
        more = sorted(name for name in names.keys() - expected if not _may_stay(name, self.places))
        if self.forgot:
            more = [name for name in more if name not in {str(MODEL / asset) for asset in ASSETS}]
        more = [name for name in more if moved or not name.startswith(f"{self.places.new}/")]
        assert not more, f"left behind: {more}"


def _may_stay(name: str, places: Places) -> bool:
    """Names of which there is one at most, whatever has happened."""
    few = (places.serving, places.told, *(places.hidden / n for n in (INDEX, "config.json")))
    records = (places.owner, places.whole, places.digests, places.checkpoint, places.pending)
    # Of what was being written when the process ended; replaced when it is written the next time.
    beginnings = {f"{path}.tmp" for path in (*few[:2], *records)}
    return name in {str(path) for path in few} | beginnings or _is_beginning(name)


def _is_beginning(name: str) -> bool:
    directory, _, last = name.rpartition("/")
    if directory == f"{MODEL}/.weightcast/layouts":
        return last.endswith(".tmp")
    return directory == str(MODEL) and last.removesuffix(".tmp") in (INDEX, *ASSETS) and last.endswith(".tmp")


def wrong(world: World, version: int, files: dict[str, bytes], *, forgot: bool) -> str:
    """What is not as it is in this version, of all that an engine could load; empty if everything is."""
    try:
        tensors = read_model({name: data for name, data in files.items() if name.endswith(".safetensors")})
        index = json.loads(files[INDEX])["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        return f"version {version} cannot be read: {error!r}"
    if tensors != world.training.tensors(version):
        return f"a mixture at version {version}"
    if not (index.keys() == tensors.keys() and set(index.values()) == {n for n in files if n.endswith(".safetensors")}):
        return f"the index of version {version} does not fit"
    assets = {asset.name: asset.sha256 for asset in world.training.manifests[version].assets}
    others = {
        n: sha256_hex(data) for n, data in files.items() if n != INDEX and not n.endswith((".safetensors", ".tmp"))
    }
    if forgot:
        others = {name: sha256 for name, sha256 in others.items() if name in assets}
    return "" if assets == others else f"assets {sorted(others)} of version {version} do not fit {sorted(assets)}"


def visible(world: World, disk: SimDisk, places: Places, harms: list[Harm], *, forgot: bool) -> int | None:
    """The version that an engine would load through the gate: exactly that, unless somebody had his hands in it."""
    whole = gate.holds(disk, places)
    if whole is None:
        return None
    found = wrong(world, whole.position.version, engine_files(disk.volume), forgot=forgot)
    if not found:
        return whole.position.version
    assert any(item.model for item in harms), found
    # Only stamps tell of an edit, and only reading of rot.
    visitor = gate.Visitor(disk, places, verify=any(item.unseen for item in harms))
    assert visitor.enter() is None, f"the gate lets engines to {found}"
    return None

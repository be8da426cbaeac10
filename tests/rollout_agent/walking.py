"""Random walks of one replica: any sequence of steps, crashes, failures of the disk, damage and silence of the store.

The fixed scenarios of ``test_crash.py`` crash at every effect of a few sequences; a walk takes a sequence that nobody
has thought of and crashes here and there in it. After every step what an engine would load has to be exactly one
published version, not older than what was shown before (decision 0012 says when it may be), or hidden; and whenever the
faults end the replica has to get to the head, to keep that through a power loss, and to leave nothing behind.

Walked by ``walks.py``; the steps are in ``walk_steps.py``.
"""

from __future__ import annotations

import asyncio
import random
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from rollout_agent import gate
from rollout_agent.errors import (
    DamagedObject,
    DiskError,
    EngineLoading,
    ForeignFiles,
    NotWhole,
    Rewind,
    RolloutError,
    RunError,
)
from rollout_agent.places import Places
from rollout_agent.replica import Replica
from tests.rollout_agent.courses import COURSES, course
from tests.rollout_agent.crashing import MODEL, STATE, World
from tests.rollout_agent.simdisk import Crash
from tests.rollout_agent.simvolume import Volume
from tests.rollout_agent.training import Down
from tests.rollout_agent.walk_bucket import is_open, put_back
from tests.rollout_agent.walk_checks import INCLUDES, check_tidy, visible
from tests.rollout_agent.walk_disk import WalkDisk, Wire, engine_files
from tests.rollout_agent.walk_harms import Harm
from tests.rollout_agent.walk_steps import OPERATIONS
from tests.walks import Broken
from weight_store.errors import StoreUnavailable, WeightStoreError
from weight_store.position import Position

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
    include: tuple[str, ...] = ()
    """Patterns of the tensors that are wanted."""
    includes: set[tuple[str, ...]] = field(default_factory=lambda: {()})
    """The same, and those of before that the files may still be of."""
    rebooted: bool = False
    """Whether no agent has been here since the power was lost."""
    suspect: bool = False
    """Whether a sync has failed since everything was last known to be right."""
    spoilt: dict[str, bytes] = field(default_factory=dict)
    """Objects of the bucket that are damaged, as they were."""
    told_is_gone: bool = False
    """Whether somebody removed the note that an engine was told."""
    moved: bool = False
    """Whether the replica was given to another run."""
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
        self.may_spoil = self.chance.random() < 0.35
        if self.chance.random() < 0.2:
            self.include = self.chance.choice(INCLUDES)
            self.includes = {self.include}
        self.disk.stop = self.stop
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
        assert not self.open.waits, f"says that {self.open.waits} when it is over"
        self._look()
        if self.suspect and not self.harms:
            await self._probe("power")

    def _draw_fault(self) -> str:
        chance, disk = self.chance, self.disk
        soon = disk.effects + 1 + int(chance.random() ** 2 * 60)
        luck = chance.random()
        if luck < 0.3:
            disk.crash_at = soon
            return f"crash at effect {soon - disk.effects}"
        if luck < 0.35:
            disk.fail_sync_from = soon
            return f"a sync fails from effect {soon - disk.effects} on"
        if luck < 0.39:
            disk.full_at = soon
            return f"no space at effect {soon - disk.effects}"
        if luck < 0.43:
            disk.full_from = soon
            return f"no space from effect {soon - disk.effects} on"
        if luck < 0.50:
            self.wire.left = int(chance.random() ** 2 * 30)
            return f"the store breaks off after {self.wire.left} requests"
        return ""

    def no_faults(self) -> None:
        disk = self.disk
        self.suspect |= disk.fail_sync_at is not None and disk.faulted
        disk.no_faults()
        self.wire.left = None

    async def attempt(self, *calls: Awaitable[object]) -> bool:
        """Run these beside each other. Errors that what is going on explains are noted, others break the walk.

        True if there was none.
        """
        good = True
        found = await asyncio.gather(*calls, return_exceptions=True)
        for error in found:
            if isinstance(error, Crash) or not isinstance(error, BaseException):
                continue
            if not self._explains(error):
                raise error
            self.note(f"   {type(error).__name__}: {str(error)[:150]}")
            good = False
        if self.disk.dead:
            raise Crash
        return good

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
        if isinstance(error, NotWhole) and self.disk.told_to_stop:
            return True
        named = any(key in str(error) for key in self.spoilt)
        return bool(self.harms) or (named and isinstance(error, WeightStoreError | DamagedObject | Rewind))

    @property
    def open(self) -> Replica:
        assert self.replica is not None
        return self.replica

    def stop(self) -> None:
        """What an agent does that is told to stop while it waits for an engine at the gate."""
        if self.replica is not None:
            self.disk.told_to_stop = True
            self.replica._holding.cancelled.set()

    # ---- crashes

    async def _crashed(self) -> None:
        kind = self.chance.choice(("kill", "kill", "kill", "power") if self.suspect else ("kill", "power"))
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
        # A note that the loss left unreadable may be of this boot, for all that anybody knows.
        self.suspect = str(self.places.syncing) in self.disk.volume.names

    async def reopen(self, *, faults: bool = True) -> None:
        """Another agent, which may be ended while it recovers, and the next one too."""
        self.replica = None
        for attempt in range(4):
            soon = self.disk.effects + 1 + int(self.chance.random() ** 2 * 30)
            fault = ""
            if faults and attempt < 3 and self.chance.random() < 0.3:
                fault = self.chance.choice(("crash_at", "crash_at", "fail_sync_from", "full_at"))
                setattr(self.disk, fault, soon)
            self.note(f"   opened{f', {fault} {soon - self.disk.effects}' if fault else ''}")
            try:
                self.replica = await self.world.open(self.disk, self.wire, include=self.include)
            except Crash:
                assert self.disk.dead
            except ForeignFiles:
                assert any(item.owner for item in self.harms), "does not know its own directory"
                self.clear()
            except (DiskError, NotWhole) as error:
                if not self._explains(error):
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

    def clear(self) -> None:
        """Somebody empties both directories, as the agent asks for."""
        self.note("   emptied by hand")
        for root in (MODEL, STATE):
            self.disk.remove_tree(str(root), durably=True)
        self.shown = self.kept = None
        self.includes = {self.include}
        self.answered()

    def _recovered(self) -> None:
        """What a start without a store leads to."""
        replica = self.open
        found = self._look()
        if not self.harms:
            assert self.shown is None or found is not None, f"nothing held after recovery, {self.shown} was shown"
        assert replica.telling is None or not self.rebooted, "waits for an engine that is gone"
        self.rebooted = False
        if replica.telling is not None and self.reading is None:
            replica.told()  # killed between the note and the call, or between the answer and its end
        if self.told_is_gone and replica.telling is None:
            self.answered()
        self.told_is_gone = False
        if self.reading is not None:
            position = self.world.training.positions[self.reading]
            assert replica.telling == position, f"forgot that an engine was told of {self.reading}"

    # ---- what steps tell

    def harmed(self, harm: Harm) -> None:
        self.harms.append(harm)
        self.told_is_gone |= harm.told
        self.disk.still = None

    def tells(self, position: Position) -> None:
        self.reading = position.version
        self.disk.still = None if self.harms else engine_files(self.disk.volume)

    def answered(self) -> None:
        self.reading = None
        if self.disk.inside is None:
            self.disk.still = None

    # ---- what must hold

    def _look(self) -> int | None:
        """What is visible, which has to be right."""
        self.disk.look()
        found = visible(self.world, self.disk, self.places, self.harms, self.includes)
        if found is not None:
            assert found <= self.world.now, f"shows {found}, which is not published yet"
            if not self.harms:
                assert self.shown is None or found >= self.shown, f"went back from {self.shown} to {found}"
            self.shown = found
            names = self.disk.volume.names
            if not self.tmpfs or (str(self.places.checkpoint) in names and str(self.places.pending) not in names):
                self.kept = found
        return found

    async def settle(self) -> None:
        """The faults end: the replica gets to the head, keeps it through a power loss, and leaves nothing behind."""
        self.note(f"{self.steps}. the faults end (head {self.world.now}, shown {self.shown})")
        if self.reading is not None:
            await OPERATIONS["answer"][1](self)
        if self.disk.inside is not None:
            self.disk.leaves()
        if self.spoilt:
            await self.go_round()
            await put_back(self)
        if self.harms:
            # What nobody reads is not known to be damaged: it is read when an agent starts.
            for _ in range(2):
                await self._get_to_the_head()
                await self.open.close()
                self.disk = self.disk.after("power")
                self._power_lost()
                self.note("   power loss, so that everything is read")
                await self.reopen(faults=False)
        before = len(self.disk.trace)
        await self._get_to_the_head()
        done = self.disk.trace[before:]
        self.harms.clear()
        self.includes = {self.include}
        assert self._look() == self.world.now
        self.kept = self.world.now
        self.suspect = False
        check_tidy(self.world, self.disk, self.places, done, tmpfs=self.tmpfs)
        for kind in ("kill", "power"):
            await self._probe(kind)

    async def _probe(self, kind: str) -> None:
        """What a crash would leave now; the walk does not go on from that."""
        left = self.disk.apart(self.chance.randrange(1 << 30)).after(kind)
        async with await self.world.open(left, Down()):
            found = visible(self.world, left, self.places, [], self.includes)
            assert self.kept is None or (found or 0) >= self.kept, f"{found} is left of {self.kept} after a {kind}"

    async def go_round(self) -> None:
        """What is spoilt in the bucket takes nothing away that is held, and is gone round where that can be."""
        held = self._look()
        for _ in range(4):
            await self.attempt(self.open.catch_up())
        found = self._look()
        if self.harms:
            return
        assert held is None or found is not None, f"lost {held} because of {sorted(self.spoilt)}"
        if is_open(self, only_full=self.suspect or len(self.includes) > 1):
            assert found == self.world.now, f"stays at {found}, though there is a way past {sorted(self.spoilt)}"

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

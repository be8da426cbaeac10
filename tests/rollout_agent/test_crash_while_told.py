"""kill -9 and power loss around telling an engine: what it was told to read stays as it is until it has answered.

As in ``test_crash.py`` every scenario is run once and each of its effects is a crash; so is every moment between two
effects in which the engine does something: it is called, it reads on, it answers. After a kill it goes on reading what
it was told of, while another agent comes; a power loss takes it along.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rollout_agent.agent import Agent
from rollout_agent.engine import Staged
from rollout_agent.errors import EngineLoading, EngineRefused, EngineSilent
from rollout_agent.places import Places
from rollout_agent.replica import Replica
from tests.rollout_agent import switches
from tests.rollout_agent.crashing import (
    MODEL,
    SEED,
    Counting,
    World,
    check,
    first_fetch,
    last_of,
    visible,
    without_threads,
)
from tests.rollout_agent.simdisk import SimDisk, SimLock
from tests.rollout_agent.simvolume import Volume
from tests.rollout_agent.training import Down, read_model


@pytest.fixture(autouse=True)
def no_threads(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    without_threads(monkeypatch, caplog)


@dataclass
class Load:
    """An engine that reads ``version``: what it still has to read, half a file at a time, and what it has read."""

    version: int
    todo: list[tuple[str, int]]
    found: dict[str, bytes] = field(default_factory=dict)

    def copy(self) -> Load:
        return Load(self.version, list(self.todo), dict(self.found))


class ToldDisk(SimDisk):
    """Also notes at every fork what the engine was reading, and sees whether its files stay as they are."""

    engine: Engine | None = None
    still: dict[str, bytes] | None = None
    """What an engine was told to read, from when it is called until it answers."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.loads: list[Load | None] = []

    def effect(self, what: str) -> bool:
        self.look()
        return super().effect(what)

    def end(self) -> None:
        super().end()
        self._note_load()

    def moment(self, what: str) -> None:
        """Something happens that is no effect on the disk: a crash may come here too."""
        if self.forks is not None:
            self.forks.append((what, self.volume.clone()))
            self._note_load()

    def _note_load(self) -> None:
        load = self.engine.reading if self.engine is not None else None
        self.loads.append(load and load.copy())

    def contents(self) -> dict[str, bytes]:
        """All files that an engine could read."""
        return {name: bytes(inode.data) for name, inode in self.volume.files_in(MODEL).items()}

    def look(self) -> None:
        """Whether what an engine was told to read is what it was."""
        if self.still is not None:
            found = self.contents()
            changed = sorted(name for name in found.keys() | self.still if found.get(name) != self.still.get(name))
            last = self.trace[-1] if self.trace else "nothing"
            assert not changed, f"{changed} changed while an engine read them, after {last!r}"

    def try_lock(self, path: Path, *, shared: bool) -> SimLock | None:
        if path == Places.of(MODEL).gate_told and self.engine is not None and self.engine.is_locked():
            return None
        return super().try_lock(path, shared=shared)


class Engine:
    """Reads straight from the files, one load at a time, agent or no agent; it does not know of the gate.

    ``orphan``: what an agent that was killed had told it. ``is_command``: that was a command, which holds a lock for as
    long as it runs. ``silences``: how often the patience of whoever asks ends before it answers.
    """

    def __init__(
        self,
        world: World,
        disk: ToldDisk,
        orphan: Load | None = None,
        *,
        is_command: bool = False,
        silences: int = 0,
        refuses: int | None = None,
    ) -> None:
        self.world, self.disk, self.reading = world, disk, orphan
        self.is_command, self.silences, self.refuses = is_command and orphan is not None, silences, refuses
        self.meanwhile: Callable[[int], Awaitable[None]] | None = None
        """Called with the version when the engine has begun to read it."""
        self.asked: list[int] = []
        disk.engine = self
        if orphan is not None:
            disk.still = disk.contents()

    async def load(self, staged: Staged) -> None:
        self.asked.append(staged.version)
        self.disk.moment("the engine is about to be called")
        if self.reading is not None:
            assert staged.version == self.reading.version, "told of another version while it loads"
            assert not self.is_command, "another command is run beside it"
            self._wait_for_it()
        self._begin(staged.version)
        while self._read_on():
            if self.silences:
                self.silences -= 1
                raise EngineSilent("no answer yet")
            if self.meanwhile is not None:
                meanwhile, self.meanwhile = self.meanwhile, None
                await meanwhile(staged.version)
        if staged.version == self.refuses:
            raise EngineRefused("out of memory")

    def is_locked(self) -> bool:
        """Whether the command goes on; every question gives it time."""
        if self.is_command and not self._read_on():
            self.is_command = False
        return self.is_command

    def _wait_for_it(self) -> None:
        """One load at a time."""
        while self._read_on():
            if self.silences:
                self.silences -= 1
                raise EngineSilent("busy with what it was told before")

    def _begin(self, version: int) -> None:
        self.disk.still = self.disk.contents()
        names = [name for name in self.disk.still if name.endswith(".safetensors")]
        self.reading = Load(version, [(name, half) for name in names for half in (0, 1)])
        self.disk.moment("the engine was called")

    def _read_on(self) -> bool:
        """Read half a file, the last of them with the answer; whether there was one left."""
        load = self.reading
        if load is None:
            return False
        self.disk.look()
        if load.todo:
            name, half = load.todo.pop(0)
            data = self.disk.contents()[name]
            middle = len(data) // 2
            load.found[name] = data[:middle] if half == 0 else load.found[name] + data[middle:]
            self.disk.moment("the engine reads")
            return True
        assert read_model(load.found) == self.world.training.tensors(load.version), (
            f"loaded {load.version} as a mixture"
        )
        self.reading = self.disk.still = None
        self.disk.moment("the engine has answered")
        return False


@dataclass
class Scene:
    """What the scenarios play with."""

    world: World
    disk: ToldDisk
    engine: Engine

    def agent(self, replica: Replica) -> Agent:
        return Agent(replica, "tiny", "eu-west", "a1", engine=self.engine)

    async def told_of_each(self, replica: Replica, *, saves: bool) -> None:
        """While the engine reads, the next version comes and is fetched, and a checkpoint is made (if ``saves``)."""

        async def meanwhile(version: int) -> None:
            await self.world.head(version + 1)
            with pytest.raises(EngineLoading):
                await replica.catch_up()
            if saves:
                await replica.checkpoint(force=True)

        agent = self.agent(replica)
        for version in range(1, LAST + 1):
            self.engine.meanwhile = meanwhile if version < LAST else None
            await agent.step()
        assert self.engine.asked == [1, 2, 3]


async def by_log(scene: Scene) -> None:
    """Versions that come as logs while the engine is told of the one before; it refuses one."""
    scene.engine.refuses = 2
    async with await scene.world.open(scene.disk) as replica:
        await scene.told_of_each(replica, saves=True)


async def new_files(scene: Scene) -> None:
    """Versions that come as new files, two of them before there is a copy that a reboot would find."""
    async with await scene.world.open(scene.disk) as replica:
        await scene.told_of_each(replica, saves=False)
        await replica.checkpoint()


async def silent(scene: Scene) -> None:
    """Agents come and go, and their patience ends, while the engine reads on."""
    scene.engine.silences = 3
    for _ in range(2):
        async with await scene.world.open(scene.disk) as replica:
            agent = scene.agent(replica)
            with pytest.raises(EngineSilent):
                await agent.step()
            await scene.world.head(LAST)
    async with await scene.world.open(scene.disk) as replica:
        agent = scene.agent(replica)
        with pytest.raises(EngineSilent):
            await agent.step()
        await agent.step()


SCENARIOS: dict[str, Callable[[Scene], Awaitable[None]]] = {"by log": by_log, "new files": new_files, "silent": silent}
SHARES = {"by log": (0.03, 0.03), "new files": (0.9, 0.9), "silent": (0.03, 0.9)}
"""Parts of the weights that change in the versions after the first."""
LAST = 3
STARTS: dict[tuple[str, bool], Volume] = {}
POINTS: dict[tuple[str, bool, str], list[str]] = {}


async def prepared(name: str, tmpfs: bool, seed: int) -> Scene:
    """The first version is held, and no engine was told of it."""
    world = World.of(SHARES[name], tmpfs=tmpfs)
    volatile = (MODEL,) if tmpfs else ()
    await world.head(1)
    if (name, tmpfs) not in STARTS:
        disk = SimDisk(Volume(), volatile=volatile, seed=SEED)
        await first_fetch(world, disk)
        STARTS[name, tmpfs] = disk.volume
    told = ToldDisk(STARTS[name, tmpfs].clone(), volatile=volatile, seed=seed)
    return Scene(world, told, Engine(world, told))


@pytest.mark.parametrize("kind", ["kill", "power"])
@pytest.mark.parametrize("tmpfs", [False, True], ids=["disk", "tmpfs"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_effect_and_every_moment(name: str, tmpfs: bool, kind: str) -> None:
    POINTS[name, tmpfs, kind] = asyncio.run(_every_point(name, tmpfs, kind))


def test_covers_what_there_is_around_telling() -> None:
    """Crashes before the note, in it, after it, in the call and after the answer; many of each."""
    for name, tmpfs, kind in itertools.product(SCENARIOS, (False, True), ("kill", "power")):
        if (name, tmpfs, kind) not in POINTS:
            POINTS[name, tmpfs, kind] = asyncio.run(_every_point(name, tmpfs, kind))
        found = POINTS[name, tmpfs, kind]
        for what in (
            "create told.json.tmp",
            "rename told.json.tmp",
            "the engine is about to be called",
            "the engine was called",
            "the engine reads",
            "the engine has answered",
            "rename serving.json.tmp",
            "remove told.json",
        ):
            assert any(point.startswith(what) for point in found), f"no crash in {what!r}: {name}"
    assert sum(map(len, POINTS.values())) >= 1500, {where: len(found) for where, found in POINTS.items()}


async def _every_point(name: str, tmpfs: bool, kind: str) -> list[str]:
    scene = await prepared(name, tmpfs, SEED * 1000)
    world, disk = scene.world, scene.disk
    known = visible(disk)
    assert known is not None
    disk.forks = []
    await SCENARIOS[name](scene)
    assert visible(disk) == last_of(world)
    seen: set[object] = set()
    for at, ((what, volume), reading) in enumerate(zip(disk.forks, disk.loads, strict=True), 1):
        crashed = SimDisk(volume, volatile=disk.volatile, seed=SEED * 10_000 + at)
        crashed = crashed.kill() if kind == "kill" else crashed.power_loss()
        left = ToldDisk(crashed.volume, volatile=disk.volatile, seed=SEED * 10_000 + at)
        if kind == "power":
            reading = None
        key = (left.volume.key(), reading and (reading.version, len(reading.todo)))
        if key not in seen:
            seen.add(key)
            try:
                await _recovered(world, left, reading, kind, known)
            except AssertionError as error:
                where = "tmpfs" if tmpfs else "disk"
                error.add_note(f"{name}, {where}, {kind} at point {at} ({what}), WEIGHTCAST_SEED={SEED}")
                raise
    return [what for what, _ in disk.forks]


async def _recovered(world: World, disk: ToldDisk, load: Load | None, kind: str, known: tuple[int, object]) -> None:
    """From what a crash left: two agents without a store, then one that goes on to the last version."""
    luck = random.Random(disk.random.randrange(1 << 30))
    engine = Engine(world, disk, load, is_command=luck.random() < 0.5, silences=luck.randrange(3))
    for _ in range(2):
        replica = await world.open(disk, Down())
        telling = replica.telling
        await replica.close()
        assert kind == "kill" or telling is None, "waits for an engine that is gone"
        assert load is None or (telling and telling.version == load.version), "forgot what it told"
    after = visible(disk)
    check(world, after, known, "after recovery")
    assert after is not None, "nothing held after recovery"
    counting = Counting(world.store)
    await world.head(LAST)
    async with await world.open(disk, counting) as replica:
        await _stepped(Agent(replica, "tiny", "eu-west", "a1", engine=engine), disk)
        assert replica.serving == replica.position == world.training.positions[LAST]
    disk.look()
    assert visible(disk) == last_of(world)
    assert disk.size(Places.of(MODEL).told) is None
    # The version of which an answer is due goes first; none is told but that and the last one.
    assert engine.asked == sorted(engine.asked)
    assert {*engine.asked, LAST} == {telling.version if telling is not None else LAST, LAST}
    deltas = sum(world.training.manifests[version].payload_bytes for version in range(after[0] + 1, LAST + 1))
    assert counting.read <= deltas, f"fetched {counting.read} bytes where {deltas} lead on from {after[0]}"


async def _stepped(agent: Agent, disk: ToldDisk) -> None:
    """As :meth:`Agent.follow` does: again and again while the engine says nothing."""
    for _ in range(40):
        try:
            await agent.step()
        except EngineSilent:
            assert agent.replica.telling is not None
            disk.look()
        else:
            return
    raise AssertionError("the engine is never asked")


def _note_goes_early(patch: pytest.MonkeyPatch) -> None:
    load = Engine.load

    async def loads(self: Engine, staged: Staged) -> None:
        self.disk.remove(Places.of(MODEL).told)
        await load(self, staged)

    patch.setattr(Engine, "load", loads)


def _no_lock(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ToldDisk, "try_lock", SimDisk.try_lock)


@pytest.mark.parametrize(
    ("switch_off", "name", "tmpfs", "kind"),
    [
        (switches.no_telling_check, "by log", False, "kill"),
        (switches.no_telling_recall, "by log", False, "kill"),
        (switches.told_in_any_boot, "silent", False, "power"),
        (_note_goes_early, "by log", False, "kill"),
        (switches.told_half_written, "silent", False, "kill"),
        (switches.whatever_is_new, "new files", True, "kill"),
        (_no_lock, "silent", False, "kill"),
    ],
)
def test_has_teeth(
    switch_off: Callable[[pytest.MonkeyPatch], None],
    name: str,
    tmpfs: bool,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a mechanism switched off the crashes above find a violation."""
    asyncio.run(prepared(name, tmpfs, SEED))
    switch_off(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        asyncio.run(_every_point(name, tmpfs, kind))

"""kill -9 and power loss at every effect on the disk: the old version, the new one, or knowingly none, never a mixture.

Every scenario is run once, and for each of its effects the disk is kept as a crash in the middle of it would leave it;
then each of these is recovered from. A failure names scenario, effect and seed, which replay it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import pytest

from rollout_agent.errors import DamagedFiles, DiskError, EngineLoading
from rollout_agent.places import Places
from tests.rollout_agent import switches
from tests.rollout_agent.crashing import (
    MODEL,
    SEED,
    STATE,
    Breaking,
    Counting,
    World,
    check,
    check_assets,
    first_fetch,
    last_of,
    visible,
    without_threads,
)
from tests.rollout_agent.simdisk import Crash, SimDisk
from tests.rollout_agent.simvolume import Inode, Volume
from tests.rollout_agent.training import Down
from weight_store.errors import StoreUnavailable


@pytest.fixture(autouse=True)
def no_threads(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    without_threads(monkeypatch, caplog)


async def follow(world: World, disk: SimDisk) -> None:
    """Two deltas by log, a checkpoint, one more delta."""
    await world.head(3)
    async with await world.open(disk) as replica:
        await replica.catch_up()
        await replica.checkpoint(force=True)
        await world.head(4)
        await replica.catch_up()


async def dense(world: World, disk: SimDisk) -> None:
    """A change too large for a log."""
    await world.head(2)
    async with await world.open(disk) as replica:
        await replica.catch_up()


async def dense_again(world: World, disk: SimDisk) -> None:
    """One more of them, before there is a copy of the first that a reboot would find."""
    await dense(world, disk)
    await world.head(3)
    async with await world.open(disk) as replica:
        await replica.catch_up()


async def repair(world: World, disk: SimDisk) -> None:
    """Two groups edited by hand, found at the start and refetched."""
    async with await world.open(disk) as replica:
        await replica.catch_up()


async def replaced(world: World, disk: SimDisk) -> None:
    """A group is found wrong, after a reboot in the checkpoint's copy too: refetched, and another copy is made."""
    async with await world.open(disk) as replica:
        await replica.catch_up()
        await replica.checkpoint()


async def overlap(world: World, disk: SimDisk) -> None:
    """Two more versions while a checkpoint is being made, then another checkpoint and one more version."""
    await world.head(2)
    async with await world.open(disk) as replica:
        await replica.catch_up()
        for version in (3, 4):
            saving = asyncio.create_task(replica.checkpoint(force=True))
            await asyncio.sleep(0)
            await world.head(version)
            await replica.catch_up()
            await saving


async def overtaken(world: World, disk: SimDisk) -> None:
    """New files are installed while a checkpoint of the old ones is being made."""
    await world.head(2)
    async with await world.open(disk) as replica:
        await replica.catch_up()
        saving = asyncio.create_task(replica.checkpoint(force=True))
        await asyncio.sleep(0)
        await world.head(3)
        await replica.catch_up()
        await saving


async def recovery(world: World, disk: SimDisk) -> None:
    """Coming back after a crash just behind a commit; the log is replayed without a store."""
    async with await world.open(disk, Down()):
        pass


POINTS: dict[tuple[str, bool, str], int] = {}
Scenario = Callable[[World, SimDisk], Awaitable[None]]
SCENARIOS: dict[str, Scenario] = {
    "first fetch": first_fetch,
    "follow": follow,
    "dense": dense,
    "dense again": dense_again,
    "dense after a cut": dense_again,
    "repair": repair,
    "replaced checkpoint": replaced,
    "overlap": overlap,
    "overtaken": overtaken,
    "recovery": recovery,
}
HEADS = {
    "first fetch": (2, 2),
    "follow": (1, 4),
    "dense": (1, 2),
    "dense again": (1, 3),
    "dense after a cut": (1, 3),
    "repair": (3, 3),
    "replaced checkpoint": (1, 1),
    "overlap": (1, 4),
    "overtaken": (1, 3),
    "recovery": (1, 2),
}
"""The head before the crashes and the one to be reached after them."""
SHARES = {
    "dense": (0.9,),
    "dense again": (0.9, 0.9),
    "dense after a cut": (0.9, 0.9),
    "overlap": (0.02, 0.02, 0.02),
    "overtaken": (0.02, 0.9),
}
"""Parts of the weights that change in the versions after the first, where not three small ones."""
DROPS = {"follow": 2, "dense again": 2}
"""From which version on there is no tokenizer any more."""
EDITED = ("repair", "replaced checkpoint")
"""Before an agent has looked, files edited by hand are visible."""
FRUGAL = ("follow", "replaced checkpoint", "overlap", "recovery")
"""No crash costs as much as half of the weights."""


STARTS: dict[tuple[str, bool], Volume] = {}


async def prepared(name: str, tmpfs: bool, seed: int) -> tuple[World, SimDisk]:
    """A world and a disk just before the part of the scenario in which crashes happen."""
    world = World.of(SHARES.get(name, (0.03, 0.03, 0.03)), tmpfs=tmpfs, drops=DROPS.get(name, 0))
    await world.head(HEADS[name][0])
    if (name, tmpfs) not in STARTS:
        STARTS[name, tmpfs] = (await _start(name, world)).volume
        await world.head(HEADS[name][0])
    return world, SimDisk(STARTS[name, tmpfs].clone(), volatile=(MODEL,) if tmpfs else (), seed=seed)


async def _start(name: str, world: World) -> SimDisk:
    disk = SimDisk(Volume(), volatile=(MODEL,) if world.tmpfs else (), seed=SEED)
    if name != "first fetch":
        await first_fetch(world, disk)
    if name == "repair":
        for name, inode in disk.volume.files_in(MODEL).items():
            if name.endswith(".safetensors"):
                inode.data[-5] ^= 1
    if name == "replaced checkpoint":
        disk = disk.power_loss()
        survives = f"{STATE}/checkpoint-" if world.tmpfs else f"{MODEL}/model-"
        last = max(p for p in disk.volume.names if p.startswith(survives))
        disk.volume.names[last].data[-5] ^= 1
    if name in CUTS:
        step, commit, further = CUTS[name]
        await world.head(2)
        disk.crash_at = disk.effects + await _effects_to(step, commit, world.tmpfs) + further
        with pytest.raises(Crash):
            await repair(world, disk)
        disk = disk.kill()
    return disk


CUTS = {"recovery": ("follow", "sync change-", 3), "dense after a cut": ("dense", "rename pending.json", 1)}
"""Which scenario's first step was cut short before, the effect by which that step was decided, and how long after."""


async def _effects_to(name: str, commit: str, tmpfs: bool) -> int:
    """Effects of a step up to its commit."""
    world, disk = await prepared(name, tmpfs, SEED)
    await world.head(2)
    start = disk.effects
    await repair(world, disk)
    return next(n for n, what in enumerate(disk.trace[start:], 1) if what.startswith(commit))


@pytest.mark.parametrize("kind", ["kill", "power"])
@pytest.mark.parametrize("tmpfs", [False, True], ids=["disk", "tmpfs"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_effect(name: str, tmpfs: bool, kind: str) -> None:
    POINTS[name, tmpfs, kind] = asyncio.run(_every_effect(name, tmpfs, kind))


def test_covers_a_thousand_points() -> None:
    """Enough crash points in all, some in each scenario. One that has not run yet, whatever kept it, runs here."""
    for name, tmpfs, kind in itertools.product(SCENARIOS, (False, True), ("kill", "power")):
        if (name, tmpfs, kind) not in POINTS:
            POINTS[name, tmpfs, kind] = asyncio.run(_every_effect(name, tmpfs, kind))
    assert sum(POINTS.values()) >= 1000, POINTS
    assert min(POINTS.values()) > 0, POINTS


async def _every_effect(name: str, tmpfs: bool, kind: str) -> int:
    points = 0
    seen: set[object] = set()
    # What a crash leaves is drawn, so short scenarios are drawn more than once.
    for draw in range(2):
        world, disk = await prepared(name, tmpfs, SEED * 1000 + draw)
        known = None if name in EDITED else visible(disk)
        disk.forks = []
        await SCENARIOS[name](world, disk)
        assert visible(disk) == (HEADS[name][1], world.training.tensors(HEADS[name][1]))
        for at, (what, volume) in enumerate(disk.forks, 1):
            where = f"{name}, {'tmpfs' if tmpfs else 'disk'}, {kind} in effect {at} ({what}), draw {draw}, seed {SEED}"
            left = SimDisk(volume, volatile=disk.volatile, seed=(SEED * 1000 + draw) * 10_000 + at)
            left = left.kill() if kind == "kill" else left.power_loss()
            if _first_time(left, seen):
                await _recovered(name, world, left, known, where, seen)
        points += len(disk.forks)
        if points > 40:
            break
    return points


async def _recovered(
    name: str, world: World, disk: SimDisk, known: tuple[int, object] | None, where: str, seen: set[object]
) -> None:
    """From what a crash left: recovery alone, then (where that led to something new) on to the last version."""
    if name not in EDITED:
        check(world, visible(disk), known, where)

    # Recovery needs no store: what was decided is here.
    replica = await world.open(disk, Down())
    await replica.close()
    after = visible(disk)
    check(world, after, known, where)
    check_assets(world, disk, where)
    assert known is None or after is not None, f"nothing held after recovery: {where}"
    if _first_time(disk, seen):
        await _goes_on(name, world, disk, where)


def _first_time(disk: SimDisk, seen: set[object]) -> bool:
    key = disk.volume.key()
    new = key not in seen
    seen.add(key)
    return new


async def _goes_on(name: str, world: World, disk: SimDisk, where: str) -> None:
    """On to the last version, then another power loss."""
    await world.head(HEADS[name][1])
    counting = Counting(world.store)
    async with await world.open(disk, counting) as replica:
        assert await replica.catch_up() == world.training.positions[world.now], where
        await replica.checkpoint(force=True)
    assert visible(disk) == last_of(world), where
    disk = disk.power_loss()
    # That a copy is wrong is kept nowhere: who was killed before there was another one finds and refetches it again.
    known_wrong = name == "replaced checkpoint"
    async with await world.open(disk, counting if known_wrong else Down()) as replica:
        if known_wrong:
            await replica.catch_up()
        assert visible(disk) == last_of(world), f"lost at a later reboot: {where}"
    check_assets(world, disk, where)
    if name in FRUGAL:
        full = world.training.manifests[1].payload_bytes
        assert counting.read < full / 2, f"fetched {counting.read} bytes after recovery: {where}"


@pytest.mark.parametrize(
    ("switch_off", "name", "kind"),
    [
        (switches.no_log_sync, "follow", "power"),
        (switches.no_weight_sync, "follow", "power"),
        (switches.no_hiding, "follow", "kill"),
        (switches.no_boot_id, "follow", "power"),
        (switches.no_later_logs, "overlap", "power"),
    ],
)
def test_has_teeth(
    switch_off: Callable[[pytest.MonkeyPatch], None], name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a mechanism switched off the crashes above find a violation."""
    World.of(SHARES.get(name, (0.03, 0.03, 0.03)), tmpfs=False, drops=DROPS.get(name, 0))
    switch_off(monkeypatch)
    with pytest.raises((AssertionError, DamagedFiles)):
        asyncio.run(_every_effect(name, False, kind))


@pytest.mark.parametrize("fault", ["full", "sync"])
@pytest.mark.parametrize("name", ["first fetch", "follow", "dense"])
def test_every_effect_may_fail(name: str, fault: str) -> None:
    """No space, or a sync that fails, at each effect: the same agent goes on, then the power goes."""
    asyncio.run(_every_fault(name, fault))


async def _every_fault(name: str, fault: str) -> None:
    _, probe = await prepared(name, False, SEED)
    world, _ = await prepared(name, False, SEED)
    await SCENARIOS[name](world, probe)
    syncs = [n for n, what in enumerate(probe.trace, 1) if what.startswith("sync ") and "sync dir" not in what]
    for at in syncs if fault == "sync" else range(1, probe.effects + 1):
        world, disk = await prepared(name, False, SEED * 7919 + at)
        where = f"{name}, {fault} at effect {at} ({probe.trace[at - 1]}), WEIGHTCAST_SEED={SEED}"
        known = visible(disk)
        setattr(disk, {"full": "full_at", "sync": "fail_sync_at"}[fault], at)
        await world.head(HEADS[name][1])
        try:
            replica = await world.open(disk)
        except DiskError:
            replica = await world.open(disk)
        async with replica:
            for _ in range(3):
                check(world, visible(disk), known, where)
                try:
                    await replica.catch_up()
                    await replica.checkpoint(force=True)
                except DiskError:
                    continue
            assert await replica.catch_up() == world.training.positions[world.now], where
            assert visible(disk) == last_of(world), where
        disk = disk.power_loss()
        async with await world.open(disk, Down()):
            assert visible(disk) == last_of(world), f"lost after a reboot: {where}"


async def test_new_files_that_were_begun_do_not_stay_beside_logs() -> None:
    """They take the space of a whole model. Here after a sync that failed: in another boot that means nothing."""
    world = World.of((0.02, 0.02), tmpfs=False)
    await world.head(1)
    disk = SimDisk(Volume(), seed=SEED)
    await first_fetch(world, disk)
    await world.head(2)
    async with await world.open(disk) as replica:
        await replica.catch_up()
        disk.fail_sync_at = disk.effects + 4
        with pytest.raises(DiskError):
            await replica.checkpoint(force=True)
        await world.head(3)
        assert replica.position is not None
        await replica.tells(replica.position)
        with pytest.raises(EngineLoading):
            await replica.catch_up()
        replica.told()
    new = Places.of(MODEL).new
    disk.sync_dir(new)
    left = disk.power_loss()
    assert left.names(new)
    async with await world.open(left) as replica:
        await replica.catch_up()
    assert visible(left) == last_of(world)
    assert not left.names(new)


async def test_new_files_that_were_begun_do_not_replace_those_that_a_repair_hides() -> None:
    """The version in place has no copy yet; the next one stopped half-way; then an agent is killed in a repair."""
    world = World.of((0.9,), tmpfs=True)
    await world.head(1)
    disk = SimDisk(Volume(), volatile=(MODEL,), seed=SEED)
    store = Breaking(world.store)
    async with await world.open(disk, store) as replica:
        await replica.catch_up()
        await world.head(2)
        store.left = 1
        with pytest.raises(StoreUnavailable):
            await replica.catch_up()
        assert disk.names(Places.of(MODEL).new)
        replica._holding.hide()
        left = disk.kill()
    async with await world.open(left, Down()):
        assert visible(left) == (1, world.training.tensors(1))


@pytest.mark.parametrize("by_hand", ["removed", "replaced"])
async def test_a_file_that_was_put_back_is_there_after_a_power_loss(by_hand: str) -> None:
    """Removed: it was repaired. Replaced by an equal one: the next checkpoint rests on that."""
    world = World.of((0.02,), tmpfs=False)
    await world.head(1)
    disk = SimDisk(Volume(), seed=SEED)
    await first_fetch(world, disk)
    async with await world.open(disk) as replica:
        path, inode = next((p, i) for p, i in disk.volume.names.items() if p.endswith("2.safetensors"))
        disk.volume.put(path, None if by_hand == "removed" else Inode(bytearray(inode.data), written=True))
        if by_hand == "replaced":
            await world.head(2)
        await replica.catch_up()
        await replica.checkpoint(force=True)
    assert visible(disk) == last_of(world)
    for luck in range(20):
        left = SimDisk(disk.volume.clone(), seed=luck).power_loss()
        async with await world.open(left, Down()):
            assert visible(left) == last_of(world), f"lost at a reboot, SEED={luck}"

"""A sync that failed is never made good by another one: Linux takes the pages for clean, and only a power loss tells.

Here the agent is also killed right after it, so that nobody is left who saw it fail.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rollout_agent.errors import DamagedFiles, DiskFailed
from rollout_agent.places import Places
from rollout_agent.replica import Replica
from tests.rollout_agent import switches
from tests.rollout_agent.crashing import (
    MODEL,
    SEED,
    Breaking,
    World,
    first_fetch,
    last_of,
    visible,
    without_threads,
)
from tests.rollout_agent.simdisk import Crash, SimDisk, SimMap
from tests.rollout_agent.simvolume import Inode, Volume
from tests.rollout_agent.training import Down, Training
from weight_store.errors import StoreUnavailable
from weight_store.memory import MemoryStore

PLACES = Places.of(MODEL)


@pytest.fixture(autouse=True)
def no_threads(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    without_threads(monkeypatch, caplog)


class Fsyncgate(SimDisk):
    """Fails the first sync of a file that ``fails`` is true of, and the process ends before it does anything else."""

    fails: Callable[[str], bool] = staticmethod(lambda what: False)
    ends = True

    def effect(self, what: str) -> bool:
        if what.startswith("sync ") and not what.startswith("sync dir ") and self.fails(what):
            self.fails = lambda what: False
            self.fail_sync_at = self.effects + 1
        elif self.ends and self.effects == self.fail_sync_at:
            self.dead = True
        return super().effect(what)


async def at_version_1(shares: tuple[float, ...]) -> tuple[World, Fsyncgate]:
    world = World.of(shares, tmpfs=False)
    await world.head(1)
    disk = Fsyncgate(Volume(), seed=SEED)
    await first_fetch(world, disk)
    return world, disk


async def fails(disk: Fsyncgate, world: World, what: str) -> SimDisk:
    """Follow, with a sync of ``what`` failing; what the next agent finds."""
    replica = await world.open(disk)
    disk.fails = lambda found: found.startswith(f"sync {what}")
    with pytest.raises((Crash, DiskFailed)):
        await _follow(replica)
    disk.dead = True
    return disk.kill()


async def _follow(replica: Replica) -> None:
    await replica.catch_up()
    await replica.checkpoint(force=True)


async def lasts(world: World, disk: SimDisk) -> None:
    """The head is there after any power loss."""
    for luck in range(10):
        left = SimDisk(disk.volume.clone(), seed=luck).power_loss()
        async with await world.open(left, Down()):
            assert visible(left) == last_of(world), f"lost at a reboot, {luck}"


async def goes_on(world: World, disk: SimDisk) -> None:
    async with await world.open(disk) as replica:
        assert await replica.catch_up() == world.training.positions[world.now]
        await replica.checkpoint(force=True)
    assert visible(disk) == last_of(world)


async def of_a_log() -> None:
    world, disk = await at_version_1((0.02,))
    await world.head(2)
    left = await fails(disk, world, "change-")
    async with await world.open(left, Down()) as replica:
        # It reads as committed, and so it is carried out; an engine may load it.
        assert replica.position == world.training.positions[2]
    await lasts(world, left)


async def of_a_checkpoint() -> None:
    world, disk = await at_version_1((0.02,))
    await world.head(2)
    left = await fails(disk, world, "model-")
    await goes_on(world, left)
    await lasts(world, left)


async def of_new_files() -> None:
    world, disk = World.of((), tmpfs=False), Fsyncgate(Volume(), seed=SEED)
    await world.head(1)
    left = await fails(disk, world, "model-")
    await goes_on(world, left)
    await lasts(world, left)


CASES = [of_a_log, of_a_checkpoint, of_new_files]
SWITCHES = [switches.logs_synced_again, switches.no_note_of_syncs, switches.no_note_of_syncs]


@pytest.mark.parametrize("case", CASES)
async def test_who_comes_after_it_does_not_rely_on_it(case: Callable[[], object]) -> None:
    await case()  # type: ignore[misc]


@pytest.mark.parametrize(("case", "switch_off"), [*zip(CASES, SWITCHES, strict=True)])
async def test_has_teeth(
    case: Callable[[], object], switch_off: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    switch_off(monkeypatch)
    with pytest.raises((AssertionError, DamagedFiles)):
        await case()  # type: ignore[misc]


async def test_files_without_a_synced_version_are_not_checkpointed_while_no_store_is_there() -> None:
    world, disk = await at_version_1((0.02,))
    await world.head(2)
    left = await fails(disk, world, "model-")
    async with await world.open(left, Down()) as replica:
        assert replica.position == world.training.positions[2]
        await replica.checkpoint(force=True)
    await lasts(world, left)


async def test_only_later_deltas_are_fetched_to_write_files_anew() -> None:
    """Also where the ranks have changed since, and with them the groups."""
    store = MemoryStore()
    world = World(Training(store), store, tmpfs=False)
    for ranks, share in ((2, 1.0), (2, 0.02), (3, 0.02), (3, 0.02)):
        world.training.step(share)
        await world.training.publish(world=ranks)
    await world.head(1)
    disk = Fsyncgate(Volume(), seed=SEED)
    await first_fetch(world, disk)
    await world.head(2)
    left = await fails(disk, world, "model-")
    await world.head(4)
    async with await world.open(left) as replica:
        assert replica._holding.suspect
        await replica.catch_up()
        assert not replica._holding.suspect
        assert replica.fetched_bytes <= sum(world.training.manifests[version].payload_bytes for version in (3, 4))
    await lasts(world, left)


async def test_pages_that_were_lost_meanwhile_are_fetched() -> None:
    """What a failed sync left clean may be evicted, and is then read as it was before."""
    world, disk = await at_version_1((0.02, 0.02))
    await world.head(2)
    left = await fails(disk, world, "model-")
    for path, inode in left.volume.names.items():
        if path.endswith(".safetensors") and inode.durable is not None:
            inode.data[:] = inode.durable
    await world.head(3)
    await goes_on(world, left)
    await lasts(world, left)


async def test_of_repaired_files() -> None:
    """The same agent goes on."""
    world, disk = await at_version_1(())
    disk.ends = False
    async with await world.open(disk) as replica:
        await replica.catch_up()
        inode = next(i for p, i in disk.volume.names.items() if p.endswith("2.safetensors"))
        inode.data[-5] ^= 1
        inode.durable = bytes(inode.data)
        disk.fails = lambda what: True
        with pytest.raises(DiskFailed):
            await replica.repair()
        await _until_there(world, replica)
    await lasts(world, disk)


class WornOut(SimDisk):
    """Fails every sync of the files that are ``worn``."""

    worn: tuple[Inode, ...] = ()

    def map(self, path: Path, *, writable: bool) -> SimMap:
        mapped = super().map(path, writable=writable)
        return WornMap(self, path, mapped.inode) if any(mapped.inode is inode for inode in self.worn) else mapped


class WornMap(SimMap):
    def sync(self) -> None:
        self.inode.lose(self.disk.random)
        raise DiskFailed(f"sync of {self.path} failed")


async def test_files_whose_syncs_go_on_failing_are_replaced_not_repaired_again() -> None:
    world, disk = await at_version_1(())
    worn = WornOut(disk.kill().volume, seed=SEED)
    worn.worn = tuple(inode for path, inode in worn.volume.names.items() if path.endswith(".safetensors"))
    async with await world.open(worn) as replica:
        worn.worn[-1].data[-5] ^= 1
        with pytest.raises(DiskFailed):
            await replica.repair()
        worn.worn[-1].data[-5] ^= 1
        await _until_there(world, replica)
    await lasts(world, worn)


class NameNotSynced(SimDisk):
    """Fails the first sync of the directory in which ``pending.json`` has become the checkpoint."""

    renamed = failed = False

    def effect(self, what: str) -> bool:
        if self.renamed and not self.failed and what.startswith("sync dir "):
            self.fail_sync_at, self.failed = self.effects + 1, True
        self.renamed = what.startswith("rename pending.json ")
        return super().effect(what)


async def test_files_in_place_are_not_mixed_with_those_begun_after_their_record_failed_to_be_synced() -> None:
    world, first = await at_version_1((0.9, 0.9))
    disk, store = NameNotSynced(first.kill().volume, seed=SEED), Breaking(world.store)
    async with await world.open(disk, store) as replica:
        await world.head(2)
        with pytest.raises(DiskFailed):
            await replica.catch_up()
        await world.head(3)
        store.left = 1
        with pytest.raises(StoreUnavailable):
            await replica.catch_up()
        assert disk.names(PLACES.new)
    for luck in range(10):
        left = SimDisk(disk.volume.clone(), seed=luck).power_loss()
        async with await world.open(left, Down()):
            found = visible(left)
        assert found is not None, f"lost at a reboot, {luck}"
        assert found[0] == 2


async def _until_there(world: World, replica: Replica) -> None:
    assert await replica.catch_up() == world.training.positions[world.now]
    assert not replica.damage


async def test_a_checkpoint_that_was_given_up_is_not_taken_for_a_failed_one() -> None:
    world, disk = await at_version_1((0.02,))
    await world.head(2)
    replica = await world.open(disk)
    await replica.catch_up()
    saving = replica._holding.begin_checkpoint()
    assert saving is not None
    assert saving.step()
    assert disk.size(PLACES.syncing) is not None
    saving.close()
    assert disk.size(PLACES.syncing) is None
    await replica.close()
    async with await world.open(disk.kill()) as after:
        await after.catch_up()
        assert after.fetched_bytes == 0
        assert not after._holding.suspect

"""The steps that a walk is made of, each with how often it is taken."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from rollout_agent import gate
from rollout_agent.errors import NotWhole
from tests.rollout_agent.walk_bucket import go_round, put_back, spoil
from tests.rollout_agent.walk_checks import INCLUDES, wrong
from tests.rollout_agent.walk_disk import Inside, engine_files
from tests.rollout_agent.walk_harms import harm, leave_in_new
from tests.rollout_agent.walk_harms import remove as rm
from tests.rollout_agent.walk_runs import other_run

if TYPE_CHECKING:
    from tests.rollout_agent.walking import Walk


async def advance(walk: Walk) -> None:
    """The trainer publishes one version or some."""
    later = [version for version in walk.versions if version > walk.world.now]
    if later:
        await walk.world.head(later[min(len(later) - 1, walk.chance.choice((0, 0, 0, 1, 2)))])


async def catch_up(walk: Walk) -> None:
    """To the head, with no more fetched than the versions in between."""
    before, read = walk.open.position, walk.wire.read
    plain = before is not None and not walk.harms and not walk.suspect and walk.collected <= before.version
    plain = plain and not walk.spoilt and len(walk.includes) == 1
    good = await walk.attempt(walk.open.catch_up())
    there = gate.holds(walk.disk, walk.places) is not None
    assert before is None or walk.harms or walk.disk.faulted or there, f"lost {before}"
    if good and not walk.tmpfs:
        walk.includes = {walk.include}
    if plain and before is not None and not walk.disk.faulted:
        manifests = walk.world.training.manifests
        deltas = sum(m.payload_bytes for v, m in manifests.items() if before.version < v <= walk.world.now)
        read = walk.wire.read - read
        assert read <= deltas, f"fetched {read} bytes where {deltas} lead on from {before.version}"


async def follow(walk: Walk) -> None:
    await advance(walk)
    await catch_up(walk)


async def fail_a_sync(walk: Walk) -> None:
    """Of the next log, of weight files, or of a directory; mostly nobody lives to tell."""
    disk, chance = walk.disk, walk.chance
    walk.no_faults()
    disk.fail_sync_from, disk.fail_sync_of = disk.effects + 1, chance.choice(("change-", "model-", "dir "))
    if disk.fail_sync_of == "dir ":
        disk.fail_sync_from += chance.randrange(30)
    if chance.random() < 0.8:
        disk.ends_after_failing = 1 + int(chance.random() ** 6 * 30)
    walk.note(f"   {disk.fail_sync_of}, ends {disk.ends_after_failing} later")
    await follow(walk)
    await walk.attempt(walk.open.checkpoint(force=True))


async def checkpoint(walk: Walk) -> None:
    await walk.attempt(walk.open.checkpoint(force=walk.chance.random() < 0.7))


async def beside(walk: Walk) -> None:
    """Some of an agent's tasks at once, begun one after the other."""
    replica, chance = walk.open, walk.chance

    async def later(call: Callable[[], Awaitable[object]], turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        await call()

    async def goes_on() -> None:
        await advance(walk)
        await replica.catch_up()

    async def saves() -> None:
        await replica.checkpoint(force=True)

    calls = [goes_on, saves, *chance.choices((goes_on, saves, replica.check, replica.repair), k=chance.randrange(3))]
    turns = [int(chance.random() ** 2 * 60) for _ in calls]
    await walk.attempt(*(later(call, n) for call, n in zip(calls, turns, strict=True)))


async def look(walk: Walk) -> None:
    replica, chance = walk.open, walk.chance
    number = chance.randrange(8)
    await walk.attempt(chance.choice((replica.check, replica.repair, lambda: replica.scrub(number)))())


async def cancel(walk: Walk) -> None:
    """The agent is told to stop while it follows, and does or goes on."""
    await advance(walk)
    task = asyncio.ensure_future(walk.open.catch_up())
    for _ in range(int(walk.chance.random() ** 2 * 80)):
        await asyncio.sleep(0)
    task.cancel()

    async def ended() -> None:
        try:
            await task
        except asyncio.CancelledError:
            walk.note("   cancelled")

    await walk.attempt(ended())


async def reopen(walk: Walk) -> None:
    """An agent ends, another comes."""
    await walk.attempt(walk.open.close())
    walk.no_faults()
    if walk.chance.random() < 0.25:
        walk.include = walk.chance.choice(INCLUDES)
        walk.includes.add(walk.include)
        walk.note(f"   include {walk.include}")
    await walk.reopen()


async def power(walk: Walk) -> None:
    """The plug is pulled between two steps, or the agent killed."""
    walk.disk.dead = True


async def collect(walk: Walk) -> None:
    """What the newest full makes unnecessary is removed from the store."""
    full = walk.world.training.manifests[walk.world.now].full_version
    objects = walk.world.store._objects
    for version in [v for v in walk.versions if v < full]:
        for key in [key for key in objects if f"/v/{version:012d}/" in key]:
            del objects[key]
    walk.collected = max(walk.collected, full)


async def damage(walk: Walk) -> None:
    if walk.may_harm:
        done = harm(walk.disk.volume, walk.places, walk.chance)
        if done is not None:
            walk.note(f"   {done.path}: {done.what}")
            walk.harmed(done)


async def leave(walk: Walk) -> None:
    if walk.may_harm:
        done = leave_in_new(walk.disk.volume, walk.places, walk.chance)
        walk.note(f"   {done.path}: {done.what}")
        walk.harmed(done)


async def remove(walk: Walk) -> None:
    if walk.may_harm:
        if walk.disk.inside is not None:
            walk.disk.leaves()  # the lock that keeps its files still would be among it
        done = rm(walk.disk, walk.places, walk.chance)
        walk.note(f"   {done.path}: {done.what}")
        walk.harmed(done)


async def enter(walk: Walk) -> None:
    """An engine goes through the gate and loads for a while; one that is inside leaves."""
    disk, chance = walk.disk, walk.chance
    if disk.inside is not None:
        disk.leaves()
        return
    entered = gate.Visitor(disk, walk.places, verify=any(item.unseen for item in walk.harms)).enter()
    if entered is None or walk.reading is not None:
        return
    found = wrong(walk.world, entered[1].position.version, engine_files(disk.volume), walk.includes)
    assert not found, f"the gate lets an engine to {found}"
    disk.inside = Inside(polls := chance.randint(1, 6), chance.randrange(polls) if chance.random() < 0.4 else None)
    disk.still = None if walk.harms else engine_files(disk.volume)


async def tell(walk: Walk) -> None:
    """An engine is told of the version held, and reads it from now on."""
    position = walk.open.position
    if position is None or walk.reading is not None or walk.disk.inside is not None:
        return
    try:
        await walk.attempt(walk.open.tells(position))
    except NotWhole:
        return
    if walk.open.telling == position:
        walk.tells(position)


async def answer(walk: Walk) -> None:
    """The engine has read it all, and says so or refuses; or nobody says anything for now."""
    if walk.reading is None:
        return
    position = walk.world.training.positions[walk.reading]
    walk.answered()
    if walk.chance.random() < 0.8:
        await walk.attempt(_confirm(walk, position))
    await walk.attempt(_told(walk))


async def _confirm(walk: Walk, position: object) -> None:
    walk.open.confirm(position)  # type: ignore[arg-type]


async def _told(walk: Walk) -> None:
    walk.open.told()


async def settle(walk: Walk) -> None:
    walk.no_faults()
    await walk.settle()


OPERATIONS: dict[str, tuple[int, Callable[[Walk], Awaitable[None]]]] = {
    "advance": (10, advance),
    "catch up": (15, catch_up),
    "follow": (35, follow),
    "checkpoint": (12, checkpoint),
    "fail a sync": (12, fail_a_sync),
    "beside": (20, beside),
    "look": (5, look),
    "cancel": (6, cancel),
    "reopen": (6, reopen),
    "power": (6, power),
    "collect": (2, collect),
    "damage": (14, damage),
    "leave in new": (2, leave),
    "remove": (3, remove),
    "enter": (8, enter),
    "spoil": (8, spoil),
    "go round": (4, go_round),
    "put back": (1, put_back),
    "other run": (1, other_run),
    "tell": (6, tell),
    "answer": (12, answer),
    "settle": (3, settle),
}

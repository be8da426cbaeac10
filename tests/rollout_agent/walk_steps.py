"""The steps that a walk is made of, each with how often it is taken."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from rollout_agent.errors import NotWhole
from tests.rollout_agent.walk_harms import harm, leave_in_new

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
    await walk.attempt(walk.open.catch_up())
    if plain and before is not None:
        manifests = walk.world.training.manifests
        deltas = sum(m.payload_bytes for v, m in manifests.items() if before.version < v <= walk.world.now)
        read = walk.wire.read - read
        assert read <= deltas, f"fetched {read} bytes where {deltas} lead on from {before.version}"


async def follow(walk: Walk) -> None:
    await advance(walk)
    await catch_up(walk)


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
    walk.disk.crash_at = walk.disk.fail_sync_at = walk.disk.full_at = walk.disk.full_from = None
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


async def tell(walk: Walk) -> None:
    """An engine is told of the version held, and reads it from now on."""
    position = walk.open.position
    if position is None or walk.reading is not None:
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
    "beside": (20, beside),
    "look": (5, look),
    "cancel": (6, cancel),
    "reopen": (6, reopen),
    "power": (6, power),
    "collect": (2, collect),
    "damage": (14, damage),
    "leave in new": (2, leave),
    "tell": (6, tell),
    "answer": (12, answer),
    "settle": (3, settle),
}

"""The steps of a walk of a training job's side, and how often each is taken."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from tests.sim.collectors import MIN_AGE_S
from tests.trainer_agent import walk_clocks, walk_fleet, walk_links, walk_runs
from tests.trainer_agent.walk_jobs import WalkRank
from tests.trainer_agent.walk_world import DENSE, SMALL
from trainer_agent.state import STATE_FILE

if TYPE_CHECKING:
    from tests.trainer_agent.walking import Walk

PATIENCE_S = 60.0
"""How long a step waits for what it ordered; faults may last longer."""


async def publish_small(walk: Walk) -> None:
    """About a hundredth of the weights changes."""
    walk.launch.publish(SMALL)
    await walk.rest()


async def publish_dense(walk: Walk) -> None:
    """Most weights change, or all tensors but one stay."""
    walk.launch.publish(DENSE, walk.chance.choice(((), ("norm",), ("layers.0.a",))))
    await walk.rest()


async def publish_the_same(walk: Walk) -> None:
    """Nothing has changed."""
    walk.launch.publish(0.0)
    await walk.rest()


async def publish_in_a_row(walk: Walk) -> None:
    """The next one is ready before the last one is decided."""
    for _ in range(walk.chance.randint(2, 4)):
        walk.launch.publish(walk.chance.choice((SMALL, SMALL, 0.0)))
        await asyncio.sleep(walk.chance.choice((0.0, 0.3, 5.0)))
    await walk.rest()


async def publish_and_go_on(walk: Walk) -> None:
    """What befalls the job next, befalls it in the middle."""
    walk.launch.publish(SMALL)
    await asyncio.sleep(walk.chance.uniform(0.0, 0.5))


async def wait(walk: Walk) -> None:
    """Whatever goes on beside goes on."""
    await asyncio.sleep(walk.chance.choice((0.1, 1.0, 15.0)))


async def sidecar_dies(walk: Walk) -> None:
    """Now."""
    if walk.ranks:
        rank = walk.chance.choice(walk.ranks)
        walk.note(f"   {rank.node}")
        rank.sidecar.kill()
        walk.crashes += 1


async def sidecar_sleeps(walk: Walk) -> None:
    """Perhaps until its version has expired."""
    if walk.ranks:
        rank = walk.chance.choice(walk.ranks)
        process = rank.sidecar
        seconds = walk.chance.choice((1.0, 14.0, 30.0))
        walk.note(f"   {rank.node} for {seconds:g} s")
        walk.launch.publish(SMALL)
        await asyncio.sleep(walk.chance.uniform(0.0, 0.3))
        process.pause()
        await asyncio.sleep(seconds)
        process.resume()
        await walk.rest()


async def job_restarts(walk: Walk) -> None:
    """From a checkpoint."""
    walk.launch.kill()
    launch = walk.start_launch()
    launch.publish(walk.chance.choice((SMALL, 0.0)))
    await walk.rest()


async def job_becomes_a_zombie(walk: Walk) -> None:
    """Another takes over while it sleeps; then it wakes up and goes on."""
    old = walk.launch
    if len(walk.launches) > 2:
        return
    old.pause()
    walk.start_launch().publish(SMALL)
    await asyncio.sleep(walk.chance.choice((0.0, 0.3, 2.0)))
    if walk.chance.random() < 0.5:
        await walk.rest()
    old.resume()
    old.publish(SMALL)
    await walk.rest()


async def two_jobs_start(walk: Walk) -> None:
    """At once, beside one that runs."""
    if len(walk.launches) > 2:
        return
    for _ in range(2):
        walk.start_launch().publish(SMALL)
        await asyncio.sleep(walk.chance.choice((0.0, 0.1)))
    await walk.rest()


async def job_closes(walk: Walk) -> None:
    """In order, perhaps before all is decided; then it starts again."""
    launch = walk.launch
    launch.publish(SMALL)
    if walk.chance.random() < 0.5:
        await walk.rest()
    if launch.ended:
        return
    if launch.walkers:
        await launch.close(walk.chance.choice((0.0, 1.0, 30.0)))
    walk.start_launch().publish(SMALL)


async def job_sleeps(walk: Walk) -> None:
    """The whole machine, in the middle of a publication."""
    launch = walk.launch
    launch.publish(SMALL)
    await asyncio.sleep(walk.chance.uniform(0.0, 0.5))
    launch.pause()
    await asyncio.sleep(walk.chance.choice((1.0, 14.0, 30.0)))
    launch.resume()
    await walk.rest()


async def rank_skips_a_step(walk: Walk) -> None:
    """One rank's pieces cannot be published, and the others' are."""
    launch = walk.launch
    launch.skips = {walk.chance.randrange(launch.world_size)}
    launch.publish(SMALL)
    if walk.chance.random() < 0.5:
        await walk.rest()
    else:
        await walk.until(lambda: launch.published == launch.ordered or bool(launch.ended), 60.0)
    launch.skips = set()
    launch.publish(SMALL)
    await walk.rest()


async def layout_rots(walk: Walk) -> None:
    """A bit of what a later sidecar reads of the layout."""
    if ranks := [rank for rank in walk.ranks if rank.arena.files.get("layout")]:
        rank = walk.chance.choice(ranks)
        layout = bytearray(rank.arena.files["layout"])
        layout[walk.chance.randrange(len(layout))] ^= 1 << walk.chance.randrange(8)
        rank.arena.files["layout"] = bytes(layout)
        rank.sidecar.kill()
        walk.note(f"   {rank.node}")


async def rank_is_denied(walk: Walk) -> None:
    """The store refuses its shards for good."""
    if walk.ranks:
        rank = walk.chance.choice(walk.ranks)
        walk.note(f"   {rank.node}")
        walk.world.denied.add(rank.node)
        walk.launch.publish(SMALL)
        await walk.rest()
        if walk.chance.random() < 0.5:
            walk.world.denied.clear()
            walk.launch.publish(SMALL)
            await walk.rest()


async def state_rots(walk: Walk) -> None:
    """A bit of it, or all of it is gone; then the sidecar ends."""
    ranks = [rank for rank in walk.ranks if STATE_FILE in rank.arena.files and not rank.unsure]
    if ranks:
        rank = walk.chance.choice(ranks)
        rank.sidecar.kill()
        state = bytearray(rank.arena.files.pop(STATE_FILE))
        if walk.chance.random() < 0.5:
            state[walk.chance.randrange(len(state))] ^= 1 << walk.chance.randrange(8)
            rank.arena.files[STATE_FILE] = bytes(state)
        walk.note(f"   {rank.node}")


async def base_rots(walk: Walk) -> None:
    """A bit flips in the base."""
    ranks = [rank for rank in walk.ranks if rank.arena.slots and rank.desk._base_slot is not None]
    if ranks:
        rank = walk.chance.choice(ranks)
        _flip(walk, rank, rank.desk._base_slot or 0)


async def copy_rots(walk: Walk) -> None:
    """A bit flips in the copy that waits, once its digests are known."""
    walk.launch.publish(SMALL)
    ranks = walk.launch.walkers
    if await walk.until(lambda: any(rank.waiting is not None for rank in ranks), 3.0):
        rank = next(rank for rank in ranks if rank.waiting is not None)
        _flip(walk, rank, rank.waiting or 0)
    await walk.rest()


def _flip(walk: Walk, rank: WalkRank, slot: int) -> None:
    memory = rank.arena.slots[slot]
    memory[walk.chance.randrange(len(memory))] ^= 1 << walk.chance.randrange(8)
    rank.unsure = True
    walk.note(f"   a bit of slot {slot} of {rank.node}")


async def collect(walk: Walk) -> None:
    """Old versions go, perhaps those that a base is rebuilt from."""
    await walk.collect(walk.chance.choice((1, 1, 2, 3)))
    walk.unsure_bases = True
    if walk.chance.random() < 0.5:
        await asyncio.sleep(MIN_AGE_S)


async def coordinator_restarts(walk: Walk) -> None:
    """Killed, and started again later."""
    walk.stop_coordinator(walk.chance.randrange(len(walk.world.coordinators)))


async def coordinator_sleeps(walk: Walk) -> None:
    """In the middle of what it does."""
    process = walk.chance.choice(walk.world.coordinators).process
    process.pause()
    walk.later(0.5, 20.0, process.resume)


async def rank_is_cut_off(walk: Walk) -> None:
    """From the store or a coordinator, until the step's end."""
    if walk.ranks:
        rank = walk.chance.choice(walk.ranks)
        walk.world.network.cut(rank.node, walk.chance.choice(["store", *(c.node for c in walk.world.coordinators)]))
        walk.launch.publish(SMALL)
        await asyncio.sleep(walk.chance.uniform(0.5, 15.0))


OPERATIONS: dict[str, tuple[float, Callable[[Walk], Awaitable[None]]]] = {
    step.__name__: (weight, step)
    for weight, step in (
        (8.0, publish_small),
        (2.0, publish_dense),
        (1.5, publish_the_same),
        (4.0, publish_in_a_row),
        (5.0, publish_and_go_on),
        (2.0, wait),
        (3.0, sidecar_dies),
        (2.0, sidecar_sleeps),
        (3.0, job_restarts),
        (2.0, job_becomes_a_zombie),
        (0.7, two_jobs_start),
        (1.0, job_closes),
        (1.0, job_sleeps),
        (1.5, rank_skips_a_step),
        (0.7, layout_rots),
        (2.0, rank_is_denied),
        (1.5, state_rots),
        (1.0, base_rots),
        (1.0, copy_rots),
        (1.5, collect),
        (1.0, coordinator_restarts),
        (1.0, coordinator_sleeps),
        (1.5, rank_is_cut_off),
        *walk_clocks.STEPS,
        *walk_fleet.STEPS,
        *walk_links.STEPS,
        *walk_runs.STEPS,
    )
}

"""A region that falls far behind: it comes back many versions later, when what it would read next may be collected."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.sim.chaos import Chaos

LONGEST_S = 90.0
FEWEST, MOST = 8, 14


def region_falls_behind(chaos: Chaos) -> None:
    """One agent stops reading until eight versions or more were sealed, or nobody seals any."""
    if chaos.behind is None:
        chaos.behind = asyncio.ensure_future(_fall_behind(chaos))


async def _fall_behind(chaos: Chaos) -> None:
    world = chaos.world
    agent = chaos.chance.choice(world.agents)
    deadline_s = world.loop.time() + LONGEST_S
    while not agent.served and world.loop.time() < deadline_s:  # noqa: ASYNC110 - a model has no events
        await asyncio.sleep(0.5)
    goal = len(world.model.sealed) + chaos.chance.randint(FEWEST, MOST)
    world.note(f"{agent.node} falls behind")
    # Either its machine sleeps, or it goes on asking and gets no answer.
    asleep = chaos.chance.random() < 0.5
    while len(world.model.sealed) < goal and world.loop.time() < deadline_s:
        if asleep:
            agent.process.pause()
        else:
            world.network.cut(agent.node, "store")
        await asyncio.sleep(0.5)
    agent.process.resume()
    world.network.heal(agent.node, "store")
    world.note(f"{agent.node} comes back")


FAULTS = ()
RARE = (region_falls_behind,)

"""What comes late: a decision, long after what it rests on was read; a region, many versions later, when what it would
read next may be collected.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from weight_store.records import record_format
from weight_store.version import Abort

if TYPE_CHECKING:
    from tests.sim.chaos import Chaos

LONGEST_S = 90.0
FEWEST, MOST = 8, 14


def coordinator_sleeps_as_it_decides(chaos: Chaos) -> None:
    """Others go on meanwhile, and may decide otherwise."""
    process = chaos.chance.choice(chaos.world.coordinators).process
    any_decision = chaos.chance.random() < 0.3

    def sleep(decision: bytes) -> None:
        if any_decision or record_format(decision) == Abort.FORMAT:
            process.deciding = None
            if chaos.world.chaotic:
                process.pause()
                chaos.world.note(f"{process} sleeps before its decision")
                chaos.later(0.5, 16.0, process.resume)
                # Whose silence it decides about may wake first.
                for rank in (launch.ranks[number].sidecar for launch, number in chaos.ranks()):
                    chaos.later(0.0, 5.0, rank.resume)

    process.deciding = sleep


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


FAULTS = (coordinator_sleeps_as_it_decides,)
RARE = (region_falls_behind,)

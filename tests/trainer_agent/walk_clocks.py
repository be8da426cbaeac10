"""Clocks of single machines are set, leap ahead, and stand still while their machine is suspended."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tests.sim.loop import Process

if TYPE_CHECKING:
    from tests.trainer_agent.walking import Walk

WRONG_S = (0.0, 11.0, 120.0, 1000.0, 3600.0, 50_000.0)


def _some_node(walk: Walk) -> str:
    """As often a coordinator's as any machine's."""
    if walk.chance.random() < 0.5:
        return walk.chance.choice(walk.world.coordinators).node
    return walk.chance.choice(list(walk.world.clocks))


async def clock_is_set(walk: Walk) -> None:
    """Forwards or backwards, by hand or by a time server that is wrong, in the middle of a publication."""
    node = _some_node(walk)
    wrong_s = walk.chance.choice(WRONG_S) * walk.chance.choice((-1.0, 1.0))
    walk.note(f"   {node}'s goes {wrong_s:g} s wrong")
    walk.launch.publish(0.0)
    await asyncio.sleep(walk.chance.uniform(0.0, 0.5))
    walk.world.clock(node).wrong_s = wrong_s - walk.world.store_ahead_s
    await walk.rest()


async def clock_leaps(walk: Walk) -> None:
    """As after a virtual machine has moved: everything seems to have taken long."""
    node = _some_node(walk)
    walk.note(f"   {node}'s")
    walk.world.clock(node).leap(walk.chance.choice((5.0, 60.0, 7200.0)))
    walk.model.leapt |= any(node == coordinator.node for coordinator in walk.world.coordinators)


async def machine_is_suspended(walk: Walk) -> None:
    """It does not know for how long."""
    machines: list[tuple[str, Process]] = [(rank.node, rank.sidecar) for rank in walk.ranks]
    machines += [(coordinator.node, coordinator.process) for coordinator in walk.world.coordinators]
    node, process = walk.chance.choice(machines)
    if process.paused:
        return
    walk.note(f"   {node}")
    walk.launch.publish(0.0)
    clock = walk.world.clock(node)
    clock.stop()
    process.pause()

    def wake() -> None:
        clock.go_on()
        process.resume()

    walk.later(0.5, 30.0, wake)


STEPS = ((1.0, clock_is_set), (0.5, clock_leaps), (0.5, machine_is_suspended))

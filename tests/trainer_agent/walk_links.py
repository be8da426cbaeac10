"""Sidecars that end again and again, until they are not started any more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.sim.errors import Violation
from tests.trainer_agent.walk_world import SMALL

if TYPE_CHECKING:
    from tests.trainer_agent.walking import Walk

GIVEN_UP_S = 60.0


async def sidecar_keeps_dying(walk: Walk) -> None:
    """Whatever it begins with. Training goes on, each step says why it is not published, and a new job publishes."""
    await walk.until(lambda: bool(walk.ranks), 1.0, 0.1)
    if not walk.ranks:
        return
    rank = walk.chance.choice(walk.ranks)
    launch = next(launch for launch in walk.launches if rank in launch.walkers)
    walk.note(f"   {rank.node}")
    effects = 1 + int(walk.chance.random() ** 2 * 6)
    rank.effects.set(1, after=walk.chance.random() < 0.5, again=lambda: effects)
    launch.publish(SMALL)
    if not await walk.until(lambda: rank.link.gave_up or bool(launch.ended), GIVEN_UP_S):
        return
    rank.effects.at = None
    if launch.ended:
        return
    launch.publish(SMALL)
    await walk.until(lambda: launch.idle, GIVEN_UP_S)
    last = rank.handles[-1] if rank.handles else None
    if not launch.ended and (last is None or last.error is None or last.error.code != "sidecar-failed"):
        raise Violation(f"{rank.node} has no sidecar any more and is told {last}")
    if walk.chance.random() < 0.7:
        launch.kill()
        walk.start_launch().publish(SMALL)
        await walk.rest()


STEPS = ((0.7, sidecar_keeps_dying),)

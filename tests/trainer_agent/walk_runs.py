"""A run is deleted, and another one of its name begins while whoever trained the former still lives."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tests.sim.model import RUN
from tests.sim.store import at_once
from tests.trainer_agent.walk_world import SMALL
from weight_store.keys import head_key, run_marker_key

if TYPE_CHECKING:
    from tests.trainer_agent.walking import Walk

FATES = ("ends", "sleeps", "lives")
CLEAR_S = 12.0
"""Longer than any request is under way."""


async def run_begins_again(walk: Walk) -> None:
    """By another launch; those of the former run end now, or never hear of it but by being refused."""
    for coordinator in walk.world.coordinators:
        coordinator.process.resume()
    old = walk.launches
    for launch in old:
        launch.publish(SMALL)
    await asyncio.sleep(walk.chance.uniform(0.0, 0.5))
    for launch in old:
        {"ends": launch.kill, "sleeps": launch.pause, "lives": lambda: None}[walk.chance.choice(FATES)]()
    for _ in range(2):  # again, for what was being written
        _delete_everything(walk)
        await asyncio.sleep(CLEAR_S)
    _delete_everything(walk)
    for launch in walk.launches[2:]:
        launch.kill()
    new = walk.start_launch()
    for _ in range(walk.chance.choice((1, 2, 4))):
        new.publish(SMALL)
        await walk.rest()
    for launch in old:
        launch.resume()
        if walk.chance.random() < 0.5:
            launch.publish(SMALL)
    await walk.rest()


def _delete_everything(walk: Walk) -> None:
    bucket = walk.world.bucket
    keys = [entry.key for entry in bucket.list(f"{RUN}/")]
    for key in [head_key(RUN), run_marker_key(RUN), *keys]:
        at_once(bucket._store.delete(key))
    walk.forget_run()


STEPS = ((0.7, run_begins_again),)

"""Runs in miniature for random walks: versions of every kind in an order that chance has chosen, made once each."""

from __future__ import annotations

import asyncio
import functools
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from tests.rollout_agent.crashing import TINY, World
from tests.rollout_agent.training import OTHER_RUN_ID, RUN_ID, Training
from weight_store.memory import MemoryStore

COURSES = 32
"""How many there are. A walk takes one of them. Those with higher numbers are of another run of the same name."""
VERSIONS = 12
ASSETS = {"config.json": b'{"model_type": "tiny", "n": %d}', "tokenizer.json": b"[%d]", "more.txt": b"%d"}
"""What each may be changed to."""


def course(number: int, *, tmpfs: bool) -> World:
    """Course ``number`` with a store of its own; its head leads to the first version."""
    store, training = _published(number)
    own = MemoryStore()
    own._objects = dict(store._objects)
    return World(replace(training, store=own), own, tmpfs)


@functools.cache
def _published(number: int) -> tuple[MemoryStore, Training]:
    with ThreadPoolExecutor(1) as thread:  # an event loop may be running here
        return thread.submit(lambda: asyncio.run(_publish(number))).result()


async def _publish(number: int) -> tuple[MemoryStore, Training]:
    chance = random.Random(number)
    store = MemoryStore()
    run_id = RUN_ID if number < COURSES else OTHER_RUN_ID
    training = Training(store, specs=TINY, aliases={}, run_id=run_id, seed=number)
    await training.publish()
    while training.published < VERSIONS:
        if chance.random() < 0.15:
            await training.extra_full(training.position.version)
        await _next(training, chance)
    return store, training


async def _next(training: Training, chance: random.Random) -> None:
    """A step, mostly a small one; at times by another launch, with other assets, or after numbers that were aborted."""
    training.step(chance.choices((0.0, 0.02, 0.05, 0.9), (1, 12, 2, 6))[0])
    if chance.random() < 0.15:
        training.aborted = chance.randint(1, 2)
    if chance.random() < 0.15:
        training.term += 1
        training.world = chance.choice([world for world in (1, 2, 3) if world != training.world])
        training.fulls.clear()  # those are of other ranks
    if chance.random() < 0.1:
        names = chance.sample(sorted(ASSETS), chance.randint(1, 3))
        kept = {} if chance.random() < 0.3 else training.assets
        config = {"config.json": training.assets["config.json"]}
        training.assets = config | kept | {name: ASSETS[name] % training.published for name in names}
    lost_base = chance.randrange(training.world) if chance.random() < 0.1 else None
    await training.publish(full=lambda group: group.owner == lost_base)

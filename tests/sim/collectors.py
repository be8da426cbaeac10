"""Garbage collections of one run: one or two beside each other, each as a timer would start them again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.sim.loop import Process
from weight_store.errors import WeightStoreError
from weight_store.gc import Collector, Wish

if TYPE_CHECKING:
    from tests.sim.world import World

MIN_AGE_S = 10.0
DISTRUST = frozenset({"control", "head", "open", "manifest", "receipt"})
"""Of these a collection may get wrong bytes, and delete nothing because of them."""


class SimCollector:
    """One machine on which collections run."""

    def __init__(self, world: World, number: int) -> None:
        self._world = world
        self.node = f"gc-{number}"
        self.process = Process(self.node)
        self.start()

    def start(self) -> None:
        """Start anew; nothing is remembered of what was under way."""
        self.process.kill()
        self.process = Process(self.node)
        self.process.spawn(self._collect_for_ever())

    async def _collect_for_ever(self) -> None:
        world, process = self._world, self.process
        while True:
            await process.sleep(world.chance.uniform(4.0, 16.0))
            collector = Collector(
                world.store(process, self.node, distrust=DISTRUST),
                world.run,
                min_age_s=MIN_AGE_S,
                nonce=world.nonce,
                sleep=process.sleep,
            )
            try:
                await collector.collect(Wish(keep_versions=world.chance.choice((1, 2, 3))), wait=False)
            except WeightStoreError as error:
                world.note(f"{self.node} ends: {error.code}")

"""Collections die and sleep in the middle of what they do; what they sent may still arrive."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.sim.chaos import Chaos


def collection_dies(chaos: Chaos) -> None:
    """And the next one begins with nothing."""
    found = chaos.chance.choice(chaos.world.collectors)
    chaos.world.note(f"{found.node} is killed")
    found.process.kill()
    chaos.later(0.0, 6.0, lambda: None if found.process.alive else found.start())


def collection_sleeps(chaos: Chaos) -> None:
    """Longer than the minimum age, sometimes: what it has read is then long past."""
    found = chaos.chance.choice(chaos.world.collectors).process
    found.pause()
    chaos.world.note(f"{found} sleeps")
    chaos.later(0.5, 25.0, found.resume)


FAULTS = (collection_dies, collection_sleeps)
RARE = ()

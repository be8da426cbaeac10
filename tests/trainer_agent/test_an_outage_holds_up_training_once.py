"""An outage holds up training for as long as the Publisher was told, once and not at every step."""

from __future__ import annotations

from tests.trainer_agent.walk_world import SMALL
from tests.trainer_agent.walking import Walk, walk
from trainer_agent.errors import StillUndecided


async def nothing_is_heard_for_a_while(walk: Walk) -> None:
    launch = walk.start_launch(world_size=1, max_wait_s=30.0)
    launch.publish(SMALL)
    await walk.rest()
    (rank,) = launch.walkers
    rank.sidecar.pause()
    began_s = walk.world.loop.time()
    for _ in range(6):
        launch.publish(SMALL)
    assert await walk.until(lambda: len(rank.handles) == 7, 200.0)
    assert all(isinstance(handle.error, StillUndecided) for handle in rank.handles[2:])
    assert 30.0 <= walk.world.loop.time() - began_s < 40.0
    rank.sidecar.resume()
    await walk.rest()
    assert rank.handles[1].error is None


def test_not_at_every_step() -> None:
    walk(1, play=nothing_is_heard_for_a_while)

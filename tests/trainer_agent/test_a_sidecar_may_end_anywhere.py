"""kill -9 of a sidecar at each of its requests, messages and writes, before it has taken effect and after."""

from __future__ import annotations

import pytest

from tests.trainer_agent.walk_world import SMALL
from tests.trainer_agent.walking import Walk, walk

FEWEST = 40
"""Effects of a rank from its first publication to its third, fulls beside them."""


async def publish(walk: Walk, times: int) -> None:
    for _ in range(times):
        walk.launch.publish(SMALL)
        assert await walk.until(lambda: walk.launch.idle, 60.0)


@pytest.mark.parametrize(("after", "part_bytes"), [(False, 900), (True, 0)], ids=["before", "after"])
def test_what_was_published_is_sealed_wherever_a_sidecar_ends(after: bool, part_bytes: int) -> None:
    at = 0
    ended = True

    async def play(walk: Walk) -> None:
        """A base, a delta whose full is uploaded beside the next version, and a version that shows it."""
        nonlocal ended
        walk.world.full_every, walk.world.bucket.part_bytes = 1, part_bytes
        launch = walk.start_launch(world_size=1, max_wait_s=100.0)
        await publish(walk, 1)
        (rank,) = launch.walkers
        rank.effects.set(at, after=after)
        await publish(walk, 3)
        ended = rank.effects.at is None
        assert all(handle.error is None for handle in rank.handles)

    while ended:
        at += 1
        walk(3, play=play)
    assert at > FEWEST


def test_a_full_that_was_being_uploaded_is_begun_again() -> None:
    async def play(walk: Walk) -> None:
        walk.world.full_every, walk.world.bucket.part_bytes = 2, 900
        launch = walk.start_launch(world_size=1, max_wait_s=100.0)
        await publish(walk, 2)
        (rank,) = launch.walkers
        assert rank.worker is not None
        assert rank.worker.full is not None
        rank.sidecar.kill()
        await publish(walk, 1)
        assert await walk.until(lambda: rank.worker.full is None, 60.0)  # type: ignore[union-attr]
        await publish(walk, 1)
        head = walk.model.head
        assert head is not None
        assert walk.model._manifest(head.position).full_version == 2

    walk(3, play=play)

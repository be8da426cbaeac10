"""kill -9 of a sidecar at each of its requests, messages and writes, before it has taken effect and after."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from tests.trainer_agent.silent import attached_desk
from tests.trainer_agent.walk_world import SMALL
from tests.trainer_agent.walking import Walk, walk
from trainer_agent.messages import AskServing, Attached, Served

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


def test_a_question_is_put_to_the_next_sidecar_too(tmp_path: Path) -> None:
    desk, arena, tell = attached_desk(tmp_path)
    sent: list[object] = cast("Any", desk)._link.sent

    def asked(times: int) -> AskServing:
        deadline_s = time.monotonic() + 60
        while len(sent) < times and time.monotonic() < deadline_s:
            time.sleep(0.005)
        question = sent[times - 1]
        assert isinstance(question, AskServing)
        return question

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(desk._ask_serving, 3, ("eu",), 1.0, 600.0)
        first = asked(1)
        tell(Attached(run_id="x", term=1, base_slot=None, full_slot=None))
        assert asked(2) == first
        tell(Served(id=first.id, reached=False, error="the coordinator does not answer"))
        tell(Served(id=asked(3).id, reached=True))
        assert answer.result(60)
    arena.remove()

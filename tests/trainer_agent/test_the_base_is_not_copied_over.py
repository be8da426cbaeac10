"""A base that was rebuilt for a version is kept although the version is given up: the next copy goes beside it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.trainer_agent.silent import attached_desk
from tests.trainer_agent.walk_jobs import WalkRank
from tests.trainer_agent.walk_world import SMALL
from tests.trainer_agent.walking import Walk, walk
from trainer_agent import background
from trainer_agent.background import FullUpload
from trainer_agent.errors import StillUndecided
from trainer_agent.messages import Attached, BaseRebuilt, FullDone
from trainer_agent.state import STATE_FILE


async def publish(walk: Walk) -> str | None:
    """Publish; what it failed with."""
    walk.launch.publish(SMALL)
    (rank,) = walk.launch.walkers
    await walk.rest()
    error = rank.handles[-1].error
    return None if error is None else error.code


async def lose_the_base_twice(walk: Walk) -> None:
    """Once from memory; and what is rebuilt is for a version that is given up."""
    launch = walk.start_launch(world_size=1)
    await walk.until(lambda: bool(launch.walkers), 10.0)
    (rank,) = launch.walkers
    assert await publish(walk) is None
    while rank.desk._base_slot != 0:
        assert await publish(walk) is None
    rank.arena.files.pop(STATE_FILE)
    rank.sidecar.kill()
    walk.world.denied.add(rank.node)
    assert await publish(walk) == "publication-failed"
    walk.world.denied.clear()
    assert await publish(walk) is None
    stats = rank.handles[-1].stats
    assert stats is not None
    assert stats.damaged_groups == 0
    assert stats.payload_bytes < stats.weight_bytes / 4


def test_the_next_copy_goes_beside_a_base_that_was_rebuilt() -> None:
    walk(1, play=lose_the_base_twice)


async def never(*_: Any, **__: Any) -> None:
    """A full of which the upload takes its time."""
    await asyncio.Event().wait()


@asynccontextmanager
async def full_goes_up(walk: Walk, *, every: int) -> AsyncIterator[tuple[WalkRank, FullUpload]]:
    """Inside, the only rank of a job uploads a full without an end, of the first version that is due to have one."""
    walk.world.full_every = every
    launch = walk.start_launch(world_size=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(background, "send_shard", never)
        await walk.until(lambda: bool(launch.walkers), 10.0)
        assert [await publish(walk), await publish(walk)] == [None, None]
        (rank,) = launch.walkers
        assert rank.worker is not None
        assert rank.worker.full is not None
        yield rank, rank.worker.full


async def lose_the_base_of_a_full(walk: Walk) -> None:
    """While it is being read."""
    async with full_goes_up(walk, every=2) as (rank, _):
        worker = rank.worker
        assert worker is not None
        worker.save(worker.state.model_copy(update={"base": None}))
        worker.emit(BaseRebuilt(base_slot=None))
        await asyncio.sleep(1.0)
        assert await publish(walk) is None
        assert worker.full is None


def test_no_base_is_rebuilt_where_a_full_is_read_from() -> None:
    walk(1, play=lose_the_base_of_a_full)


async def seal_while_a_full_goes_up(walk: Walk) -> None:
    """Each version is due to have a full."""
    async with full_goes_up(walk, every=1) as (rank, full):
        assert await publish(walk) is None
        assert rank.worker is not None
        assert rank.worker.full is full
        assert rank.desk._full_slot == full.slot
    rank.sidecar.kill()  # the next one uploads it in no time


def test_one_full_goes_up_at_a_time() -> None:
    walk(1, play=seal_while_a_full_goes_up)


def test_no_copy_goes_where_a_full_is_read_from(tmp_path: Path) -> None:
    desk, arena, tell = attached_desk(tmp_path)
    for slot in (0, 1):
        tell(Attached(run_id="x", term=1, base_slot=None, full_slot=slot))
        assert desk.wait_for_slot(0) == 1 - slot
    tell(Attached(run_id="x", term=1, base_slot=0, full_slot=1))
    tell(FullDone(slot=0))
    with pytest.raises(StillUndecided, match="a full is still being uploaded"):
        desk.wait_for_slot(0)
    tell(FullDone(slot=1))
    assert desk.wait_for_slot(0) == 1
    arena.remove()

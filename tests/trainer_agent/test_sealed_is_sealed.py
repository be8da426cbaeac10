"""A version that is sealed is never told to have failed, whatever its rank can still learn about its own part."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from coordinator.errors import UnknownTerm
from tests.sim.model import RUN
from tests.trainer_agent.silent import attached_desk
from tests.trainer_agent.walk_world import SMALL
from tests.trainer_agent.walking import Walk, walk
from trainer_agent.messages import Failed, Opened, Sealed
from trainer_agent.shard import find_receipt
from weight_store.keys import manifest_key, receipt_key
from weight_store.memory import MemoryStore
from weight_store.receipt import SHARD_MAGIC, Receipt
from weight_store.store import Blob


async def lose(walk: Walk, key: str) -> None:
    """The sidecar ends before it hears of the seal; the next one finds the object collected."""
    walk.world.full_every = 1
    launch = walk.start_launch(world_size=1)
    launch.publish(SMALL)
    assert await walk.until(lambda: launch.idle, 60.0)
    (rank,) = launch.walkers
    launch.publish(SMALL)
    assert await walk.until(lambda: rank.handles[-1].version == 2, 10.0)
    bucket = walk.world.bucket
    assert await walk.until(lambda: bucket.read(receipt_key(RUN, 2, 0)) is not None, 10.0, every_s=0.001)
    rank.sidecar.pause()
    assert await walk.until(lambda: 2 in walk.world.model.sealed, 30.0)
    rank.sidecar.kill()
    lost = bucket._store._objects.pop(key)
    await walk.rest()
    bucket._store._objects[key] = lost
    assert rank.handles[-1].error is None


@pytest.mark.parametrize("key", [receipt_key(RUN, 2, 0), manifest_key(RUN, 2)], ids=["receipt", "manifest"])
def test_a_version_is_sealed_although_something_of_it_was_collected(key: str) -> None:
    walk(1, play=partial(lose, key=key))


async def refuse_the_report(walk: Walk) -> None:
    """By a coordinator that has read an older head; it looks for the receipt of itself later."""

    async def refuse(*_: Any) -> None:
        nonlocal refused
        refused += 1
        raise UnknownTerm("the run is in term 0 and never had term 1")

    refused = 0
    launch = walk.start_launch(world_size=1)
    launch.publish(SMALL)
    await walk.rest()
    (rank,) = launch.walkers
    assert rank.worker is not None
    rank.worker.coordinator.report_receipt = refuse  # type: ignore[method-assign]
    launch.publish(SMALL)
    await walk.rest()
    assert [handle.error for handle in rank.handles] == [None, None]
    assert refused == 1


def test_a_version_is_sealed_although_the_report_of_its_receipt_was_refused() -> None:
    walk(1, play=refuse_the_report)


async def damage_the_register(walk: Walk) -> None:
    """Somebody's hand, until somebody else's mends it."""
    launch = walk.start_launch(world_size=1)
    launch.publish(SMALL)
    await walk.rest()
    (rank,) = launch.walkers
    assert rank.worker is not None
    told: list[str] = []
    rank.worker.patience.tell = told.append
    launch.publish(SMALL)
    assert await walk.until(lambda: rank.handles[-1].version == 2, 10.0, every_s=0.001)
    objects = walk.world.bucket._store._objects
    objects[manifest_key(RUN, 2)] = (b"{}", *objects[manifest_key(RUN, 1)][1:])
    await asyncio.sleep(100.0)
    assert f"version 2: {manifest_key(RUN, 2)} is not a weightcast record" in told[-1]
    assert not rank.handles[-1].done
    del objects[manifest_key(RUN, 2)]
    await walk.rest()
    assert rank.handles[-1].error is None
    assert not told[-1]


def test_a_version_is_not_told_to_have_failed_while_it_may_be_sealed() -> None:
    walk(1, play=damage_the_register)


def test_what_is_told_of_one_publication_is_told_of_no_other(tmp_path: Path) -> None:
    desk, arena, tell = attached_desk(tmp_path)
    handle = desk.new_handle(1, step=1)
    desk.publish(handle, slot=0, copy_s=0)
    tell(Opened(ordinal=0, version=7))
    tell(Sealed(ordinal=0, version=7, position=None, base_slot=None, full_slot=None))
    tell(Failed(ordinal=0, code="version-aborted", message="given up"))
    assert not handle.done
    assert handle.version is None
    tell(Sealed(ordinal=1, version=8, position=None, base_slot=None, full_slot=None))
    assert handle.sealed(0) == 8
    arena.remove()


class Flipping(MemoryStore):
    """The first reading has a bit that flipped."""

    flipped = False

    async def get(self, key: str, *, max_bytes: int) -> Blob:
        blob = await super().get(key, max_bytes=max_bytes)
        if self.flipped:
            return blob
        self.flipped = True
        return Blob(blob.data.replace(b'"nonce":"0', b'"nonce":"1'), blob.etag)


async def test_the_receipt_that_is_reported_was_not_read_wrong() -> None:
    store = Flipping()
    receipt = Receipt(
        run_id="00000000-0000-4000-8000-00000000000a", version=1, rank=0, parent={"version": 0, "sha256": "0" * 64},
        layout="0" * 64, nonce="0" * 16, shard_bytes=len(SHARD_MAGIC), sizes=(), changed=(), digests="",
        blocks="0" * 64,
    )  # fmt: skip
    await store.create(receipt_key("r", 1, 0), receipt.to_bytes())
    assert await find_receipt(store, "r", 1, 0) == (receipt, receipt.to_bytes())
    assert store.flipped

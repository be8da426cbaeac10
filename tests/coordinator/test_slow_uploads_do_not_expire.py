"""A version expires when nobody works on it any more, however long that takes, whichever coordinator was told."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.errors import BadRequest, Fenced, UnknownVersion
from coordinator.wire import ProgressReport, VersionAnswer
from weight_store.keys import receipt_key, sign_key


async def moves(job: Any, opened: VersionAnswer, rank: int, at: Any = None) -> VersionAnswer:
    client = (at or job).client
    return await client.report_progress("demo", opened.version, rank, ProgressReport(term=job.term.term))


async def state(node: Any, version: int = 1) -> str:
    await node.tick()
    return (await node.client.version("demo", version)).state


async def test_it_lives_as_long_as_a_rank_reports_progress(job: Any, place: Any, node: Any) -> None:
    opened = await job.open(step=1)
    await job.receipt(opened, 0)
    for _ in range(200):  # an hour and more
        place.clock.advance(20)
        assert (await moves(job, opened, 1)).state == "undecided"
        await node.tick()
    assert (await job.receipt(opened, 1)).state == "sealed"


async def test_it_expires_after_the_last_sign(job: Any, place: Any, node: Any) -> None:
    opened = await job.open(step=1)
    for _ in range(10):
        place.clock.advance(20)
        await moves(job, opened, 1)
    place.clock.advance(119)
    assert await state(node) == "undecided"
    place.clock.advance(1)
    assert await state(node) == "aborted"
    assert (await moves(job, opened, 1)).state == "aborted"


async def test_a_receipt_is_a_sign_of_life(job: Any, place: Any, node: Any) -> None:
    opened = await job.open(step=1)
    place.clock.advance(100)
    await job.receipt(opened, 0)
    place.clock.advance(119)
    assert await state(node) == "undecided"
    place.clock.advance(1)
    assert await state(node) == "aborted"


async def test_a_rank_whose_receipt_is_there_keeps_nothing_alive(job: Any, place: Any, node: Any) -> None:
    opened = await job.open(step=1)
    await job.receipt(opened, 0)
    for _ in range(6):
        place.clock.advance(20)
        await moves(job, opened, 0)
    assert await state(node) == "aborted"


async def test_the_other_coordinator_learns_of_it_from_the_bucket(job: Any, place: Any, node: Any) -> None:
    """Rank 0 talks to one and is done, rank 1 to the other and is slow; neither gives the version up."""
    other = await place.node()
    opened = await job.open(step=1)
    assert await state(other) == "undecided"
    await job.receipt(opened, 0)
    for _ in range(100):
        place.clock.advance(20)
        await moves(job, opened, 1, at=other)
        assert await state(node) == await state(other) == "undecided"

    third = await place.node()  # started empty in the middle
    for _ in range(20):
        place.clock.advance(20)
        await moves(job, opened, 1, at=other)
        assert await state(third) == await state(node) == "undecided"

    for at in (node, other) * 10:  # the balancer sends it here and there
        place.clock.advance(20)
        await moves(job, opened, 1, at=at)
        assert await state(third) == await state(node) == await state(other) == "undecided"

    fourth = await place.node()  # started empty too, and the only one that is told from now on
    for _ in range(20):
        place.clock.advance(20)
        await moves(job, opened, 1, at=fourth)
        assert await state(third) == "undecided"


async def test_a_rank_that_dies_takes_the_version_with_it_everywhere(job: Any, place: Any, node: Any) -> None:
    other = await place.node()
    opened = await job.open(step=1)
    assert await state(other) == "undecided"
    for _ in range(10):
        place.clock.advance(20)
        await moves(job, opened, 1, at=other)
        await node.tick()
    place.clock.advance(120)
    assert await state(other) == await state(node) == "aborted"


async def test_without_the_other_the_bucket_alone_lets_it_expire(job: Any, place: Any, node: Any) -> None:
    other = await place.node()
    opened = await job.open(step=1)
    await node.tick()
    for _ in range(10):
        place.clock.advance(20)
        await moves(job, opened, 1, at=other)
        await node.tick()
    for _ in range(12):  # ``other`` is gone: what it left is looked at once more, then it is over
        place.clock.advance(20)
        await node.tick()
    assert await state(node) == "aborted"


async def test_quick_versions_leave_no_sign(job: Any, place: Any) -> None:
    opened = await job.open(step=1)
    place.clock.advance(29)
    await moves(job, opened, 1)
    await job.receipt(opened, 0)
    await job.receipt(opened, 1)
    assert [entry.key async for entry in place.store.list("demo/v/000000000001/signs/")] == []


async def test_signs_are_few(job: Any, place: Any) -> None:
    opened = await job.open(step=1)
    for _ in range(600):
        place.clock.advance(1)
        await moves(job, opened, 0)
        await moves(job, opened, 1)
    left = [entry.key async for entry in place.store.list("demo/v/000000000001/signs/")]
    assert left == [sign_key("demo", 1, number) for number in range(20)]


async def test_reports_that_make_no_sense(job: Any, place: Any, node: Any) -> None:
    opened = await job.open(step=1)
    with pytest.raises(BadRequest, match="rank 7 is outside the world of 2"):
        await moves(job, opened, 7)
    with pytest.raises(UnknownVersion):
        await moves(job, opened.model_copy(update={"version": 9}), 1)
    await place.job(node, "launch-b").start()
    with pytest.raises(Fenced, match="launch-b took the run over"):
        await moves(job, opened, 1)


async def test_a_receipt_that_agrees_with_its_report_is_read_once(job: Any, place: Any) -> None:
    opened = await job.open(step=1)
    key = receipt_key("demo", 1, 0)
    reads = Reads(place.store, key)
    counting = await place.node(store=reads)
    sha256 = await job.write_receipt(opened, 0)
    assert (await job.report(opened, 0, sha256, at=counting.client)).receipts == 1
    assert reads.count == 1

    doubting = await place.node(store=(again := Reads(place.store, key)))
    assert (await job.report(opened, 0, "0" * 64, at=doubting.client)).receipts == 1
    assert again.count == 2


class Reads:
    """Counts how often one object is read."""

    def __init__(self, store: Any, key: str) -> None:
        self._store = store
        self._key = key
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def get(self, key: str, *, max_bytes: int) -> Any:
        self.count += key == self._key
        return await self._store.get(key, max_bytes=max_bytes)

"""A version is sealed in as few requests as there can be: a trainer and every region wait for them one by one."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from coordinator import decisions
from coordinator.ambient import Settings
from coordinator.decisions import CreateOpen, CreateRegister, ReplaceHead, Slot, View
from coordinator.errors import BucketUnavailable, CoordinatorError
from coordinator.wire import HeadAnswer, WithdrawalReport
from tests.coordinator.passing import Passing
from weight_store.errors import StoreUnavailable
from weight_store.keys import parse_key
from weight_store.reading import read_head
from weight_store.store import Blob


class Counting(Passing):
    """Notes each request: what it does, and to which kind of object."""

    def __init__(self, store: Any) -> None:
        super().__init__(store)
        self.requests: list[str] = []

    async def get(self, key: str, *, max_bytes: int) -> Blob:
        self.requests.append(f"get {parse_key(key).kind}")
        return await self._store.get(key, max_bytes=max_bytes)

    async def create(self, key: str, data: bytes) -> str:
        self.requests.append(f"create {parse_key(key).kind}")
        return await self._store.create(key, data)

    async def replace(self, key: str, data: bytes, *, etag: str) -> str:
        self.requests.append(f"replace {parse_key(key).kind}")
        return await self._store.replace(key, data, etag=etag)


async def test_a_version_is_opened_and_sealed_in_few_requests(place: Any) -> None:
    store = Counting(place.store)
    job = await place.job(await place.node(store)).start()
    await job.publish(step=1)
    first = await job.client.head("demo")

    store.requests.clear()
    opened = await job.open(step=2)
    assert store.requests == ["get head", "get open", "create open"]
    await job.receipt(opened, 0)
    store.requests.clear()
    sealed = await job.receipt(opened, 1)
    # What is read is read side by side.
    assert sorted(store.requests[:-2]) == ["get head", "get manifest", "get receipt"]
    assert store.requests[-2:] == ["create manifest", "replace head"]
    assert sealed.state == "sealed"
    assert sealed.parent == first.position
    assert (await job.client.head("demo")).position == sealed.position
    assert (await read_head(place.store, "demo"))[0].position == sealed.position


async def test_what_was_given_up_is_not_read_again(job: Any, place: Any) -> None:
    """Nor by a coordinator that did not write it: a job may give up many numbers before it seals one."""
    for step in range(3):
        opened = await job.open(step=step, ordinal=step)
        await job.client.withdraw("demo", opened.version, 0, WithdrawalReport(term=1, code="code", sentence="sentence"))
    elsewhere = await place.node(store := Counting(place.store))
    await elsewhere.client.head("demo")
    store.requests.clear()
    await elsewhere.client.head("demo")
    assert store.requests == ["get head", "get open"]


@pytest.mark.parametrize("down", [False, True])
async def test_those_who_ask_at_the_same_time_share_what_is_read(job: Any, place: Any, down: bool) -> None:
    """A failure too: a crowd must not queue for a time-out each."""

    class Slow(Counting):
        async def get(self, key: str, *, max_bytes: int) -> Blob:
            blob = await super().get(key, max_bytes=max_bytes)
            await asyncio.sleep(0.01)
            if down:
                raise StoreUnavailable("no answer", key=key)
            return blob

    node = await place.node(store := Slow(place.store))
    asked = [node.client.head("demo") for _ in range(20)]
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert {type(one) for one in found} == {BucketUnavailable if down else HeadAnswer}
    assert 1 <= store.requests.count("get head") <= 3  # a reading counts only with a second one


async def test_a_run_in_which_nothing_happens_is_looked_at_seldom(place: Any) -> None:
    node = await place.node(store := Counting(place.store))
    job = await place.job(node).start()
    await job.publish(step=1)

    async def looks() -> int:
        found = 0
        for _ in range(120):
            place.clock.advance(1)
            store.requests.clear()
            await node.tick()
            found += "get head" in store.requests
        return found

    place.clock.advance(30)  # since somebody asked last
    assert await looks() == 2
    await job.open(step=2)
    assert await looks() == 120


async def test_receipts_that_nobody_reported_are_looked_for_a_few_at_a_time(place: Any) -> None:
    job = await place.job(await place.node(), world_size=5).start()
    opened = await job.open(step=1)
    other = await place.node(store := Counting(place.store), Settings(max_probes=2))
    for _ in range(4):
        store.requests.clear()
        await other.tick()
        assert store.requests.count("get receipt") == 2
    for rank in (3, 4):
        await job.write_receipt(opened, rank)
    for _ in range(3):
        await other.tick()
    assert (await other.client.version("demo", 1)).missing == (0, 1, 2)


async def test_what_a_write_led_to_is_what_a_reading_finds(
    place: Any, node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every acknowledged step of a run's life, given up versions included."""
    after, seen = decisions.after, []

    def noted(view: View, step: Any, position: Any) -> View | None:
        found = after(view, step, position)
        seen.append((type(step), found))
        return found

    monkeypatch.setattr(decisions, "after", noted)
    job = await place.job(node).start()
    await job.publish(step=1)
    run, _ = node.service.registry.get("demo")

    async def check(kind: type) -> None:
        assert seen[-1][0] is kind
        read = await run.bucket.view()
        assert read is not None
        assert seen[-1][1] == read[0]

    await check(ReplaceHead)
    await job.open(step=2)
    await check(CreateOpen)
    place.clock.advance(121)
    await node.tick()
    await check(CreateRegister)
    assert run.view is not None
    assert (run.view.slot, run.view.given_up.version) == (Slot(3), 2)
    job.published += 1
    await job.publish(step=3)
    await check(ReplaceHead)


async def test_what_was_seen_last_may_be_out_of_date(job: Any, place: Any) -> None:
    """The last receipt comes to a coordinator that has not heard of the takeover: nothing is sealed on the new term."""
    first = await job.publish(step=1)
    opened = await job.open(step=2)
    await job.receipt(opened, 0)
    elsewhere = await place.node()
    later = await place.job(elsewhere, "launch-b").start()
    late = await job.receipt(opened, 1)
    assert (late.state, late.reason.split(":")[0]) == ("aborted", "fenced")
    head, _ = await read_head(place.store, "demo")
    assert (head.term, head.position) == (2, first.position)
    third = await later.publish(step=2)
    assert (third.version, third.parent, third.state) == (3, first.position, "sealed")


async def test_a_decision_made_elsewhere_stands(job: Any, place: Any) -> None:
    """A version was given up behind the back of the coordinator that gets the last receipt."""
    opened = await job.open(step=1)
    await job.receipt(opened, 0)
    place.clock.advance(121)
    elsewhere = await place.node()
    await elsewhere.tick()
    place.clock.advance(121)
    await elsewhere.tick()
    late = await job.receipt(opened, 1)
    assert (late.state, late.missing) == ("aborted", (1,))
    assert (await read_head(place.store, "demo"))[0].position.version == 0


@pytest.mark.parametrize("report", ["withdrawal", "last receipt", "both receipts"])
async def test_a_run_that_was_made_anew_is_not_decided_for_the_one_before(place: Any, node: Any, report: str) -> None:
    """Somebody deleted the run and began it again behind the back of a coordinator."""
    old = await place.job(node).start()
    await old.open(step=1)
    for key in [entry.key async for entry in place.store.list("")]:
        await place.store.delete(key)
    elsewhere = await place.node()
    new = await place.job(elsewhere, "launch-b").start()
    opened = await new.open(step=1)
    if report == "withdrawal":
        with contextlib.suppress(CoordinatorError):
            await node.client.withdraw("demo", 1, 0, WithdrawalReport(term=1, code="code", sentence="sentence"))
        reported = False
    else:
        await new.receipt(opened, 0, at=node.client if report == "both receipts" else None)
        await new.receipt(opened, 1, at=node.client)
        reported = True
    for _ in range(2):
        await elsewhere.tick()
    state = (await new.client.version("demo", 1)).state
    register = [entry.key async for entry in place.store.list("demo/") if parse_key(entry.key).kind == "manifest"]
    assert state == ("sealed" if reported else "aborted" if register else "undecided")
    assert (await node.client.version("demo", 1)).run_id == opened.run_id


async def test_a_run_made_anew_while_a_rank_waits_is_not_opened_for_the_one_before(place: Any, node: Any) -> None:
    old = await place.job(node).start()
    run, _ = node.service.registry.get("demo")
    async with run._lock:
        waiting = asyncio.ensure_future(old.open(step=1))
        for _ in range(1000):
            if run._lock._waiters:
                break
            await asyncio.sleep(0)
        assert run._lock._waiters
        for key in [entry.key async for entry in place.store.list("")]:
            await place.store.delete(key)
        new = await place.job(await place.node(), "launch-b").start()
        await node.client.head("demo")
    with contextlib.suppress(CoordinatorError):
        await waiting
    assert (await new.publish(step=1)).state == "sealed"

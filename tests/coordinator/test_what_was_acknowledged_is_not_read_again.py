"""A version is sealed in as few requests as there can be: a trainer and every region wait for them one by one."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator import decisions
from coordinator.decisions import CreateOpen, CreateRegister, ReplaceHead, Slot, View
from tests.coordinator.passing import Passing
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
    assert store.requests == ["get receipt", "create manifest", "replace head"]
    assert sealed.state == "sealed"
    assert sealed.parent == first.position
    assert (await job.client.head("demo")).position == sealed.position
    assert (await read_head(place.store, "demo"))[0].position == sealed.position


async def test_what_a_write_led_to_is_what_a_reading_finds(
    place: Any, node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every acknowledged step of a run's life, given up versions included."""
    after, seen = decisions.after, []

    def noted(view: View, step: Any) -> View | None:
        found = after(view, step)
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

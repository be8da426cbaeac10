"""The event stream: one sequence for all coordinators, resumable by id at any of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from coordinator import events
from coordinator.ambient import Settings
from coordinator.client import Event, _events
from coordinator.errors import UnknownRun
from coordinator.events import EventId
from tests.coordinator.passing import Passing
from weight_store.errors import StoreUnavailable
from weight_store.keys import manifest_key
from weight_store.store import Blob


class Stream:
    """Reads events of a service without a socket (httpx's ASGI transport would wait for the end of the stream)."""

    def __init__(self, chunks: AsyncIterator[str]) -> None:
        self._events = _events(self._lines(chunks), "")

    @staticmethod
    async def _lines(chunks: AsyncIterator[str]) -> AsyncIterator[str]:
        async for chunk in chunks:
            for line in chunk.split("\n")[:-1]:
                yield line

    async def next(self) -> Event:
        return await asyncio.wait_for(anext(self._events), 20)

    async def take(self, count: int) -> list[str]:
        """``name id`` of the next events that have an id of their own."""
        return [f"{event.name} {event.id}" for event in [await self.next() for _ in range(count)]]


async def stream(node: Any, after: str = "", run: str = "demo") -> Stream:
    return Stream(await node.service.events(run, EventId.parse(after) if after else None))


async def history(job: Any, place: Any, node: Any) -> None:
    """Versions 1 and 3 sealed, 2 aborted, 4 undecided."""
    await job.publish(step=1)
    await job.open(step=2)
    place.clock.advance(121)
    await node.tick()
    job.published += 1
    await job.publish(step=2)
    await job.open(step=3)


LIFE = ["opened 1.1", "sealed 1.2", "opened 2.1", "aborted 2.2", "opened 3.1", "sealed 3.2", "opened 4.1"]


async def test_the_life_of_a_run_is_one_sequence(job: Any, place: Any, node: Any) -> None:
    await history(job, place, node)
    for coordinator in (node, await place.node()):
        for seen, event in enumerate(LIFE):
            resumed = await stream(coordinator, after=event.split(" ")[1])
            assert await resumed.take(len(LIFE) - seen - 1) == LIFE[seen + 1 :]


async def test_a_first_connection_begins_with_the_head(job: Any, place: Any, node: Any) -> None:
    await history(job, place, node)
    assert await (await stream(node)).take(2) == ["sealed 3.2", "opened 4.1"]
    assert await (await stream(node, after="99.1")).take(1) == ["sealed 3.2"]  # an id of a run that was replaced


async def test_events_come_as_things_happen(job: Any, node: Any) -> None:
    listening = await stream(node)
    waiting = asyncio.create_task(listening.take(3))
    await asyncio.sleep(0.01)
    await job.publish(step=1)
    await job.open(step=2)
    assert await waiting == ["opened 1.1", "sealed 1.2", "opened 2.1"]


async def test_what_another_coordinator_does_is_told_too(job: Any, place: Any, node: Any) -> None:
    waiting = asyncio.create_task((await stream(node)).take(2))
    await asyncio.sleep(0.01)
    await node.tick()
    place.clock.advance(40)  # nobody asked anything here since
    there = (await place.node()).client
    opened = await job.open(step=1, at=there)
    for rank in (0, 1):
        await job.receipt(opened, rank, at=there)
    await node.tick()
    assert await asyncio.wait_for(waiting, 20) == ["opened 1.1", "sealed 1.2"]


async def test_an_event_says_what_a_version_is(job: Any, node: Any) -> None:
    sealed = await job.publish(step=7)
    event = await (await stream(node)).next()
    data = json.loads(event.data)
    assert (data["version"], data["step"], data["state"]) == (1, 7, "sealed")
    assert data["position"]["sha256"] == sealed.position.sha256


async def test_changes_in_a_region_are_told_without_an_id(job: Any, beat: Any, place: Any, node: Any) -> None:
    sealed = await job.publish(step=1)
    await job.client.heartbeat("demo", "eu-west", "a", beat(job.term.run_id, sealed.position))
    listening = await stream(node)
    assert (await listening.next()).name == "sealed"
    event = await listening.next()
    assert (event.name, event.id) == ("regions", "1.2")  # the last id stays: resuming goes on after it
    assert json.loads(event.data)["regions"][0]["staged"] == 1


async def test_silence_is_broken_by_comments(place: Any) -> None:
    node = await place.tended(settings=Settings(keep_alive_s=0.05))
    await place.job(node).start()
    chunks = await node.service.events("demo", None)
    assert await asyncio.wait_for(anext(chunks), 20) == events.KEEP_ALIVE
    assert await asyncio.wait_for(anext(chunks), 20) == ": keep-alive\n\n"
    await chunks.aclose()


async def test_a_stream_outlives_an_outage_of_the_store(job: Any, place: Any, node: Any) -> None:
    class Down(Passing):
        down = False

        async def get(self, key: str, *, max_bytes: int) -> Blob:
            if self.down:
                raise StoreUnavailable("no answer", key=key)
            return await super().get(key, max_bytes=max_bytes)

    await history(job, place, node)
    away = await place.node(store := Down(place.store))
    begun, first = await stream(away), await stream(away, after="1.1")
    store.down = True
    assert await begun.take(1) == ["sealed 3.2"]  # known without asking
    waiting = asyncio.create_task(first.take(1))
    await asyncio.sleep(0.01)
    store.down = False
    assert await waiting == ["sealed 1.2"]


@pytest.mark.parametrize("left", [b"damaged", None], ids=["damaged", "deleted"])
async def test_what_is_damaged_or_deleted_is_a_gap(left: bytes | None, job: Any, place: Any, node: Any) -> None:
    await history(job, place, node)
    await place.store.delete(manifest_key("demo", 2))
    if left is not None:
        await place.store.create(manifest_key("demo", 2), left)
    listening = await stream(await place.node(), after="2.1")
    assert (await listening.next()).name == "gap"
    assert await listening.take(2) == ["sealed 3.2", "opened 4.1"]


async def test_a_stream_ends_when_the_coordinator_stops(job: Any, node: Any) -> None:
    chunks = await node.service.events("demo", None)
    waiting = asyncio.create_task(anext(chunks))
    await asyncio.sleep(0.01)
    node.service.registry.stop_waiting()
    with pytest.raises(StopAsyncIteration):
        await waiting


async def test_a_run_that_is_not_there_has_no_events(node: Any) -> None:
    with pytest.raises(UnknownRun):
        async for _ in node.client.events("nothing"):
            pass


async def test_who_missed_too_much_is_told_of_the_gap(job: Any, node: Any, monkeypatch: Any) -> None:
    for step in range(5):
        await job.publish(step)
    monkeypatch.setattr(events, "MAX_REPLAY", 2)
    listening = await stream(node, after="1.2")
    gap = await listening.next()
    assert (gap.name, json.loads(gap.data)) == ("gap", {"until": "5.1"})
    assert (await listening.next()).id == "5.2"


@pytest.mark.parametrize(
    "text", ["", "1", "1.3", "1.2 ", "-1.1", "1.1\n", "9999999999999.1", "a.1", "01.2", "\u0663.1"]
)
def test_ids_that_we_never_gave_out(text: str) -> None:
    assert EventId.parse(text) is None
    assert EventId.parse("12.1") == EventId(12, 1)
    assert str(EventId(12, 1)) == "12.1"

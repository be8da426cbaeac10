"""Heartbeats, what they amount to, and waiting for a version to arrive."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from pydantic import ValidationError

from coordinator import registry
from coordinator.ambient import Settings
from coordinator.client import CoordinatorClient
from coordinator.errors import Refused, TooBusy, UnknownRun, UnknownVersion, VersionAborted, WrongRun
from coordinator.fleet import Room, reached
from coordinator.waking import Broadcast
from coordinator.wire import AgentReport, RegionVersion, TermRequest
from weight_store.control import Control
from weight_store.keys import control_key
from weight_store.position import Position


async def test_a_version_tells_how_far_each_region_is(job: Any, beat: Any, place: Any) -> None:
    first = await job.publish(step=1)
    second = await job.publish(step=2)
    run_id, client = job.term.run_id, job.client
    await client.heartbeat("demo", "eu-west", "a", beat(run_id, second.position, second.position))
    await client.heartbeat("demo", "eu-west", "b", beat(run_id, second.position, first.position))
    await client.heartbeat("demo", "us-east", "a", beat(run_id))
    await client.heartbeat("demo", "ap-south", "a", beat(run_id, first.position, second.position))
    place.clock.advance(3)
    regions = (await client.version("demo", 2)).regions
    assert regions == (
        RegionVersion(region="ap-south", agents=1, staged=1, serving=1, lag_versions=0, lag_s=0),
        RegionVersion(region="eu-west", agents=2, staged=2, serving=1, lag_versions=1, lag_s=3),
        RegionVersion(region="us-east", agents=1, staged=0, serving=0, lag_versions=2, lag_s=3),
    )
    older = (await client.version("demo", 1)).regions[1]
    assert (older.serving, older.lag_versions, older.lag_s) == (2, 0, 0)
    await job.open(step=3)
    assert (await client.version("demo", 3)).regions == ()  # nobody can have what is not sealed


async def test_an_agent_that_falls_silent_stops_counting(job: Any, beat: Any, place: Any, node: Any) -> None:
    sealed = await job.publish(step=1)
    await job.client.heartbeat("demo", "eu-west", "a", beat(job.term.run_id, sealed.position, ttl_s=10))
    place.clock.advance(10)
    assert (await job.client.regions("demo"))[0].agents[0].age_s == 10
    place.clock.advance(1)
    assert await job.client.regions("demo") == []
    await node.tick()
    run, _ = node.service.registry.get("demo")
    assert len(run.agents) == 0


async def test_targets_of_the_control_object_are_shown(job: Any, place: Any) -> None:
    control = Control(run_id=job.term.run_id, targets={"eu-west": 3}, write_id="0" * 16)
    await place.store.create(control_key("demo"), control.to_bytes())
    (region,) = await job.client.regions("demo")
    assert (region.region, region.target, region.agents) == ("eu-west", 3, ())


async def test_agents_of_another_run_of_the_same_name_are_told(job: Any, beat: Any) -> None:
    with pytest.raises(WrongRun, match="agent a holds weights of run 0000"):
        await job.client.heartbeat("demo", "eu-west", "a", beat("00000000-0000-4000-8000-000000000000"))


async def test_the_number_of_agents_is_bounded(job: Any, place: Any, beat: Any) -> None:
    small = await place.node(settings=Settings(room=Room(agents=3, region_agents=2, regions=2)))

    async def report(region: str, agent: str) -> None:
        await small.client.heartbeat("demo", region, agent, beat(job.term.run_id))

    for agent in ("a", "b", "a"):
        await report("eu-west", agent)
    with pytest.raises(TooBusy, match="2 agents report from region eu-west already"):
        await report("eu-west", "c")
    await report("us-east", "a")
    with pytest.raises(TooBusy, match="3 agents report to this coordinator already"):
        await report("us-east", "b")
    place.clock.advance(31)
    await small.tick()
    for region in ("eu-west", "us-east"):
        await report(region, "c")
    with pytest.raises(TooBusy, match="2 regions report already: ap-south is not counted"):
        await report("ap-south", "a")
    await report("us-east", "d")


async def test_the_number_of_event_streams_is_bounded(job: Any, place: Any) -> None:
    await job.publish(step=1)
    small = await place.node(settings=Settings(max_streams=1))
    first = await small.service.events("demo", None)
    await anext(first)
    with pytest.raises(TooBusy, match="1 event streams are open already"):
        await small.service.events("demo", None)
    await first.aclose()
    await small.service.events("demo", None)


async def test_names_that_nobody_has_leave_no_trace(
    job: Any, beat: Any, node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "MAX_RUNS", 3)
    await node.client.heartbeat("demo", "eu-west", "a", beat(job.term.run_id))
    for number in range(10):
        with pytest.raises(UnknownRun):
            await node.client.run(f"no-{number}")
    assert [region.region for region in await node.client.regions("demo")] == ["eu-west"]  # the others are known still


@pytest.mark.parametrize(
    ("region", "agent"), [("EU", "a"), ("eu west", "a"), ("eu", "a b"), ("eu", "../x"), ("..", "a"), ("eu", "a" * 129)]
)
async def test_names_are_checked(job: Any, beat: Any, region: str, agent: str) -> None:
    with pytest.raises(Refused):
        await job.client.heartbeat("demo", region, agent, beat(job.term.run_id))


@pytest.mark.parametrize("ttl_s", [0, -1, 3601])
def test_nobody_counts_for_ever_without_a_word(ttl_s: float, beat: Any) -> None:
    with pytest.raises(ValidationError, match="ttl_s"):
        beat("00000000-0000-4000-8000-000000000001", ttl_s=ttl_s)


async def test_waiting_ends_when_the_regions_have_the_version(job: Any, beat: Any) -> None:
    opened = await job.open(step=1)
    run_id, client = job.term.run_id, job.client
    await client.heartbeat("demo", "eu-west", "a", beat(run_id))
    waiting = asyncio.create_task(client.wait("demo", 1, regions=["eu-west", "us-east"], timeout_s=60))
    await asyncio.sleep(0.01)
    await job.receipt(opened, 0)
    sealed = await job.receipt(opened, 1)
    for region in ("eu-west", "us-east"):
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await client.heartbeat("demo", region, "a", beat(run_id, sealed.position, sealed.position))
    answer = await waiting
    assert answer.reached
    assert [region.serving for region in answer.regions] == [1, 1]


async def test_waiting_tells_how_far_it_came(job: Any, beat: Any) -> None:
    sealed = await job.publish(step=1)
    await job.client.heartbeat("demo", "eu-west", "a", beat(job.term.run_id, sealed.position))
    assert (await job.client.wait("demo", 1, state="sealed")).reached
    assert (await job.client.wait("demo", 1, state="staged")).reached
    serving = await job.client.wait("demo", 1)
    assert (serving.reached, serving.regions[0].staged, serving.regions[0].serving) == (False, 1, 0)
    assert not (await job.client.wait("demo", 1, state="staged", regions=["elsewhere"])).reached
    assert not (await job.client.wait("demo", 2, state="sealed")).reached


async def test_a_coordinator_that_has_just_started_takes_no_half_of_a_fleet_for_all(
    job: Any, beat: Any, place: Any
) -> None:
    first, second = await job.publish(step=1), await job.publish(step=2)
    client = (await place.node()).client

    async def report(agent: str, position: Any) -> None:
        await client.heartbeat("demo", "eu-west", agent, beat(job.term.run_id, position, position))

    await report("a", second.position)
    assert not (await client.wait("demo", 2)).reached
    assert (await client.wait("demo", 2, state="sealed")).reached
    await report("b", first.position)
    place.clock.advance(20)
    await report("a", second.position)
    await report("b", first.position)
    assert not (await client.wait("demo", 1)).reached
    place.clock.advance(10)
    assert (await client.wait("demo", 1)).reached
    assert not (await client.wait("demo", 2)).reached


async def test_news_wake_those_who_wait_and_nobody_who_comes_later() -> None:
    """Who waits for a version asks again at all news: they must not come without end."""
    news = Broadcast()
    news.notify()
    waiting = asyncio.ensure_future(news.wait(60))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not waiting.done()
    news.notify()
    await waiting
    news.close()
    await news.wait(60)


async def test_waiting_for_a_coordinator_that_has_just_started_ends_once_it_knows(job: Any, place: Any) -> None:
    sealed = await job.publish(step=1)
    node = await place.node()
    agent = AgentReport(run_id=job.term.run_id, state="serving", staged=sealed.position, serving=sealed.position)
    await node.client.heartbeat("demo", "eu-west", "a", agent)
    run, _ = node.service.registry.get("demo")
    run.agents.complete_s = place.clock() + 0.02
    waiting = asyncio.create_task(node.client.wait("demo", 1, timeout_s=60))
    await asyncio.sleep(0)
    place.clock.advance(0.02)
    assert (await waiting).reached


async def test_waiting_for_what_was_given_up_is_an_error(job: Any, place: Any, node: Any) -> None:
    await job.open(step=1)
    waiting = asyncio.create_task(job.client.wait("demo", 1, timeout_s=60))
    await asyncio.sleep(0.01)
    place.clock.advance(59)
    await node.tick()
    run, _ = node.service.registry.get("demo")
    place.clock.advance(62)
    await node.tick()
    with pytest.raises(VersionAborted, match="expired"):
        await waiting
    assert run.view.slot.version == 2


@pytest.mark.parametrize(
    ("serving", "agents", "quorum", "enough"),
    [
        (1, 1, 1.0, True),
        (9, 10, 1.0, False),
        (7, 10, 0.7, True),
        (6, 10, 0.7, False),
        (0, 10, 0.01, False),
        (0, 0, 1, False),
    ],
)
def test_a_quorum_is_a_share_of_the_live_agents(serving: int, agents: int, quorum: float, enough: bool) -> None:
    region = RegionVersion(region="eu", agents=agents, staged=0, serving=serving, lag_versions=0, lag_s=0)
    assert reached([region], "serving", [], quorum) is enough
    assert not reached([region], "serving", ["eu", "us"], quorum)
    assert not reached([], "serving", [], quorum)


async def test_long_polls_end_when_there_is_news(job: Any, place: Any) -> None:
    opened = await job.open(step=1)
    head = asyncio.create_task(job.client.head("demo", after=0, wait_s=60))
    version = asyncio.create_task(job.client.version("demo", 1, wait_s=60))
    await asyncio.sleep(0.01)
    assert not head.done()
    await job.receipt(opened, 0)
    sealed = await job.receipt(opened, 1)
    assert (await head).position == (await version).position == sealed.position
    assert (await job.client.head("demo", after=1)).position == sealed.position  # no news: answers all the same
    with pytest.raises(UnknownVersion):
        await job.client.version("demo", 2, wait_s=60)


async def test_a_long_poll_notices_what_another_coordinator_did(place: Any) -> None:
    here, there = await place.tended(), await place.node()
    job = await place.job(there).start()
    waiting = asyncio.create_task(here.client.head("demo", after=0, wait_s=60))
    await asyncio.sleep(0.05)
    sealed = await job.publish(step=1)
    assert (await waiting).position == sealed.position


async def test_long_polls_end_when_the_coordinator_stops(job: Any, place: Any, node: Any) -> None:
    waiting = asyncio.create_task(job.client.head("demo", after=5, wait_s=60))
    await asyncio.sleep(0.01)
    node.service.registry.stop_waiting()
    assert (await waiting).position == Position(version=0, sha256="0" * 64)
    assert (await job.client.head("demo", after=5, wait_s=60)).position.version == 0
    await place.job(await place.node(), run="unheard-of").start()
    late = node.client.head("unheard-of", after=5, wait_s=60)
    assert (await asyncio.wait_for(late, 20)).position.version == 0


class Patience(httpx.AsyncBaseTransport):
    """Passes requests on and notes for how many seconds each answer is waited for."""

    def __init__(self, app: FastAPI) -> None:
        self._inner = httpx.ASGITransport(app)
        self.noted_s: list[float] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.noted_s.append(request.extensions["timeout"]["read"])
        return await self._inner.handle_async_request(request)


async def test_a_client_has_more_patience_than_it_asks_of_the_coordinator(job: Any, node: Any) -> None:
    await job.open(step=1)
    node.service.registry.stop_waiting()  # so that answers come at once
    patience = Patience(node.app)
    async with CoordinatorClient("http://coordinator", transport=patience, timeout_s=7) as client:
        await client.takeover("demo", TermRequest(launch="launch-a", takeover=False, wait_s=50))
        await client.layout("demo", 1, 2, wait_s=50)
        await client.version("demo", 1, wait_s=50)
        await client.head("demo", after=0, wait_s=50)
        await client.wait("demo", 1, timeout_s=50)
    assert patience.noted_s == [57] * 5


async def test_the_loop_seals_and_expires_without_being_asked(place: Any) -> None:
    here = await place.tended(settings=Settings(poll_s=0.01, expire_after_s=0.2))
    job = await place.job(here).start()
    opened = await job.open(step=1)
    for rank in (0, 1):
        await job.write_receipt(opened, rank)
    assert (await here.client.version("demo", 1, wait_s=30)).state == "sealed"
    job.published = 1
    await job.open(step=2)
    assert (await here.client.version("demo", 2, wait_s=30)).state == "aborted"

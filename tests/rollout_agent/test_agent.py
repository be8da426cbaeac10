"""The loop: announcements are hints, heartbeats never matter, an engine that refuses is told again."""

# ruff: noqa: ASYNC110 - waiting for other tasks is what these tests do

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.errors import CoordinatorUnreachable
from coordinator.wire import AgentReport, HeadAnswer
from rollout_agent.agent import Agent, Pace
from rollout_agent.engine import Staged
from rollout_agent.errors import EngineRefused, WrongRun
from rollout_agent.replica import Replica
from tests.rollout_agent.following import followed, until
from tests.rollout_agent.training import OTHER_RUN_ID, Training
from weight_store.errors import StoreUnavailable
from weight_store.keys import asset_key
from weight_store.memory import MemoryStore
from weight_store.records import sha256_hex

QUICK = Pace(poll_s=0.02, first_retry_s=0.02, longest_retry_s=0.05, heartbeat_s=0.05)


class Recorder:
    """An engine that notes what it was told, and refuses what it is asked to."""

    def __init__(self, *refuses: int) -> None:
        self.told: list[int] = []
        self.refuses = set(refuses)

    async def load(self, staged: Staged) -> None:
        self.told.append(staged.version)
        if staged.version in self.refuses:
            raise EngineRefused(f"no to {staged.version}")


class Coordinator:
    """The two calls an agent makes, answered from the bucket or not at all."""

    def __init__(self, training: Training) -> None:
        self.training, self.down = training, False
        self.reports: list[AgentReport] = []

    async def head(self, run: str, *, after: int | None = None, wait_s: float = 0) -> HeadAnswer:
        if self.down:
            raise CoordinatorUnreachable("down")
        while self.training.position.version <= (after or 0):
            await asyncio.sleep(0.01)
        return HeadAnswer(run=run, run_id=self.training.run_id, term=1, position=self.training.position)

    async def heartbeat(self, run: str, region: str, agent: str, report: AgentReport) -> None:
        if self.down:
            raise CoordinatorUnreachable("down")
        self.reports.append(report)


@asynccontextmanager
async def following(
    training: Training, path: Path, engine: Any = None, client: Any = None, pace: Pace = QUICK
) -> AsyncIterator[Agent]:
    async with (
        await Replica.open(run="tiny", model_dir=path, store=training.store) as replica,
        followed(Agent(replica, "tiny", "eu-west", "a1", client, engine, pace)) as agent,
    ):
        yield agent


async def test_a_run_that_is_not_there_yet_and_an_object_that_is_gone_are_told_apart(
    training: Training, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with following(training, tmp_path / "early") as agent:
        await until(lambda: agent.status.error == "run 'tiny' is not in the bucket yet")
        assert agent.status.state == "starting"
        await asyncio.sleep(5 * QUICK.poll_s)
    assert caplog.messages.count("run 'tiny' is not in the bucket yet: waiting for it") == 1
    await training.publish()
    gone = asset_key("tiny", sha256_hex(training.assets["config.json"]))
    await training.store.delete(gone)
    async with following(training, tmp_path / "late") as agent:
        await until(lambda: agent.status.state == "failed")
        assert gone in agent.status.error


async def test_one_that_reports_waits_for_a_run_that_is_not_there_yet(training: Training, tmp_path: Path) -> None:
    client = Coordinator(training)
    async with following(training, tmp_path, client=client) as agent:
        await until(lambda: agent.status.error == "run 'tiny' is not in the bucket yet")
        assert not client.reports, "of which run?"
        await training.publish()
        await until(lambda: bool(client.reports) and client.reports[-1].staged == training.position)


async def test_versions_are_staged_served_and_reported(training: Training, tmp_path: Path) -> None:
    engine, client = Recorder(), Coordinator(training)
    async with following(training, tmp_path, engine, client) as agent:
        for _ in range(3):
            await training.publish()
            await until(lambda: agent.replica.serving == training.position)
            training.step()
        await until(lambda: bool(client.reports) and client.reports[-1].serving == training.position)
        assert client.reports[-1].state == "serving"
        assert client.reports[-1].staged == training.position
        assert client.reports[-1].fetched_bytes == agent.replica.fetched_bytes > 0
    assert engine.told == [1, 2, 3]


async def test_a_restarted_agent_does_not_make_the_engine_load_again(training: Training, tmp_path: Path) -> None:
    await training.publish()
    for expected in ([1], []):
        engine = Recorder()
        async with following(training, tmp_path, engine) as agent:
            await until(lambda agent=agent: agent.status.state == "serving")  # type: ignore[misc]
        assert engine.told == expected


async def test_an_engine_that_starts_later_is_told_again(training: Training, tmp_path: Path) -> None:
    """No newer version has to come first: the last one of a run may be the one that was refused."""
    engine = Recorder(1)
    await training.publish()
    async with following(training, tmp_path, engine, pace=replace(QUICK, first_tell_again_s=0.02)) as agent:
        await until(lambda: agent.status.error == "no to 1")
        await until(lambda: len(engine.told) > 2)
        engine.refuses.clear()
        await until(lambda: agent.status.serving == training.position)
        assert agent.status.error == ""
    assert set(engine.told) == {1}


def test_the_longer_it_refuses_the_more_seldom_it_is_told() -> None:
    pace = Pace(first_tell_again_s=1.0, longest_tell_again_s=60.0)
    assert [pace.tell_again_s(times, 0.0, draw=1.0) for times in (1, 2, 3, 9)] == [1.0, 2.0, 4.0, 60.0]
    assert pace.tell_again_s(1, took_s=300.0, draw=0.0) == 300.0


async def test_a_refused_version_stays_staged_and_the_next_one_is_tried(training: Training, tmp_path: Path) -> None:
    engine = Recorder(2)
    await training.publish()
    async with following(training, tmp_path, engine, pace=replace(QUICK, first_tell_again_s=3600)) as agent:
        await until(lambda: agent.status.state == "serving")
        training.step()
        await training.publish()
        await until(lambda: agent.status.error == "no to 2")
        assert (agent.status.state, agent.status.staged) == ("staged", training.position)
        assert agent.status.serving == training.positions[1]
        await asyncio.sleep(0.1)
        training.step()
        await training.publish()
        await until(lambda: agent.status.serving == training.position)
        assert agent.status.error == ""
    assert engine.told == [1, 2, 3]


async def test_without_a_coordinator_the_bucket_is_followed(training: Training, tmp_path: Path) -> None:
    client = Coordinator(training)
    client.down = True
    async with following(training, tmp_path, None, client) as agent:
        for _ in range(3):
            await training.publish()
            await until(lambda: agent.replica.position == training.position)
            training.step()
        assert agent.status.state == "staged"
        client.down = False
        await until(lambda: bool(client.reports))


async def test_a_store_that_fails_is_retried_for_ever(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def down(self: MemoryStore, key: str, *args: object, **kwargs: object) -> None:
        raise StoreUnavailable("down", key=key)

    await training.publish()
    async with following(training, tmp_path) as agent:
        await until(lambda: agent.status.state == "staged")
        with monkeypatch.context() as patch:
            patch.setattr(MemoryStore, "get", down)
            await until(lambda: agent.status.state == "failed")
        assert agent.replica.position == training.position
        await until(lambda: agent.status.state == "staged")


async def test_another_run_under_the_same_name_ends_the_agent(training: Training, tmp_path: Path) -> None:
    await training.publish()
    async with await Replica.open(run="tiny", model_dir=tmp_path, store=training.store) as replica:
        await replica.catch_up()
    other = Training(MemoryStore(), run_id=OTHER_RUN_ID)
    await other.publish()
    async with await Replica.open(run="tiny", model_dir=tmp_path, store=other.store) as replica:
        agent = Agent(replica, "tiny", "eu-west", "a1", pace=QUICK)
        with pytest.raises(WrongRun):
            await agent.follow()
        assert replica.position == training.position


async def test_a_defect_in_what_runs_beside_following_ends_the_agent(training: Training, tmp_path: Path) -> None:
    class Defective(Coordinator):
        async def head(self, run: str, *, after: int | None = None, wait_s: float = 0) -> HeadAnswer:
            raise CoordinatorUnreachable("down")

        async def heartbeat(self, run: str, region: str, agent: str, report: AgentReport) -> None:
            raise KeyError("a defect")

    await training.publish()
    async with await Replica.open(run="tiny", model_dir=tmp_path, store=training.store) as replica:
        client: Any = Defective(training)
        with pytest.raises(KeyError, match="a defect"):
            async with asyncio.timeout(20):
                await Agent(replica, "tiny", "eu-west", "a1", client, pace=QUICK).follow()


def test_pauses_grow_are_bounded_and_never_equal() -> None:
    pace = Pace()
    assert pace.retry_s(1, 0.0) < pace.retry_s(3, 0.0) < pace.retry_s(10, 0.0) <= pace.longest_retry_s
    assert pace.retry_s(1000, 0.999) <= pace.longest_retry_s
    assert pace.wait_s(0.1) != pace.wait_s(0.9)

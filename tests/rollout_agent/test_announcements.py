"""A coordinator that hangs, or announces what the bucket does not have, neither stops an agent nor makes it spin."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from coordinator.client import CoordinatorClient
from coordinator.errors import CoordinatorUnreachable
from coordinator.wire import HeadAnswer
from rollout_agent import announcing
from rollout_agent.agent import Agent, Ambient, Pace
from rollout_agent.replica import Replica
from tests.rollout_agent.following import followed, until
from tests.rollout_agent.training import Training
from weight_store.position import Position

QUICK = Pace(poll_s=0.02, first_retry_s=0.02, longest_retry_s=0.05, heartbeat_s=0.05)


@pytest.fixture
def hung() -> Iterator[str]:
    """Takes connections and says nothing, as a coordinator that was stopped does."""
    with socket.create_server(("127.0.0.1", 0), backlog=50) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


async def test_a_coordinator_that_hangs_is_followed_past(
    training: Training, tmp_path: Path, hung: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(announcing, "_LONG_POLL_S", 0.2)
    monkeypatch.setattr(announcing, "_GRACE_S", 0.1)
    await training.publish()
    async with (
        CoordinatorClient(hung) as client,
        await Replica.open(run="tiny", model_dir=tmp_path, store=training.store) as replica,
        followed(Agent(replica, "tiny", "eu-west", "a1", client, pace=QUICK)),
    ):
        for _ in range(5):
            await until(lambda: replica.position == training.position)
            training.step()
            await training.publish()
    assert caplog.text.count("does not answer; following the bucket alone") == 1


async def test_a_coordinator_that_dies_is_warned_of_once(
    training: Training, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await training.publish()
    server = socket.create_server(("127.0.0.1", 0), backlog=50)
    async with (
        CoordinatorClient(f"http://127.0.0.1:{server.getsockname()[1]}") as client,
        await Replica.open(run="tiny", model_dir=tmp_path, store=training.store) as replica,
        followed(Agent(replica, "tiny", "eu-west", "a1", client, pace=QUICK)),
    ):
        await until(lambda: replica.position == training.position)
        await asyncio.sleep(0.1)
        server.close()  # who waited for an answer is cut off, who asks from now on is turned away
        for _ in range(3):
            training.step()
            await training.publish()
            await until(lambda: replica.position == training.position)
    assert caplog.text.count("following the bucket alone") == 1


class Ahead:
    """Announces at once, and for ever, a version that is not in the bucket."""

    def __init__(self) -> None:
        self.asked = 0

    async def head(self, run: str, *, after: int | None = None, wait_s: float = 0) -> HeadAnswer:
        self.asked += 1
        nowhere = Position(version=(after or 0) + 1, sha256=f"{self.asked:064x}")
        return HeadAnswer(run=run, run_id="00000000-0000-4000-8000-000000000001", term=1, position=nowhere)

    async def heartbeat(self, *_: Any) -> None:
        pass


async def test_a_coordinator_that_is_ahead_of_the_bucket_is_believed_once(training: Training, tmp_path: Path) -> None:
    client, pauses = Ahead(), [0]

    async def sleep(seconds: float) -> None:
        if seconds <= QUICK.poll_s:
            pauses[0] += 1
        await asyncio.sleep(seconds)

    await training.publish()
    # No watch: it sleeps too.
    pace = Pace(poll_s=QUICK.poll_s, watch_s=1000.0)
    async with await Replica.open(run="tiny", model_dir=tmp_path, store=training.store) as replica:
        agent = Agent(
            replica, "tiny", "eu-west", "a1", cast("Any", client), None, pace, Ambient(sleep=sleep)
        )  # fmt: skip
        async with followed(agent):
            await until(lambda: pauses[0] > 20)
            assert client.asked <= pauses[0] + 3
            assert len(asyncio.all_tasks()) < 15, "nor does it leave a task behind whenever it has waited"
            training.step()
            await training.publish()
            await until(lambda: replica.position == training.position)


class Flaps:
    """Is gone for two questions, answers one, is gone again for two, and then for ever at work."""

    def __init__(self) -> None:
        self.asked = 0

    async def head(self, run: str, *, after: int | None = None, wait_s: float = 0) -> HeadAnswer:
        self.asked += 1
        if self.asked in {1, 2, 4, 5}:
            raise CoordinatorUnreachable("nobody is there")
        held = Position(version=after or 0, sha256="a" * 64)
        return HeadAnswer(run=run, run_id="00000000-0000-4000-8000-000000000001", term=1, position=held)

    async def heartbeat(self, *_: Any) -> None:
        pass


async def test_each_loss_of_the_coordinator_is_warned_of(
    training: Training, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client = Flaps()
    await training.publish()
    async with (
        await Replica.open(run="tiny", model_dir=tmp_path, store=training.store) as replica,
        followed(Agent(replica, "tiny", "eu-west", "a1", cast("Any", client), pace=QUICK)),
    ):
        await until(lambda: client.asked > 7)
    assert caplog.text.count("nobody is there; following the bucket alone") == 2

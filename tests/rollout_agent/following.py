"""What tests of a running agent and of the gate have in common."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rollout_agent.agent import Agent
from rollout_agent.gate import shared
from rollout_agent.replica import Replica


@asynccontextmanager
async def followed(agent: Agent) -> AsyncIterator[Agent]:
    """Run the agent inside the block."""
    task = asyncio.ensure_future(agent.follow())
    try:
        yield agent
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - waiting for other tasks is what these tests do
            await asyncio.sleep(0.01)


def enters(directory: Path, *, timeout_s: float = 0.1, verify: bool = False) -> int:
    """Go through the gate as an engine does; the version that is there."""
    with shared(directory, timeout_s=timeout_s, verify=verify) as whole:
        return whole.position.version


def before_commit(replica: Replica, monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Call ``act`` whenever a version is fetched and about to be committed."""
    finish = replica._holding.finish_log

    def finish_after(*args: object) -> None:
        act()
        finish(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(replica._holding, "finish_log", finish_after)

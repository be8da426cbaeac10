"""A token is good for as long as its line is in the file, also for what it was shown for before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from coordinator.access import Scope
from coordinator.ambient import Settings
from coordinator.app import create_app
from coordinator.client import CoordinatorClient, Credentials
from coordinator.tokens import TokenFile, add, issue

PATIENCE_S = 20
"""Only how long a test that fails waits."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tokens.jsonl"


def admit(path: Path, scope: Scope) -> str:
    issued = issue([scope])
    add(path, issued.stored)
    return issued.token


def revoke(path: Path, token: str) -> None:
    lines = path.read_text().splitlines(keepends=True)
    written = path.with_name("written")
    written.write_text("".join(line for line in lines if token.split("_")[1] not in line))
    written.replace(path)


async def lines_of(answer: httpx.Response) -> AsyncIterator[str]:
    assert answer.status_code == 200
    async for line in answer.aiter_lines():
        yield line


async def until_its_end(lines: AsyncIterator[str]) -> list[str]:
    return [line async for line in lines]


async def test_a_stream_ends_soon_after_and_no_other_does(place: Any, listen: Callable[..., str], path: Path) -> None:
    trainer, viewer, other = (admit(path, scope) for scope in (Scope.TRAINER, Scope.VIEWER, Scope.VIEWER))
    app = create_app(place.store, tokens=TokenFile(path), settings=Settings(keep_alive_s=0.1))
    url = listen(app)
    async with CoordinatorClient(url, credentials=Credentials(token=trainer)) as client:
        job = await place.job(type("Node", (), {"client": client})).start()
        async with (
            httpx.AsyncClient(base_url=url, trust_env=False, timeout=PATIENCE_S) as http,
            http.stream("GET", "/v1/runs/demo/events", headers={"Authorization": f"Bearer {viewer}"}) as first,
            http.stream("GET", "/v1/runs/demo/events", headers={"Authorization": f"Bearer {other}"}) as second,
        ):
            mine, others = lines_of(first), lines_of(second)
            assert await asyncio.wait_for(anext(mine), PATIENCE_S) == ": keep-alive"
            revoke(path, viewer)
            rest = await asyncio.wait_for(until_its_end(mine), PATIENCE_S)
            assert not [line for line in rest if line.startswith("event: ")]
            await job.publish(step=1)
            while (await asyncio.wait_for(anext(others), PATIENCE_S)) != "event: sealed":
                pass


async def test_nothing_that_happens_later_is_told(place: Any, listen: Callable[..., str], path: Path) -> None:
    """Not even the next event, where no comment comes in between."""
    trainer, viewer = admit(path, Scope.TRAINER), admit(path, Scope.VIEWER)
    url = listen(create_app(place.store, tokens=TokenFile(path), settings=Settings(keep_alive_s=600)))
    async with CoordinatorClient(url, credentials=Credentials(token=trainer)) as client:
        job = await place.job(type("Node", (), {"client": client})).start()
        await job.publish(step=1)
        async with (
            httpx.AsyncClient(base_url=url, trust_env=False, timeout=PATIENCE_S) as http,
            http.stream("GET", "/v1/runs/demo/events", headers={"Authorization": f"Bearer {viewer}"}) as answer,
        ):
            lines = lines_of(answer)
            while (await asyncio.wait_for(anext(lines), PATIENCE_S)) != "event: sealed":
                pass
            revoke(path, viewer)
            await job.publish(step=2)
            rest = await asyncio.wait_for(until_its_end(lines), PATIENCE_S)
    assert not [line for line in rest if line.startswith("event: ")]

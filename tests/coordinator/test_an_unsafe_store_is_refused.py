"""The coordinator does not start on a store that cannot keep two writers apart, unless told that there is only one."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest

from coordinator.client import CoordinatorClient
from tests.coordinator.conftest import Job
from tests.weight_store.standins import ignoring, proxied
from weight_store.opening import open_store
from weightcast.devserver import free_port


async def test_it_refuses_to_start_unless_it_is_the_single_writer(rclone: Any, serve: Callable[..., Any]) -> None:
    url = rclone.url("coordinator", "unsafe")
    refused = serve("--store", url, "--port", "0")
    assert await asyncio.to_thread(refused.process.wait, 60) == 1
    assert "the conditions of conditional writes are ignored" in refused.log
    assert "--single-writer" in refused.log
    assert "Traceback" not in refused.log

    vouched = serve("--store", url, "--port", "0", "--single-writer")
    store = open_store(url)
    async with CoordinatorClient(await asyncio.to_thread(vouched.url)) as client:
        await client.ready()
        job = await Job(store, client, "launch-a").start()
        assert [(await job.publish(step)).version for step in (1, 2, 3)] == [1, 2, 3]  # alone, it gets along
    await store.close()
    assert await asyncio.to_thread(vouched.end, signal.SIGTERM) == 0


async def test_a_store_that_answers_late_is_checked_then(ministack: Any, serve: Callable[..., Any]) -> None:
    address, port = urlsplit(ministack.endpoint_url), free_port()
    url = ministack.url("coordinator", "late").replace(str(address.port), str(port))
    waiting = serve("--store", url, "--port", "0")
    await asyncio.to_thread(waiting.url)
    assert "going on without the store" in waiting.log
    async with proxied((str(address.hostname), int(address.port or 0)), port) as (proxy, _):
        proxy.mode = ignoring
        assert await asyncio.to_thread(waiting.process.wait, 60) == 1
    assert "--single-writer" in waiting.log
    assert "Traceback" not in waiting.log


def test_keys_that_may_not_write_are_named_as_such(
    s3_url: Callable[..., str],
    read_only_keys: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    serve: Callable[..., Any],
) -> None:
    url = s3_url("readonly")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", read_only_keys[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", read_only_keys[1])
    refused = serve("--store", url, "--port", "0")
    assert refused.process.wait(60) == 1
    assert "s3:PutObject" in refused.log

"""The coordinator does not start on a store that cannot keep two writers apart, unless told that there is only one."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from coordinator.client import Backoff, CoordinatorClient, retrying
from coordinator.errors import BucketUnavailable
from coordinator.wire import TermRequest
from tests.coordinator.conftest import Job
from tests.weight_store.standins import Mode, forgetting, ignoring, proxied, sound, untried
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


@pytest.mark.parametrize(
    ("mode", "sentence"),
    [(ignoring, "--single-writer"), (forgetting, "right after it took it")],
    ids=["ignoring", "forgetting"],
)
async def test_a_store_that_answers_late_is_checked_then(
    mode: Mode, sentence: str, ministack: Any, serve: Callable[..., Any]
) -> None:
    address, port = urlsplit(ministack.endpoint_url), free_port()
    url = ministack.url("coordinator", "late").replace(str(address.port), str(port))
    waiting = serve("--store", url, "--port", "0", "--verbose")
    await asyncio.to_thread(waiting.url)
    assert "nothing is decided until the store answers" in waiting.log
    assert "cannot be reached: check that the store runs, its address, and the network; trying again" in waiting.log
    async with proxied((str(address.hostname), int(address.port or 0)), port) as (proxy, _):
        proxy.mode = mode
        assert await asyncio.to_thread(waiting.process.wait, 60) == 1
    assert sentence in waiting.log.splitlines()[-1]
    assert "Traceback" not in waiting.log


async def test_nothing_is_decided_before_the_store_was_checked(ministack: Any, serve: Callable[..., Any]) -> None:
    address = urlsplit(ministack.endpoint_url)
    async with proxied((str(address.hostname), int(address.port or 0))) as (proxy, port):
        proxy.mode = untried
        url = ministack.url("coordinator", "untried").replace(str(address.port), str(port))
        server = serve("--store", url, "--port", "0", "--poll", "0.1")
        base = await asyncio.to_thread(server.url)
        async with CoordinatorClient(base) as client, httpx.AsyncClient(base_url=base, trust_env=False) as http:
            with pytest.raises(
                BucketUnavailable, match=r"before the store was found fit for it: .* failed with InternalError"
            ):
                await client.takeover("demo", TermRequest(launch="a"))
            for path in ("/v1/runs", "/v1/runs/demo/events", "/readyz"):
                answer = await http.get(path)
                assert (answer.status_code, answer.json()["code"]) == (503, "store-unavailable")
                assert int(answer.headers["retry-after"]) > 0
                assert (address.netloc in answer.text, str(port) in answer.text) == (False, path != "/readyz")
            for path in ("/healthz", "/", "/openapi.json"):
                assert (await http.get(path)).status_code == 200
            assert (await http.get("/nothing")).status_code == 404
            store = open_store(ministack.url("coordinator", "untried"))
            assert [entry.key async for entry in store.list("")] == []
            proxy.mode = sound
            await retrying(client.ready, Backoff(first_s=0.2, longest_s=0.5, budget_s=60))
            job = await Job(store, client, "launch-a").start()
            assert (await job.publish(1)).version == 1
            await store.close()
        assert await asyncio.to_thread(server.end, signal.SIGTERM) == 0
        assert "; trying again" not in server.log


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

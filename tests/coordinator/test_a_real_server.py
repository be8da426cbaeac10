"""The command, a real process, real HTTP and a real S3 server: the whole life of a run, and kill -9 in the middle."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.app import create_app
from coordinator.client import Backoff, CoordinatorClient, Event, retrying
from coordinator.errors import CoordinatorUnreachable
from weight_store.memory import MemoryStore
from weight_store.opening import open_store


async def until_broken(stream: AsyncIterator[Event], last: str) -> str:
    """Read a stream until its connection breaks; the last id that came."""
    with contextlib.suppress(CoordinatorUnreachable):
        while True:
            last = (await asyncio.wait_for(anext(stream), 20)).id
    return last


async def test_a_run_lives_through_the_death_of_its_coordinator(
    place: Any, serve: Callable[..., Any], s3_url: Callable[..., str]
) -> None:
    store_url = s3_url("coordinator", f"life-{time.monotonic_ns()}")
    first = serve("--store", store_url, "--port", "0", "--poll", "0.1")
    store = open_store(store_url)
    try:
        client = CoordinatorClient(first.url())
        await client.ready()
        place.store = store
        job = await place.job(type("Node", (), {"client": client})).start()
        stream = client.events("demo")
        sealed = await job.publish(step=1)
        assert (await asyncio.wait_for(anext(stream), 20)).name == "sealed"
        opened = await job.open(step=2)
        await job.receipt(opened, 0)

        first.end(signal.SIGKILL)
        last_event_id = await until_broken(stream, "1.2")
        with pytest.raises(CoordinatorUnreachable):
            await client.head("demo")
        await client.close()

        second = serve("--store", store_url, "--port", "0", "--poll", "0.1")
        job.client = CoordinatorClient(second.url())
        assert (await job.client.head("demo")).position == sealed.position
        await job.write_receipt(opened, 1)  # the report of this one is lost: the bucket is looked at
        done = await job.client.version("demo", 2, wait_s=30)
        assert (done.state, done.parent) == ("sealed", sealed.position)
        resumed = job.client.events("demo", last_event_id=last_event_id)
        seen = []
        while not seen or seen[-1] != "sealed 2.2":
            found = await asyncio.wait_for(anext(resumed), 20)
            seen.append(f"{found.name} {found.id}")
        assert seen in (["sealed 2.2"], ["opened 2.1", "sealed 2.2"])

        polling = asyncio.create_task(job.client.head("demo", after=2, wait_s=60))
        await asyncio.sleep(0.2)
        status = await asyncio.to_thread(second.end, signal.SIGTERM)
        assert (status, (await polling).position) == (0, done.position)
        with pytest.raises(StopAsyncIteration):
            await asyncio.wait_for(anext(resumed), 20)
        await job.client.close()
        assert "Traceback" not in first.log + second.log
    finally:
        await store.close()


async def test_a_client_waits_for_a_coordinator_that_is_not_there_yet(
    serve: Callable[..., Any], tmp_path: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    async with CoordinatorClient(f"http://127.0.0.1:{port}") as client:
        failures: list[str] = []
        waiting = asyncio.create_task(
            retrying(
                client.health,
                Backoff(first_s=0.1, longest_s=0.5, budget_s=60),
                on_failure=lambda error, pause_s: failures.append(str(error)),
            )
        )
        await asyncio.sleep(0.2)
        serve("--store", f"file://{tmp_path}/store", "--port", str(port))
        assert (await waiting).status == "ok"
    assert f"http://127.0.0.1:{port} does not answer" in failures[0]


def test_one_that_is_told_twice_to_stop_ends_as_cleanly(serve: Callable[..., Any], tmp_path: Path) -> None:
    server = serve("--store", f"file://{tmp_path}/store", "--port", "0")
    server.url()
    for number in (signal.SIGSTOP, signal.SIGINT, signal.SIGTERM):  # stopped, it gets both at once
        server.process.send_signal(number)
    assert server.end(signal.SIGCONT) == 0
    assert server.log.count("stopping") == 2
    assert "Traceback" not in server.log


def test_what_keeps_it_from_starting_is_one_sentence(
    tmp_path: Path, s3_url: Callable[..., str], monkeypatch: pytest.MonkeyPatch, refusal: Callable[..., str]
) -> None:
    there = s3_url("coordinator")
    missing = there.replace("s3://coordinator", "s3://no-such-bucket-here")
    assert "no-such-bucket-here" in refusal("--store", missing, "--port", "0")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        sentence = refusal("--store", f"file://{tmp_path}/store", "--port", port)
    assert f"cannot listen on 127.0.0.1:{port}" in sentence
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret")
    assert "not-the-secret" not in refusal("--store", there, "--port", "0")


def test_the_address_of_one_that_was_killed_does_not_stand_for_the_next(
    serve: Callable[..., Any], aws_environment: None, tmp_path: Path
) -> None:
    ready = tmp_path / "ready"
    ready.write_text("http://127.0.0.1:1\n")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # a store that keeps it from being ready
        url = f"s3://bucket?endpoint=http://127.0.0.1:{silent.getsockname()[1]}"
        starting = serve("--store", url, "--port", "0", "--ready-file", str(ready))
        deadline = time.monotonic() + 40
        while ready.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert starting.process.poll() is None


async def test_a_proxy_of_the_environment_is_not_asked_for_this_machine(
    listen: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nobody listens
    async with CoordinatorClient(listen(create_app(MemoryStore()))) as client:
        assert await client.runs() == []

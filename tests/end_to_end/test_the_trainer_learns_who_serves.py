"""`handle.serving` is true once engines behind real agents have confirmed the version, and not before."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import pytest
import torch
import uvicorn

from coordinator.ambient import Settings
from coordinator.app import create_app
from coordinator.client import CoordinatorClient
from rollout_agent.agent import Agent, Pace
from rollout_agent.engine import CommandEngine
from rollout_agent.replica import Replica
from tests.conftest import SHM_PREFIX
from trainer_agent import Publisher
from weight_store.opening import open_store
from weightcast.devserver import free_port

PACE = Pace(poll_s=0.05, first_retry_s=0.05, longest_retry_s=0.2, heartbeat_s=0.5)


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[str]:
    """Address of a coordinator on a bucket in ``tmp_path / "bucket"``."""
    (tmp_path / "bucket").mkdir()
    store = open_store(f"file://{tmp_path / 'bucket'}")
    port = free_port()
    app = create_app(store, settings=Settings(poll_s=0.1))
    config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning", lifespan="on")
    config.timeout_graceful_shutdown = 1
    server = uvicorn.Server(config)

    async def serve() -> None:
        await server.serve()
        await store.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(10)


@pytest.fixture(autouse=True)
def shared_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Shared memory of the test's own."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix=SHM_PREFIX) as name:
        monkeypatch.setenv("WEIGHTCAST_SHM_DIR", name)
        yield


@contextmanager
def agents(coordinator: str, store_url: str, root: Path, hooks: dict[str, str]) -> Iterator[None]:
    """One agent in each region of ``hooks``, which gives its command for new versions."""

    async def follow(region: str, hook: str) -> None:
        async with AsyncExitStack() as opened:
            client = await opened.enter_async_context(CoordinatorClient(coordinator))
            store = open_store(store_url)
            opened.push_async_callback(store.close)
            replica = await opened.enter_async_context(
                await Replica.open(run="r", model_dir=root / region, store=store)
            )
            await Agent(replica, "r", region, "a1", client, CommandEngine(hook), PACE).follow()

    async def all_of_them() -> None:
        tasks = [asyncio.create_task(follow(region, hook)) for region, hook in hooks.items()]
        await asyncio.to_thread(ended.wait)
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, asyncio.CancelledError), result

    ended = threading.Event()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(all_of_them())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(30)
    assert not failures, failures


def test_a_version_is_served_where_the_engine_confirms_it(coordinator: str, tmp_path: Path) -> None:
    """One engine takes every version, the other refuses the first: it is asked again with the next one."""
    store_url = f"file://{tmp_path / 'bucket'}"
    hooks = {"eu-west": "true", "us-east": "sh -c 'test {version} -gt 1'"}
    state = {"w": torch.randn(64, 64), "norm": torch.randn(64)}
    with (
        Publisher(run="r", store=store_url, coordinator=coordinator) as publisher,
        agents(coordinator, store_url, tmp_path, hooks),
    ):
        first = publisher.publish(state, 0)
        assert first.serving(["eu-west"], timeout=30)
        assert not first.serving(["us-east"], timeout=1.5)
        assert not first.serving(["eu-west", "us-east"], timeout=0.1)
        second = publisher.publish({name: tensor + 1e-2 for name, tensor in state.items()}, 1)
        assert second.serving(["eu-west", "us-east"], timeout=30)
        assert second.serving(timeout=30)
        assert second.version == 2

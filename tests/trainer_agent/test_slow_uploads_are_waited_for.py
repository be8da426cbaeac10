"""A first full over a slow line takes longer than a version may be silent, and is sealed all the same."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest
import torch

from coordinator.client import CoordinatorClient
from coordinator.wire import VersionAnswer
from tests.weight_store.standins import Forward, Headers, answer, proxied
from trainer_agent import Publisher
from trainer_agent.errors import VersionAborted

EXPIRE_AFTER_S = 120.0
NBYTES = 15_000_000
STRETCH_BYTES = 3_000_000
"""What the line carries while :data:`STRETCH_S` pass. A sender is woken when a third of its 4 MB of buffers is free."""
STRETCH_S = 70.0


class SlowLine:
    """A TCP relay that carries no more upwards than it was allowed to, and everything once it is mended."""

    def __init__(self, upstream: tuple[str, int]) -> None:
        self._upstream = upstream
        self._listener = socket.socket()
        # Inherited by what is accepted: the line must not swallow a whole shard at once.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        self._listener.bind(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._allowed = 0
        self._more = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)

    async def _listen(self) -> None:
        await asyncio.start_server(self._relay, sock=self._listener, limit=1 << 16)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(*self._upstream)
        try:
            with contextlib.suppress(OSError):
                await asyncio.gather(self._carry(reader, back, slow=True), self._carry(there, writer))
        finally:
            back.close()
            writer.close()

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, slow: bool = False) -> None:
        while data := await source.read(1 << 14):
            while slow and self._allowed < len(data):
                self._more.clear()
                await self._more.wait()
            self._allowed -= len(data) if slow else 0
            sink.write(data)
            await sink.drain()
        sink.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def allow(self, nbytes: int) -> None:
        """Carry so much more."""

        def more() -> None:
            self._allowed += nbytes
            self._more.set()

        self._loop.call_soon_threadsafe(more)

    def mend(self) -> None:
        self.allow(1 << 40)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
        self._listener.close()


@pytest.fixture
def lines() -> Iterator[Callable[[str], tuple[SlowLine, str]]]:
    """``lines(store_url)``: a slow line to that store, and the store's address at its end."""
    made: list[SlowLine] = []

    def make(store_url: str) -> tuple[SlowLine, str]:
        endpoint = urlsplit(store_url.partition("endpoint=")[2].partition("&")[0])
        assert endpoint.hostname is not None
        assert endpoint.port is not None
        made.append(SlowLine((endpoint.hostname, endpoint.port)))
        return made[-1], store_url.replace(f":{endpoint.port}", f":{made[-1].port}")

    yield make
    for line in made:
        line.close()


def random_weights() -> dict[str, torch.Tensor]:
    """Bits that no codec makes smaller."""
    return {"w": torch.randint(0, 256, (NBYTES,), dtype=torch.uint8)}


async def wait_decided(url: str) -> VersionAnswer:
    async with CoordinatorClient(url) as client:
        while (answer := await client.version("r", 1, wait_s=20)).state == "undecided":
            pass
        return answer


def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_full_over_a_slow_line_does_not_expire(make_service, s3_url, lines) -> None:
    url = s3_url("slow", secrets.token_hex(4))
    service = make_service(url, expire_after_s=EXPIRE_AFTER_S)
    line, slow_url = lines(url)
    line.allow(1_000_000)  # what comes before the weights
    weights = random_weights()
    with Publisher(run="r", store=slow_url, coordinator=service.url, start_timeout_s=60) as publisher:
        handle = publisher.publish(weights, 0)
        for _ in range(2):
            signs = service.signs
            line.allow(STRETCH_BYTES)
            wait_until(lambda signs=signs: service.signs > signs or handle.done)
            assert not handle.done
            service.pass_time(STRETCH_S)
        line.mend()
        assert handle.sealed(120) == 1
    assert torch.equal(service.read("r").tensors["w"], weights["w"])


def test_a_line_that_carries_nothing_any_more_gives_no_sign(make_service, s3_url, lines) -> None:
    url = s3_url("slow", secrets.token_hex(4))
    service = make_service(url, expire_after_s=EXPIRE_AFTER_S)
    line, slow_url = lines(url)
    line.allow(1_000_000)
    with Publisher(run="r", store=slow_url, coordinator=service.url, start_timeout_s=60) as publisher:
        handle = publisher.publish(random_weights(), 0)
        wait_until(lambda: service.signs or handle.done)
        service.pass_time(EXPIRE_AFTER_S)
        decided = asyncio.run(wait_decided(service.url))
        assert decided.state == "aborted"
        assert "for 120 s there was no sign of life: no receipt of rank 0" in decided.reason
        line.mend()
        with pytest.raises(VersionAborted, match="no receipt of rank 0"):
            handle.sealed(120)


class Refusing:
    """An S3 server's front that takes whole shards and then refuses them, every time."""

    def __init__(self) -> None:
        self.refused = 0

    async def __call__(self, line: bytes, headers: Headers, body: bytes, forward: Forward) -> bytes:
        if not (line.startswith(b"PUT ") and b".shard" in line):
            return await forward(line, headers, body)
        self.refused += 1
        return answer(400, "BadDigest") if self.refused % 2 else answer(500, "InternalError")


async def test_a_store_that_takes_shards_and_refuses_them_gives_no_sign(make_service, s3_url) -> None:
    """Its bytes move for ever and nothing comes of it."""
    url = s3_url("slow", secrets.token_hex(4))
    service = make_service(url, expire_after_s=EXPIRE_AFTER_S)
    endpoint = urlsplit(url.partition("endpoint=")[2].partition("&")[0])
    async with proxied((str(endpoint.hostname), int(endpoint.port or 0))) as (proxy, port):
        refusing = proxy.mode = Refusing()
        bad_url = url.replace(f":{endpoint.port}", f":{port}")
        ranks = [
            Publisher(run="r", store=store, coordinator=service.url, rank=rank, world_size=2, launch="l")
            for rank, store in enumerate((url, bad_url))
        ]
        try:
            handles = await asyncio.gather(
                *(asyncio.to_thread(p.publish, {f"w{i}": random_weights()["w"]}, 0) for i, p in enumerate(ranks))
            )
            async with CoordinatorClient(service.url) as client, asyncio.timeout(90):
                await asyncio.to_thread(wait_until, lambda: refusing.refused >= 2)
                while (await client.version("r", 1, wait_s=0.1)).missing != (1,):
                    pass
                signs = service.signs
                # Twenty times as fast as the sidecar's clock, so that its attempts fit in between as they would.
                while (found := await client.version("r", 1)).state == "undecided":
                    service.pass_time(4)
                    await asyncio.sleep(0.2)
            assert service.signs <= signs + 1  # of what had moved before
            assert found.state == "aborted"
            assert "for 120 s there was no sign of life: no receipt of rank 1" in found.reason
            with pytest.raises(VersionAborted, match="no receipt of rank 1"):
                await asyncio.to_thread(handles[1].sealed, 60)
        finally:
            for publisher in ranks:
                await asyncio.to_thread(publisher.close)

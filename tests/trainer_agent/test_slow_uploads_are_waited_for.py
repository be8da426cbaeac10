"""A first full over a slow line takes longer than a version may be silent, and is sealed all the same."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest
import torch

from coordinator.client import CoordinatorClient
from coordinator.wire import VersionAnswer
from trainer_agent import Publisher
from trainer_agent.errors import VersionAborted

BYTES_A_SECOND = 500_000
EXPIRE_AFTER_S = 7.0
"""More than a sign of life takes to come, less than the upload."""
NBYTES = 5_000_000


class SlowLine:
    """A TCP relay that carries so many bytes a second; nothing once ``cut``, and as fast as it can once mended."""

    def __init__(self, upstream: tuple[str, int]) -> None:
        self._upstream = upstream
        self._listener = socket.socket()
        # Inherited by what is accepted: the line must not swallow a whole shard at once.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        self._listener.bind(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._bytes_a_second = BYTES_A_SECOND
        self._whole = asyncio.Event()
        self._whole.set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)

    async def _listen(self) -> None:
        await asyncio.start_server(self._relay, sock=self._listener, limit=1 << 16)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(*self._upstream)
        with contextlib.suppress(OSError):
            await asyncio.gather(self._carry(reader, back), self._carry(there, writer))

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 14):
            await self._whole.wait()
            sink.write(data)
            await sink.drain()
            await asyncio.sleep(len(data) / self._bytes_a_second)
        sink.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def cut(self) -> None:
        self._loop.call_soon_threadsafe(self._whole.clear)

    def mend(self) -> None:
        self._bytes_a_second = 1 << 40
        self._loop.call_soon_threadsafe(self._whole.set)

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


def test_a_full_over_a_slow_line_does_not_expire(make_service, s3_url, lines) -> None:
    url = s3_url("slow", secrets.token_hex(4))
    service = make_service(url, expire_after_s=EXPIRE_AFTER_S)
    _, slow_url = lines(url)
    weights = random_weights()
    with Publisher(run="r", store=slow_url, coordinator=service.url, start_timeout_s=30) as publisher:
        assert publisher.publish(weights, 0).sealed(120) == 1
    assert torch.equal(service.read("r").tensors["w"], weights["w"])


def test_a_line_that_carries_nothing_any_more_gives_no_sign(make_service, s3_url, lines) -> None:
    url = s3_url("slow", secrets.token_hex(4))
    service = make_service(url, expire_after_s=EXPIRE_AFTER_S)
    line, slow_url = lines(url)
    with Publisher(run="r", store=slow_url, coordinator=service.url, start_timeout_s=30) as publisher:
        handle = publisher.publish(random_weights(), 0)
        while handle.version is None:
            assert not handle.done
        line.cut()
        decided = asyncio.run(wait_decided(service.url))
        assert decided.state == "aborted"
        assert "for 7 s there was no sign of life: no receipt of rank 0" in decided.reason
        line.mend()
        with pytest.raises(VersionAborted, match="no receipt of rank 0"):
            handle.sealed(120)

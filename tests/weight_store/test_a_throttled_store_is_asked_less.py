"""Concurrency adapts: halved when the store complains, one more for each window of successes. Virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

from weight_store.errors import StoreRefused, StoreThrottled, StoreUnavailable
from weight_store.memory import MemoryStore
from weight_store.opening import open_store
from weight_store.pacing import Allowance
from weight_store.retry import Retrier, RetryPolicy, with_retry
from weight_store.s3_settings import S3Options
from weight_store.store import Blob

_BUSY = (
    b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nConnection: close\r\nContent-Length: 80\r\n\r\n"
    + b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>no</Message></Error>".ljust(80)
)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def allowance(most: int = 8) -> tuple[Allowance, Clock]:
    clock = Clock()
    return Allowance(most, clock=clock), clock


def test_a_complaint_halves_and_a_window_of_successes_adds_one() -> None:
    allowed, clock = allowance(8)
    allowed.throttled()
    assert allowed.permitted == 4
    for _ in range(4):
        allowed.succeeded()
    assert allowed.permitted == 5
    clock.now_s = 2.0
    allowed.throttled()
    assert allowed.permitted == 2


def test_complaints_of_one_burst_halve_once() -> None:
    allowed, clock = allowance(16)
    for _ in range(10):
        allowed.throttled()
    assert allowed.permitted == 8
    clock.now_s = 1.0
    allowed.throttled()
    assert allowed.permitted == 4


def test_it_stays_between_one_and_most() -> None:
    allowed, clock = allowance(3)
    for second in range(10):
        clock.now_s = 2.0 * second
        allowed.throttled()
    assert allowed.permitted == 1
    for _ in range(100):
        allowed.succeeded()
    assert allowed.permitted == 3


async def test_no_more_run_than_are_permitted() -> None:
    allowed, clock = allowance(8)
    allowed.throttled()
    clock.now_s = 2.0
    allowed.throttled()
    running, seen = 0, 0

    async def work() -> None:
        nonlocal running, seen
        async with allowed.slot():
            running += 1
            seen = max(seen, running)
            await asyncio.sleep(0)
            running -= 1

    await asyncio.gather(*(work() for _ in range(50)))
    assert seen == 2


async def test_those_who_wait_go_on_as_soon_as_more_are_permitted() -> None:
    busy, _ = allowance(2)
    busy.throttled()
    await busy.enter()
    waiting = [asyncio.ensure_future(busy.enter()) for _ in range(2)]
    await asyncio.sleep(0)
    busy.leave()
    busy.succeeded()
    for _ in range(10):
        await asyncio.sleep(0)
    assert all(one.done() for one in waiting)


async def test_a_cancelled_waiter_passes_its_turn_on() -> None:
    allowed, _ = allowance(1)
    release = asyncio.Event()
    done: list[int] = []

    async def work(number: int) -> None:
        async with allowed.slot():
            await release.wait()
            done.append(number)

    tasks = [asyncio.create_task(work(number)) for number in range(3)]
    await asyncio.sleep(0)
    release.set()
    await asyncio.sleep(0)  # the first one ends, the second is woken and, in the same turn of the loop, cancelled
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert done == [0, 2]


async def test_a_refusal_is_no_sign_of_room() -> None:
    class Denying(MemoryStore):
        async def get(self, key: str, *, max_bytes: int) -> Blob:
            raise StoreRefused("no")

    retrier = Retrier(RetryPolicy(concurrency=4))
    retrier.allowance.throttled()
    for _ in range(20):
        with pytest.raises(StoreRefused):
            await with_retry(Denying(), retrier).get("a", max_bytes=1)
    assert retrier.allowance.permitted == 2


class Gate:
    """Answers SlowDown to every request that arrives while ``most`` others are being served by the real server."""

    def __init__(self, upstream: tuple[str, int], most: int) -> None:
        self.upstream, self.most = upstream, most
        self.busy = self.refused = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"(?i)content-length: (\d+)", head)
            body = await reader.readexactly(int(length[1]) if length else 0)
            if self.busy >= self.most:
                self.refused += 1
                writer.write(_BUSY)
            else:
                self.busy += 1
                try:
                    writer.write(await self._answer(head, body))
                finally:
                    self.busy -= 1
            await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def _answer(self, head: bytes, body: bytes) -> bytes:
        up_reader, up_writer = await asyncio.open_connection(*self.upstream)
        # The header that tells the server to hang up is not among the signed ones.
        up_writer.write(head[:-2] + b"Connection: close\r\n\r\n" + body)
        answer = await up_reader.read(-1)
        up_writer.close()
        with contextlib.suppress(ConnectionError):
            await up_writer.wait_closed()
        await asyncio.sleep(0.01)
        return re.sub(rb"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", answer, count=1)


@pytest_asyncio.fixture
async def gate(seaweed: object) -> AsyncIterator[tuple[Gate, int]]:
    address = urlsplit(seaweed.endpoint_url)  # type: ignore[attr-defined]
    made = Gate((str(address.hostname), int(address.port or 0)), most=3)
    server = await asyncio.start_server(made.handle, "127.0.0.1", 0)
    yield made, server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()


async def test_a_throttling_server_gets_everything_all_the_same(
    gate: tuple[Gate, int], s3_store_url: object, seaweed: object
) -> None:
    throttling, port = gate
    url = s3_store_url("seaweed").replace(seaweed.endpoint_url, f"http://127.0.0.1:{port}")  # type: ignore[operator, attr-defined]
    policy = RetryPolicy(attempts=60, first_delay_s=0.02, max_delay_s=0.1, concurrency=24)
    store = open_store(url, policy=policy, options=S3Options(max_connections=24))
    try:
        await asyncio.gather(*(store.create(f"run/{number}", b"x") for number in range(60)))
        assert len([entry async for entry in store.list("run/")]) == 60
    finally:
        await store.close()
    assert throttling.refused > 0


async def test_a_multipart_upload_needs_one_place_only(s3_store_url: object) -> None:
    # Its parts wait for places while its completion waits for them: it would hang if both took one.
    store = open_store(
        s3_store_url("seaweed"),  # type: ignore[operator]
        policy=RetryPolicy(concurrency=1),
        options=S3Options(part_bytes=5 * 2**20, upload_workers=2),
    )
    try:
        async with asyncio.timeout(60), store.upload("run/big") as upload:
            await upload.write(bytes(11 * 2**20))
            await upload.commit()
        assert [entry.size async for entry in store.list("run/")] == [11 * 2**20]
    finally:
        await store.close()


async def test_complaints_reach_the_allowance() -> None:
    class Busy(MemoryStore):
        async def delete(self, key: str) -> None:
            raise StoreThrottled("slow down")

    retrier = Retrier(RetryPolicy(attempts=2, first_delay_s=0.0, concurrency=10))
    with pytest.raises(StoreUnavailable):
        await with_retry(Busy(), retrier).delete("a")
    assert retrier.allowance.permitted == 5

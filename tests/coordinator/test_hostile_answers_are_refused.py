"""Whatever a coordinator, or who pretends to be one, answers: the client gets it right or says so, in little memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
import zstandard

from coordinator import events
from coordinator.app import create_app
from coordinator.client import CoordinatorClient, Event
from coordinator.errors import CoordinatorUnreachable
from coordinator.wire import ProgressReport, WithdrawalReport
from weight_store.memory import MemoryStore


def client_of(answer: Callable[[httpx.Request], httpx.Response]) -> CoordinatorClient:
    return CoordinatorClient("http://coordinator", httpx.MockTransport(answer))


class Endless(httpx.AsyncByteStream):
    """A body that never ends: ``part``, 64 KiB of it, again and again."""

    def __init__(self, part: bytes = b"x") -> None:
        self._part = part * ((1 << 16) // len(part))
        self.taken = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while self.taken < 1 << 30:
            self.taken += len(self._part)
            yield self._part


async def test_texts_with_other_line_breaks_stay_whole() -> None:
    """``str.splitlines`` knows eight more of them than an event stream does."""
    data = '{"reason":"a\u2028b\u2029c\x85d\x0be\x0cf\x1cg"}'
    sent = events.encode("aborted", data, events.EventId(4, 2)).encode()
    async with client_of(lambda request: httpx.Response(200, content=sent)) as client:
        assert [event async for event in client.events("demo")] == [Event("aborted", data, "4.2")]


async def test_many_events_may_be_larger_than_one() -> None:
    sent = [events.encode("sealed", f'"{number:0600000}"', events.EventId(number, 2)) for number in range(1, 6)]
    async with client_of(lambda request: httpx.Response(200, content="".join(sent).encode())) as client:
        assert [event.id async for event in client.events("demo")] == ["1.2", "2.2", "3.2", "4.2", "5.2"]


@pytest.mark.parametrize("part", [b"x", b"data: x\n"], ids=["line", "event"])
async def test_what_has_no_end_is_not_kept(part: bytes) -> None:
    body = Endless(part)
    async with client_of(lambda request: httpx.Response(200, stream=body)) as client:
        with pytest.raises(CoordinatorUnreachable, match="larger than any event"):
            async for _ in client.events("demo"):
                pass
    assert body.taken < 2 << 20
    body = Endless(part)
    async with client_of(lambda request: httpx.Response(200, stream=body)) as client:
        with pytest.raises(CoordinatorUnreachable, match="larger than any answer"):
            await client.runs()
    assert body.taken < 65 << 20


async def test_a_redirection_is_not_followed() -> None:
    """It could lead the token to somebody else."""
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.host)
        return httpx.Response(307, headers={"Location": "http://elsewhere/v1/runs"})

    async with client_of(answer) as client:
        with pytest.raises(CoordinatorUnreachable, match="answered HTTP 307"):
            await client.runs()
    assert asked == ["coordinator"]


async def test_a_compressed_answer_is_not_unpacked() -> None:
    bomb = zstandard.compress(bytes(1 << 30))

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.headers["Accept-Encoding"] == "identity"
        return httpx.Response(200, headers={"Content-Encoding": "zstd"}, stream=Body(bomb))

    async with client_of(answer) as client:
        with pytest.raises(CoordinatorUnreachable, match="compressed"):
            await client.runs()
        with pytest.raises(CoordinatorUnreachable, match="compressed"):
            await anext(client.events("demo"))


class Body(httpx.AsyncByteStream):
    """A body that comes from the network, and is not unpacked before it is asked for."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._body


class Flipping(httpx.ASGITransport):
    """Flips a bit of an answer on its way, and so another version's number is in it."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        body = await response.aread()
        assert b'"version":1,' in body
        return httpx.Response(response.status_code, content=body.replace(b'"version":1,', b'"version":9,'))


async def test_an_answer_about_another_version_is_none(job: Any, node: Any) -> None:
    """A trainer would be told of a version that never came to be."""
    opened = await job.open(step=1)
    async with CoordinatorClient("http://coordinator", Flipping(node.app)) as client:
        for ask in (
            lambda: client.version("demo", 1),
            lambda: client.report_progress("demo", 1, 0, ProgressReport(term=opened.term)),
            lambda: job.receipt(opened, 0, at=client),
            lambda: client.withdraw("demo", 1, 0, WithdrawalReport(term=opened.term, code="c", sentence="s")),
        ):
            with pytest.raises(CoordinatorUnreachable, match="version 1 of run demo and answered about version 9"):
                await ask()


async def test_a_query_that_is_no_utf8_is_no_defect() -> None:
    """No HTTP parser of today passes one on; the application does not count on that."""
    sent: list[dict[str, object]] = []
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "GET",
        "path": "/nowhere",
        "raw_path": b"/nowhere",
        "query_string": b"a=\xcc",
        "headers": [(b"host", b"localhost")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "scheme": "http",
    }

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    await create_app(MemoryStore())(scope, receive, send)
    assert sent[0]["status"] == 404

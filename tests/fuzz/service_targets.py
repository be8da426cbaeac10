"""Targets: what crosses HTTP in either direction, and event streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from functools import cache, partial
from typing import Any
from urllib.parse import unquote_to_bytes

import httpx
from fastapi import FastAPI

from coordinator import events
from coordinator.ambient import Ambient, Settings
from coordinator.app import create_app
from coordinator.client import CoordinatorClient
from coordinator.credentials import Credentials
from coordinator.errors import CoordinatorError
from coordinator.service import Coordinator
from coordinator.wire import AgentReport, HeadAnswer, Problem, RunAnswer, VersionAnswer
from tests.fuzz.record_targets import LAYOUT, OBJECTS, POSITION
from tests.fuzz.reshaping import either, reshape_json, within
from tests.fuzz.target import Target, require
from tests.weight_store_records.make_vectors import RUN, RUN_ID
from weight_store.memory import MemoryStore
from weight_store.records import sha256_hex

VERSION_ANSWER = VersionAnswer(
    run=RUN,
    run_id=RUN_ID,
    version=4,
    term=3,
    step=7,
    ordinal=2,
    state="aborted",
    parent=POSITION,
    layout=sha256_hex(LAYOUT.to_bytes()),
    world_size=2,
    reason="why",
)


# Answers, as the client reads them


def _parts(data: bytes) -> tuple[list[bytes], bytes]:
    """The lines before the first empty one, and what follows it."""
    head, _, body = data.partition(b"\n\n")
    return head.split(b"\n"), body


def _body(data: bytes) -> bytes:
    return _parts(data)[1]


def _with_body(data: bytes, body: bytes) -> bytes:
    return data.partition(b"\n\n")[0] + b"\n\n" + body


def _answer(data: bytes) -> None:
    """First line: a status; then headers; then a body. Every kind of question gets this answer."""
    head, body = _parts(data)
    status = int(head[0]) if head[0].isdigit() and len(head[0]) == 3 else 200
    headers = [tuple(line.split(b": ", 1)) for line in head[1:] if b": " in line]
    if any(b"\0" in name + value or not name.isascii() for name, value in headers):
        headers = []

    def handle(request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, headers=headers, stream=_Pieces(body))

    async def ask() -> None:
        async with CoordinatorClient(
            "http://127.0.0.1:1", httpx.MockTransport(handle), credentials=Credentials()
        ) as client:
            questions: list[Callable[[], Any]] = [
                lambda: client.head(RUN),
                lambda: client.version(RUN, 4),
                client.runs,
                lambda: client.manifest(RUN, 4),
                lambda: _drain(client.events(RUN)),
            ]
            for question in questions:
                try:
                    await question()
                except CoordinatorError as error:
                    str(error)

    asyncio.run(ask())


class _Pieces(httpx.AsyncByteStream):
    """A body in pieces, so that lines and characters are cut."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for at in range(0, len(self._body), 61):
            yield self._body[at : at + 61]


async def _drain(stream: AsyncIterator[Any]) -> list[Any]:
    return [event async for event in stream]


def _answer_seeds() -> Iterator[bytes]:
    problem = Problem(title="Not found", status=404, detail="no such run", code="unknown-run")
    head = HeadAnswer(run=RUN, run_id=RUN_ID, term=3, position=POSITION)
    for status, model in ((200, head), (200, VERSION_ANSWER), (404, problem), (503, problem)):
        yield b"%d\nContent-Type: application/json\n\n" % status + model.model_dump_json().encode()
    run = RunAnswer(run=RUN, run_id=RUN_ID, term=3, launch="job-3", position=POSITION)
    yield b"200\nContent-Type: application/json\n\n[" + run.model_dump_json().encode() + b"]"
    stream = events.encode("sealed", VERSION_ANSWER.model_dump_json(), events.EventId(4, 2)) + events.KEEP_ALIVE
    yield b"200\nContent-Type: text/event-stream\n\n" + stream.encode()
    yield b"200\nContent-Encoding: gzip\n\n\x1f\x8b\x08\x00"


def _stream(data: bytes) -> None:
    """What a version's events say comes out as it went in, whatever the texts in it."""
    answers = []
    for i, text in enumerate(data.decode("utf-8", "replace").split("\n")):
        answers.append(VERSION_ANSWER.model_copy(update={"reason": text, "step": i}))
    sent = "".join(events.encode("aborted", a.model_dump_json(), events.EventId(a.version, 2)) for a in answers)

    def handle(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, stream=_Pieces(sent.encode()))

    async def ask() -> list[Any]:
        transport = httpx.MockTransport(handle)
        async with CoordinatorClient("http://127.0.0.1:1", transport, credentials=Credentials()) as client:
            return await _drain(client.events(RUN))

    found = [VersionAnswer.model_validate_json(event.data) for event in asyncio.run(ask())]
    require(found == answers, "an event changes on its way")


def _event_id(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    found = events.EventId.parse(text)
    require(found is None or str(found) == text, "an id that was never given out is accepted")


# Requests, as the coordinator answers them


@cache
def _app() -> FastAPI:
    return create_app(MemoryStore())


def _request(data: bytes) -> None:
    """``METHOD target``, headers, an empty line, a body: answered as the API describes, and never with a 500."""
    head, body = _parts(data)
    method, _, target = head[0].partition(b" ")
    path, _, query = target.partition(b"?")
    headers = [tuple(line.split(b": ", 1)) for line in head[1:] if b": " in line]
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method.decode("latin-1").upper()[:20] or "GET",
        "scheme": "http",
        "path": unquote_to_bytes(path).decode("utf-8", "replace") or "/",
        "raw_path": path,
        "root_path": "",
        "query_string": query,
        "headers": [(name.lower(), value) for name, value in headers] + [(b"host", b"localhost")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    status, kind, answer = asyncio.run(_served(scope, body))
    require(status < 500 or status == 503, f"HTTP {status}: {answer[:300]!r}")
    if status >= 400:
        require(kind.startswith(b"application/problem+json"), f"HTTP {status} as {kind!r}")
        require(Problem.model_validate_json(answer).status == status, "a problem of another status")


async def _served(scope: dict[str, Any], body: bytes) -> tuple[int, bytes, bytes]:
    app = _app()
    store = MemoryStore()
    for key, stored in OBJECTS.items():
        await store.create(key, stored)
    app.state.coordinator = Coordinator(store, settings=Settings(poll_s=0.001), ambient=Ambient(nonce=lambda: "0" * 16))
    app.state.coordinator.registry.stop_waiting()
    sent: list[Any] = []
    incoming = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Any:
        return next(incoming, {"type": "http.disconnect"})

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    start = next(message for message in sent if message["type"] == "http.response.start")
    kind = dict(start["headers"]).get(b"content-type", b"")
    return start["status"], kind, b"".join(message.get("body", b"") for message in sent)


def _request_seeds() -> Iterator[bytes]:
    run = f"/v1/runs/{RUN}"
    report = AgentReport(run_id=RUN_ID, state="serving", serving=POSITION, apply_s=0.5).model_dump_json()
    posts = {
        f"POST {run}/terms": '{"launch":"job-4","expected_term":3,"wait_s":0}',
        f"PUT {run}/terms/3/offers/0": '{"world_size":2}',
        f"POST {run}/versions": '{"term":3,"step":9,"ordinal":3,"layout":"%s","world_size":2}' % ("a" * 64),
        f"PUT {run}/versions/4/receipts/0": '{"term":3,"sha256":"%s","encode_s":0.5,"upload_s":1}' % ("b" * 64),
        f"PUT {run}/regions/eu-west/agents/a-1": report,
    }
    gets = (
        "/v1/runs",
        run,
        f"{run}/versions?limit=2&before=4",
        f"{run}/versions/4?wait=0.5",
        f"{run}/versions/4/manifest",
        f"{run}/head?after=3&wait=1",
        f"{run}/regions",
        f"{run}/wait?version=4&state=serving&regions=eu-west&quorum=0.5&timeout=1",
        f"{run}/terms/3/layout?world_size=2&wait=0",
        "/healthz",
        "/readyz",
        "/docs",
        "/openapi.json",
    )
    for line, body in posts.items():
        yield f"{line}\nContent-Type: application/json\n\n{body}".encode()
    for target in gets:
        yield f"GET {target}\nAccept: */*\n\n".encode()
    yield f"GET {run}/events\nLast-Event-ID: 3.2\n\n".encode()


def _targets() -> Iterator[Target]:
    in_body = partial(within, _body)
    yield Target(
        "http-answer",
        _answer,
        _answer_seeds,
        in_body(reshape_json, _with_body),
        covers=("CoordinatorClient",),
        ci_runs=300,
    )
    yield Target(
        "event-stream", _stream, lambda: [b"why", "a\u2028b\x85c\r".encode()], covers=("_events",), ci_runs=300
    )
    yield Target(
        "event-id", _event_id, lambda: [b"3.2", "٣.1".encode(), b"007.1"], covers=("EventId.parse",), max_bytes=40
    )
    yield Target(
        "http-request",
        _request,
        _request_seeds,
        either(in_body(reshape_json, _with_body), lambda data, rng, plain: plain(data)),
        (
            b"wait=",
            b"version=",
            b"quorum=nan",
            b"timeout=inf",
            b"Last-Event-ID: ",
            b"Infinity",
            b"NaN",
            b"%00",
            b"%2e%2e",
        ),
        covers=("create_app",),
        ci_runs=300,
    )


TARGETS = tuple(_targets())

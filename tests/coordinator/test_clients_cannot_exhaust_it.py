"""What comes in is bounded in size and in time, on a real server with real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from coordinator.ambient import Ambient
from coordinator.app import create_app
from coordinator.client import CoordinatorClient
from coordinator.limits import MAX_BODY_BYTES, BodyLimit
from coordinator.protocol import BoundedProtocol
from coordinator.wire import TermRequest
from tests.coordinator.conftest import Job
from weight_store.keys import offer_key
from weight_store.memory import MemoryStore
from weight_store.records import pack

PATIENCE_S = 20.0
"""Only how long a test that fails waits."""
BEGIN = b"POST /v1/runs/demo/terms HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


class Impatient(BoundedProtocol):
    head_timeout_s = 0.3


@contextlib.contextmanager
def connected(url: str) -> Iterator[socket.socket]:
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
        yield connection


def until_closed(connection: socket.socket) -> bytes:
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(1 << 16):
            received += data
    return received


def trickled(connection: socket.socket, line: bytes) -> bytes:
    """Send ``line`` again and again until the server closes; what it said."""
    connection.settimeout(0.05)
    received = b""
    for _ in range(int(PATIENCE_S / 0.05)):
        try:
            connection.sendall(line)
            data = connection.recv(1 << 16)
        except TimeoutError:
            continue
        except (BrokenPipeError, ConnectionResetError):
            return received
        if not data:
            return received
        received += data
    raise AssertionError("the connection is still open")


@pytest.fixture
def impatient(listen: Callable[..., str]) -> str:
    return listen(create_app(MemoryStore()), http=Impatient, h11_max_incomplete_event_size=16 << 10)


@pytest.mark.parametrize("begin", [b"", b"G", b"GET / HTTP/1.1\r\nHost: localhost\r\n"])
def test_a_head_that_does_not_come_ends_the_connection(begin: bytes, impatient: str) -> None:
    with connected(impatient) as connection:
        connection.sendall(begin)
        assert until_closed(connection) == b""


def test_a_head_that_trickles_ends_the_connection(impatient: str) -> None:
    with connected(impatient) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n")
        assert trickled(connection, b"X-More: 1\r\n") == b""


def test_so_does_the_head_of_a_second_request(impatient: str) -> None:
    with connected(impatient) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET /healthz HTTP/1.1\r\n")
        assert until_closed(connection).count(b"HTTP/1.1 200 OK") == 1


def test_many_heads_on_one_connection_are_answered(impatient: str) -> None:
    with httpx.Client(base_url=impatient, trust_env=False) as client:
        for _ in range(20):
            assert client.get("/healthz").status_code == 200
    with connected(impatient) as connection:
        request = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
        connection.sendall(request * 2 + request.replace(b"Host", b"Connection: close\r\nHost"))
        assert until_closed(connection).count(b"HTTP/1.1 200 OK") == 3


async def test_long_answers_are_not_cut_off(impatient: str) -> None:
    """The clock is for heads alone: a poll that waits longer than a head may take gets its answer."""
    async with httpx.AsyncClient(base_url=impatient, trust_env=False, timeout=PATIENCE_S) as client:
        assert (await client.post("/v1/runs/demo/terms", json={"launch": "a"})).status_code == 200
        answer = await client.get("/v1/runs/demo/head?after=0&wait=1")
        assert answer.json()["position"]["version"] == 0


IMPATIENT_COMMAND = """
from coordinator.protocol import BoundedLoop
from weightcast.cli import main
BoundedLoop.handshake_timeout_s = 0.3
main()
"""


@pytest.fixture
def over_tls(tmp_path: Path) -> Iterator[str]:
    """The address of a coordinator process that serves HTTPS and waits for no handshake."""
    certificate = trustme.CA().issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "chain.pem")
    tls = ["--tls-cert", str(tmp_path / "chain.pem"), "--tls-key", str(tmp_path / "key.pem")]
    store = ["--store", f"file://{tmp_path}/store", "--port", "0"]
    command = [sys.executable, "-c", IMPATIENT_COMMAND, "coordinator", *store, *tls]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().removeprefix("listening on ").strip().replace("https", "http")
        process.terminate()


def test_a_handshake_that_does_not_come_ends_the_connection(over_tls: str) -> None:
    with connected(over_tls) as connection:
        assert until_closed(connection) == b""
    with connected(over_tls) as connection:
        connection.sendall(b"\x16\x03\x01")  # the first bytes of one
        assert until_closed(connection) == b""


@pytest.mark.parametrize(
    "line", [b"X-Long: " + b"x" * 20_000 + b"\r\n", b"X-Many: 1\r\n" * 2000], ids=["one long", "many"]
)
def test_heads_are_bounded(line: bytes, impatient: str) -> None:
    with connected(impatient) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + line)
        assert until_closed(connection).startswith(b"HTTP/1.1 4")


@pytest.mark.parametrize("length", [b"65537", b"9" * 30, b"-1", b"1e3", b"0x10"])
def test_a_body_that_is_announced_too_large_is_refused_unread(length: bytes, impatient: str) -> None:
    with connected(impatient) as connection:
        connection.sendall(BEGIN + b"Content-Length: " + length + b"\r\n\r\n")
        assert until_closed(connection).split(b"\r\n")[0] in (
            b"HTTP/1.1 413 Request Entity Too Large",
            b"HTTP/1.1 413 Content Too Large",
            b"HTTP/1.1 400 Bad Request",
        )


@pytest.mark.parametrize(("more", "answered"), [(0, []), (1, [413])])
async def test_a_body_that_is_announced_too_large_reaches_nobody(more: int, answered: list[int]) -> None:
    reached, answers = [], []

    async def application(*_: Any) -> None:
        reached.append(True)

    async def receive() -> dict[str, Any]:
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        answers.append(message)

    length = b"%d" % (MAX_BODY_BYTES + more)
    await BodyLimit(application)({"type": "http", "headers": [(b"content-length", length)]}, receive, send)
    assert [answer["status"] for answer in answers if "status" in answer] == answered
    assert bool(reached) != bool(answered)


def test_a_body_that_never_ends_is_cut_off(impatient: str) -> None:
    with connected(impatient) as connection:
        connection.sendall(BEGIN + b"Transfer-Encoding: chunked\r\n\r\n")
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(200):
                connection.sendall(b"1000\r\n" + b" " * 4096 + b"\r\n")
        received = until_closed(connection)
        assert received == b"" or b" 413 " in received.split(b"\r\n")[0]


async def test_a_body_that_trickles_is_given_up() -> None:
    async def receive() -> dict[str, Any]:
        if not sent:
            sent.append({})
            return {"type": "http.request", "body": b'{"lau', "more_body": True}
        await asyncio.Event().wait()
        raise AssertionError

    sent: list[dict[str, Any]] = []
    answers: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        answers.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/runs/demo/terms",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
    }
    await BodyLimit(create_app(MemoryStore()), timeout_s=0.05)(scope, receive, send)
    assert answers[0]["status"] == 408
    assert json.loads(answers[1]["body"])["code"] == "too-slow"


def test_connections_beyond_the_limit_are_turned_away(listen: Callable[..., str]) -> None:
    url = listen(create_app(MemoryStore()), http=BoundedProtocol, limit_concurrency=3)
    with connected(url), connected(url), connected(url) as third:
        third.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert until_closed(third).startswith(b"HTTP/1.1 503")
    with httpx.Client(base_url=url, trust_env=False) as client:
        assert client.get("/healthz").status_code in (200, 503)


_LIMITED = """
import resource
from coordinator.server import _connections
for limits in ((300, 2000), (300, 300), (100, 100)):
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    print(_connections(1000), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_no_more_connections_are_taken_than_files_may_be_open() -> None:
    """The limit is raised as far as it may be; 128 files are kept for other things."""
    done = subprocess.run([sys.executable, "-c", _LIMITED], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "1000 1128 2000\n172 300 300\n1 100 100\n"


@pytest.mark.parametrize(
    "garbage", [b"\x16\x03\x01 a TLS hello\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"]
)
def test_what_is_no_http_gets_a_problem_body(listen: Callable[..., str], garbage: bytes) -> None:
    with connected(listen(create_app(MemoryStore()), http=BoundedProtocol)) as connection:
        connection.sendall(garbage)
        head, _, body = until_closed(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"Content-Type: application/problem+json" in head
    assert (json.loads(body)["code"], json.loads(body)["status"]) == ("bad-request", 400)
    assert "not an HTTP/1.1 request" in json.loads(body)["detail"]


async def test_offers_that_unpack_to_much_are_read_one_at_a_time(place: Any) -> None:
    under_way, most = 0, 0

    async def offload(function: Any, *arguments: Any) -> Any:
        nonlocal under_way, most
        large = len(arguments) > 1 and isinstance(arguments[0], bytes) and arguments[0].startswith(b"WCPACK")
        under_way += large
        most = max(most, under_way)
        try:
            return await asyncio.to_thread(function, *arguments)
        finally:
            under_way -= large

    app = create_app(place.store, ambient=Ambient(offload=offload))
    async with CoordinatorClient("http://coordinator", transport=httpx.ASGITransport(app)) as client:
        job = Job(place.store, client, "launch-a", world_size=4)
        job.term = await client.takeover("demo", TermRequest(launch="launch-a"))
        for rank in range(4):  # a field that nobody knows, and that is ignored: 17 MiB of it, packed to almost nothing
            raw = job.make_offer(rank).to_bytes()
            data = pack(raw[:-1] + b',"zzz":"' + b"0" * (17 << 20) + b'"}')
            await place.store.create(offer_key("demo", 1, rank), data)
        answer = await client.layout("demo", 1, 4)
    assert answer.layout is not None
    assert most == 1


async def test_manifests_of_large_worlds_are_written_out_off_the_loop(place: Any) -> None:
    made: list[bytes] = []

    async def offload(function: Any, *arguments: Any) -> Any:
        found = await asyncio.to_thread(function, *arguments)
        made.extend(item for item in (found if isinstance(found, tuple) else ()) if isinstance(item, bytes))
        return found

    app = create_app(place.store, ambient=Ambient(offload=offload))
    async with CoordinatorClient("http://coordinator", transport=httpx.ASGITransport(app)) as client:
        job = await Job(place.store, client, "launch-a", world_size=129).start()
        answer = await job.publish(step=1)
        assert await client.manifest("demo", 1) in made
    assert answer.state == "sealed"

"""Every store there is, and a TCP proxy that loses replies, for the tests of the bucket."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from tests.relay import Cut, Hook, Relay
from weight_store.local import LocalStore
from weight_store.memory import MemoryStore
from weight_store.opening import parse_s3_url
from weight_store.retry import Retrier, RetryPolicy, with_retry
from weight_store.s3 import S3Store
from weight_store.s3_settings import S3Options
from weight_store.store import Store

# The smallest parts that S3 takes, so that little data is a multipart upload.
SMALL_PARTS = S3Options(part_bytes=5 * 2**20, upload_workers=2)
KINDS = ("memory", "local", "retrying", "seaweed", "ministack")


@pytest.fixture(scope="session")
def fresh_prefix() -> Callable[[], str]:
    """A function that returns a key prefix nobody has used, since all tests share one bucket a server."""
    numbers = itertools.count()
    return lambda: f"t{next(numbers):04d}"


@pytest.fixture
def s3_store_url(request: pytest.FixtureRequest, fresh_prefix: Callable[[], str]) -> Callable[[str], str]:
    """``s3_store_url(server)``: an empty place on ``seaweed`` or ``ministack``."""

    def url(server: str) -> str:
        if server == "seaweed":
            return str(request.getfixturevalue("s3_url")("conformance", fresh_prefix()))
        return str(request.getfixturevalue("ministack").url("conformance", fresh_prefix()))

    return url


@pytest_asyncio.fixture(params=KINDS)
async def store(
    request: pytest.FixtureRequest, tmp_path: Path, s3_store_url: Callable[[str], str]
) -> AsyncIterator[Store]:
    """An empty store of each kind, bare but for ``retrying``."""
    made: Store
    match request.param:
        case "memory":
            made = MemoryStore()
        case "local":
            made = LocalStore(tmp_path / "store")
        case "retrying":
            made = with_retry(MemoryStore(), Retrier(RetryPolicy()))
        case server:
            made = S3Store(parse_s3_url(s3_store_url(server)), SMALL_PARTS)
    yield made
    await made.close()
    await made.close()


class CuttingProxy(Relay):
    """Passes bytes to an S3 server, except for replies that it was told to lose once the server has acted."""

    def __init__(self, endpoint_url: str) -> None:
        super().__init__(endpoint_url)
        self.requests: list[str] = []
        self.to_damage = 0
        """How many bodies are yet to get a wrong byte on their way to the server."""
        self._cut: list[tuple[re.Pattern[bytes], int]] = []

    def cut(self, request: bytes, *, after_bytes: int = 0, times: int = 1) -> None:
        """Close the connection after ``after_bytes`` of the next replies to requests that match ``request``."""
        self._cut += [(re.compile(request), after_bytes)] * times

    @property
    def pending(self) -> int:
        return len(self._cut)

    def hooks(self) -> tuple[Hook, Hook]:
        allowed: int | None = None

        async def upwards(data: bytes) -> bytes:
            nonlocal allowed
            line = re.match(rb"(?:PUT|POST|GET|HEAD|DELETE) \S+ HTTP/1\.1\r\n", data)
            if line:
                self.requests.append(line[0].split(b" HTTP")[0].decode())
                for rule in self._cut:
                    if rule[0].match(data):
                        self._cut.remove(rule)
                        allowed = rule[1]
                        break
            if self.to_damage and len(data) > 8192 and not line:
                self.to_damage -= 1
                data = data[:4000] + bytes([data[4000] ^ 1]) + data[4001:]
            return data

        async def downwards(data: bytes) -> bytes:
            nonlocal allowed
            if allowed is None or data.startswith(b"HTTP/1.1 100 "):
                return data
            if len(data) >= allowed:
                raise Cut(data[:allowed])
            allowed -= len(data)
            return data

        return upwards, downwards


@pytest_asyncio.fixture
async def proxy(seaweed: object) -> AsyncIterator[CuttingProxy]:
    """A proxy in front of SeaweedFS."""
    cutting = CuttingProxy(seaweed.endpoint_url)  # type: ignore[attr-defined]
    async with cutting.listening():
        yield cutting


@pytest.fixture
def proxied_url(proxy: CuttingProxy, s3_store_url: Callable[[str], str], seaweed: object) -> str:
    """An empty place on SeaweedFS, reached through the proxy."""
    direct = seaweed.endpoint_url  # type: ignore[attr-defined]
    return s3_store_url("seaweed").replace(direct, f"http://127.0.0.1:{proxy.port}")


@dataclass
class Canned:
    """An HTTP server that gives one answer to everything, or none. ``asked`` counts requests."""

    port: int = 0
    answer: bytes = b""
    asked: int = 0

    @property
    def url(self) -> str:
        return f"s3://bucket/p?endpoint=http://127.0.0.1:{self.port}&region=us-east-1"

    def refuse(self, status: int, code: str, message: str = "no") -> None:
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
        self.answer = (
            f"HTTP/1.1 {status} Because\r\nContent-Type: application/xml\r\nConnection: close\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode() + body

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            head = await reader.readuntil(b"\r\n\r\n")
            self.asked += 1
            length = re.search(rb"(?i)content-length: (\d+)", head)
            await reader.readexactly(int(length[1]) if length else 0)
            if self.answer:
                writer.write(self.answer)
            else:
                await reader.read()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


@pytest_asyncio.fixture
async def canned(aws_environment: None) -> AsyncIterator[Canned]:
    """A server whose only answer a test chooses."""
    made = Canned()
    server = await asyncio.start_server(made.handle, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    yield made
    server.close()
    await server.wait_closed()


@pytest.fixture
def payload() -> Callable[[int], bytes]:
    """``payload(n)``: n bytes that repeat only after 251, so that misplaced pieces show."""
    pattern = bytes(range(251))
    return lambda size: (pattern * (size // 251 + 1))[:size]

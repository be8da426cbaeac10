"""A real S3 server behind a proxy that takes some of its safety away, since no server here shows each kind."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

Headers = dict[bytes, bytes]
Forward = Callable[[bytes, Headers, bytes], Awaitable[bytes]]
Mode = Callable[[bytes, Headers, bytes, Forward], Awaitable[bytes]]


def answer(status: int, code: str) -> bytes:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>".encode()
    head = f"HTTP/1.1 {status} No\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


PRECONDITION = answer(412, "PreconditionFailed")


async def ignoring(line: bytes, headers: Headers, body: bytes, forward: Forward) -> bytes:
    """As rclone serve s3, JuiceFS's gateway and others do."""
    headers.pop(b"if-none-match", None)
    headers.pop(b"if-match", None)
    return await forward(line, headers, body)


async def create_only(line: bytes, headers: Headers, body: bytes, forward: Forward) -> bytes:
    headers.pop(b"if-match", None)
    return await forward(line, headers, body)


async def replace_refused(line: bytes, headers: Headers, body: bytes, forward: Forward) -> bytes:
    return answer(501, "NotImplemented") if b"if-match" in headers else await forward(line, headers, body)


async def refusing(line: bytes, headers: Headers, body: bytes, forward: Forward) -> bytes:
    """As OpenStack Swift does."""
    conditional = b"if-match" in headers or b"if-none-match" in headers
    return answer(501, "NotImplemented") if conditional else await forward(line, headers, body)


async def unquoted(line: bytes, headers: Headers, body: bytes, forward: Forward) -> bytes:
    """As old releases of Ceph's RGW do."""
    etag = headers.get(b"if-match")
    if etag is not None:
        if etag.startswith(b'"'):
            return PRECONDITION
        headers[b"if-match"] = b'"' + etag + b'"'
    return await forward(line, headers, body)


async def racy(line: bytes, headers: Headers, body: bytes, forward: Forward) -> bytes:
    """Looks first and writes then, as several servers did before it was reported to them."""
    wanted = headers.pop(b"if-match", None)
    absent = headers.pop(b"if-none-match", None)
    if wanted or absent:
        plain = {name: value for name, value in headers.items() if name in {b"host"}}
        found = await forward(line.replace(b"PUT ", b"HEAD ").replace(b"POST ", b"HEAD "), plain, b"")
        there = b" 200 " in found.split(b"\r\n")[0]
        etag = re.search(rb"(?i)\r\netag: *(\S+)", found)
        if (absent and there) or (wanted and (etag is None or etag[1] != wanted)):
            return PRECONDITION
        await asyncio.sleep(0.02)
    return await forward(line, headers, body)


async def racy_replacing(line: bytes, headers: Headers, body: bytes, forward: Forward) -> bytes:
    """Creates an object once only, but looks first and writes then where it should compare and set."""
    return await (racy(line, headers, body, forward) if b"if-match" in headers else forward(line, headers, body))


async def without_ranges(line: bytes, headers: Headers, body: bytes, forward: Forward) -> bytes:
    headers.pop(b"range", None)
    return await forward(line, headers, body)


async def forgetting(line: bytes, headers: Headers, body: bytes, forward: Forward) -> bytes:
    """Has nothing of what it confirmed, as a read replica that lags behind."""
    return answer(404, "NoSuchKey") if line.startswith(b"GET ") else await forward(line, headers, body)


async def untried(line: bytes, headers: Headers, body: bytes, forward: Forward) -> bytes:
    """Serves everything but what would be tried out on it."""
    if b"/_doctor/" in line or b"_doctor%2F" in line:
        return answer(500, "InternalError")
    return await forward(line, headers, body)


async def sound(line: bytes, headers: Headers, body: bytes, forward: Forward) -> bytes:
    return await forward(line, headers, body)


def damaging(damage: Callable[[int, bytearray], None]) -> Mode:
    """Damages objects that were uploaded in parts: ``damage(offset, body)`` changes what a read of them returns."""

    async def mode(line: bytes, headers: Headers, body: bytes, forward: Forward) -> bytes:
        found = await forward(line, headers, body)
        wanted = re.fullmatch(rb"bytes=(\d+)-\d+", headers.get(b"range", b""))
        if not line.startswith(b"GET ") or b"/parts" not in line or wanted is None or b" 206 " not in found[:20]:
            return found
        head, _, content = found.partition(b"\r\n\r\n")
        changed = bytearray(content)
        damage(int(wanted[1]), changed)
        assert len(changed) == len(content)
        return head + b"\r\n\r\n" + changed

    return mode


def zeroed(start: int, end: int) -> Mode:
    """A store that has zeros instead of the bytes from ``start`` to ``end``."""

    def damage(offset: int, body: bytearray) -> None:
        first, last = max(start - offset, 0), min(end - offset, len(body))
        if first < last:
            body[first:last] = bytes(last - first)

    return damaging(damage)


def throttling(header: bytes, times: float) -> Mode:
    """Asks for fewer requests when it is sent ``header``, so many times."""
    left = times

    async def mode(line: bytes, headers: Headers, body: bytes, forward: Forward) -> bytes:
        nonlocal left
        if line.startswith(b"PUT ") and b"/plain" in line and header in headers:
            left -= 1
            if left >= 0:
                return answer(503, "SlowDown")
        return await forward(line, headers, body)

    return mode


class Remembering:
    """A cache in between that repeats its first answer to each read once."""

    def __init__(self) -> None:
        self.known: dict[bytes, bytes] = {}

    async def __call__(self, line: bytes, headers: Headers, body: bytes, forward: Forward) -> bytes:
        path = line.split(b" ")[1]
        if not line.startswith(b"GET ") or b"fresh-" not in path or b"?" in path:
            return await forward(line, headers, body)
        if path in self.known:
            return self.known.pop(path)
        self.known[path] = await forward(line, headers, body)
        return self.known[path]


class Proxy:
    """One request a connection: MiniStack checks no signatures, so headers may change on the way."""

    def __init__(self, upstream: tuple[str, int]) -> None:
        self.upstream = upstream
        self.mode: Mode = ignoring

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            line, *fields = (await reader.readuntil(b"\r\n\r\n")).rstrip(b"\r\n").split(b"\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (field.partition(b":") for field in fields)}
            if headers.pop(b"expect", None):
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            body = await reader.readexactly(int(headers.get(b"content-length", b"0")))
            found = await self.mode(line, headers, body, self.forward)
            writer.write(found.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1))
            await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def forward(self, line: bytes, headers: Headers, body: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(*self.upstream)
        lines = [line, *(name + b": " + value for name, value in headers.items()), b"connection: close"]
        writer.write(b"\r\n".join(lines) + b"\r\n\r\n" + body)
        found = await reader.read(-1)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        return re.sub(rb"(?i)\r\nconnection: [^\r]*", b"", found, count=1)


@asynccontextmanager
async def proxied(upstream: tuple[str, int], port: int = 0) -> AsyncIterator[tuple[Proxy, int]]:
    """A proxy in front of ``upstream``, and its port; 0 picks a free one."""
    proxy = Proxy(upstream)
    server = await asyncio.start_server(proxy.handle, "127.0.0.1", port)
    yield proxy, server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()

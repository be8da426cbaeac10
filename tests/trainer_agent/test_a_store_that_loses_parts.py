"""A store that confirms a part of an upload and then does not have it costs one upload, not the version."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from urllib.parse import urlsplit

import torch

from tests.weight_store.standins import Forward, Headers, proxied
from trainer_agent import Publisher

NBYTES = 20_000_000
"""Two parts."""


class LosingOnce:
    """Confirms the first part that it gets, and forgets it."""

    def __init__(self) -> None:
        self.lost = 0
        self.completed = 0

    async def __call__(self, line: bytes, headers: Headers, body: bytes, forward: Forward) -> bytes:
        if b".shard?" in line and line.startswith(b"POST ") and b"uploadId=" in line:
            self.completed += 1
        if not (b"partNumber=1&" in line and not self.lost):
            return await forward(line, headers, body)
        self.lost += 1
        etag = hashlib.md5(body, usedforsecurity=False).hexdigest()
        return f'HTTP/1.1 200 OK\r\nETag: "{etag}"\r\nContent-Length: 0\r\n\r\n'.encode()


async def test_the_shard_is_sent_again(make_service, s3_url) -> None:
    url = s3_url("losing", secrets.token_hex(4))
    service = make_service(url)
    weights = {"w": torch.randint(0, 256, (NBYTES,), dtype=torch.uint8)}
    endpoint = urlsplit(url.partition("endpoint=")[2].partition("&")[0])
    async with proxied((str(endpoint.hostname), int(endpoint.port or 0))) as (proxy, port):
        losing = proxy.mode = LosingOnce()
        store = url.replace(f":{endpoint.port}", f":{port}")
        publisher = Publisher(run="r", store=store, coordinator=service.url)
        try:
            handle = await asyncio.to_thread(publisher.publish, weights, 0)
            assert await asyncio.to_thread(handle.sealed, 120) == 1
        finally:
            await asyncio.to_thread(publisher.close)
    found = await asyncio.to_thread(service.read, "r")
    assert torch.equal(found.tensors["w"], weights["w"])
    assert (losing.lost, losing.completed) == (1, 2)

"""A bucket that lies in another region than the settings say is found at the first request, whichever that is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.weight_store.standins import Forward, Headers, proxied
from weight_store.opening import parse_s3_url
from weight_store.s3 import S3Store
from weight_store.s3_settings import MIB, S3Options

REGION = "eu-west-1"
OPTIONS = S3Options(part_bytes=5 * MIB, upload_workers=2)


class Elsewhere:
    """Answers as Amazon does to whoever signs for another region."""

    def __init__(self) -> None:
        self.refused: list[str] = []

    async def __call__(self, line: bytes, headers: Headers, body: bytes, forward: Forward) -> bytes:
        if f"/{REGION}/s3/".encode() in headers[b"authorization"]:
            return await forward(line, headers, body)
        self.refused.append(line.split(b"?")[0].decode())
        text = (
            "<?xml version='1.0'?><Error><Code>AuthorizationHeaderMalformed</Code><Message>the region is wrong; "
            f"expecting '{REGION}'</Message><Region>{REGION}</Region></Error>"
        ).encode()
        head = f"HTTP/1.1 400 Bad Request\r\nContent-Type: application/xml\r\nContent-Length: {len(text)}\r\n\r\n"
        return head.encode() + text


@pytest.mark.parametrize("size", [100_000, 11 * MIB], ids=["one PUT", "parts"])
async def test_the_first_request_is_an_upload(
    seaweed: Any,
    s3_url: Callable[..., str],
    payload: Callable[[int], bytes],
    fresh_prefix: Callable[[], str],
    size: int,
) -> None:
    url, address = s3_url("conformance", fresh_prefix()), urlsplit(seaweed.endpoint_url)
    data = payload(size)
    async with proxied((str(address.hostname), int(address.port or 0))) as (proxy, port):
        elsewhere = proxy.mode = Elsewhere()
        store = S3Store(parse_s3_url(url.replace(seaweed.endpoint_url, f"http://127.0.0.1:{port}")), OPTIONS)
        async with store.upload("v/x.shard") as upload:
            await upload.write(data)
            await upload.commit()
        buffer = bytearray(size)
        await store.read_into("v/x.shard", 0, memoryview(buffer))
        await store.close()
    assert elsewhere.refused
    assert buffer == data

"""A server that answers 200 with nonsense is reported as a store that failed, not as a defect of ours."""

from __future__ import annotations

import asyncio

import pytest

from weight_store.errors import StoreUnavailable
from weight_store.opening import parse_s3_url
from weight_store.s3 import S3Store


@pytest.mark.parametrize(
    "entry",
    [
        "<Key>a</Key><Size>abc</Size><LastModified>2026-01-01T00:00:00Z</LastModified>",
        "<Key>a</Key><Size>1</Size><LastModified>yesterday</LastModified>",
        "<Key>a</Key><Size>1</Size>",
        "<Size>1</Size><LastModified>2026-01-01T00:00:00Z</LastModified>",
        "<Key>",
    ],
)
async def test_a_listing_with_fields_that_are_none(entry: str, aws_environment: None) -> None:
    body = f"<ListBucketResult><Contents>{entry}</Contents></ListBucketResult>".encode()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    store = S3Store(parse_s3_url(f"s3://bucket?endpoint=http://127.0.0.1:{port}&region=us-east-1"))
    try:
        with pytest.raises(StoreUnavailable):
            _ = [found async for found in store.list("")]
    finally:
        await store.close()
        server.close()

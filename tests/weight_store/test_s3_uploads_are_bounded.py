"""An upload to S3 streams: its memory does not grow with the object, and what it abandons is really gone."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import Callable
from typing import Any

import boto3
import pytest

from weight_store.errors import StoreRefused, StoreUnavailable
from weight_store.opening import parse_s3_url
from weight_store.retry import Retrier, RetryPolicy
from weight_store.s3 import S3Store
from weight_store.s3_settings import S3Location, S3Options
from weightcast.devserver import free_port

MIB = 2**20
OPTIONS = S3Options(part_bytes=5 * MIB, upload_workers=2)


def unfinished(location: S3Location) -> list[str]:
    """Keys of the multipart uploads that the server still holds below the store's prefix."""
    client = boto3.client("s3", endpoint_url=location.endpoint_url, region_name="us-east-1")
    try:
        found = client.list_multipart_uploads(Bucket=location.bucket).get("Uploads", [])
    finally:
        client.close()
    return [upload["Key"] for upload in found if upload["Key"].startswith(location.prefix)]


async def test_memory_does_not_grow_with_the_object(s3_store_url: Callable[[str], str]) -> None:
    store = S3Store(parse_s3_url(s3_store_url("seaweed")), OPTIONS)
    async with store.upload("warm-up") as upload:
        await upload.write(b"x")
        await upload.commit()
    piece = bytes(MIB)
    tracemalloc.start()
    async with store.upload("v/x.shard") as upload:
        for _ in range(40):
            await upload.write(piece)
        await upload.commit()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    await store.close()
    # One part that fills, two in flight, and what HTTP needs around them.
    assert peak < 4 * OPTIONS.part_bytes


@pytest.mark.parametrize("size", [5000, 4 * MIB, 12 * MIB], ids=["little", "one part", "parts"])
async def test_what_failed_takes_no_memory(size: int, s3_store_url: Callable[[str], str]) -> None:
    """During an outage uploads fail again and again, and the collector of cycles counts objects, not their bytes."""
    url, nowhere = s3_store_url("seaweed"), f"http://127.0.0.1:{free_port()}"
    endpoint = parse_s3_url(url).endpoint_url
    assert endpoint is not None
    store = S3Store(parse_s3_url(url.replace(endpoint, nowhere)), OPTIONS)
    piece = bytes(size)

    async def send() -> None:
        async with store.upload("v/x.shard") as upload:
            await upload.write(piece)
            await upload.commit()

    gc.collect()
    gc.disable()
    try:
        for number in range(6):
            if number == 1:  # what is made once has been made
                tracemalloc.start()
            with pytest.raises(StoreUnavailable):
                await send()
        left, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.enable()
    await store.close()
    assert left < 2 * OPTIONS.part_bytes


async def test_several_uploads_share_the_parts_in_flight(s3_store_url: Callable[[str], str]) -> None:
    store = S3Store(parse_s3_url(s3_store_url("seaweed")), OPTIONS)

    async def send(number: int) -> None:
        async with store.upload(f"v/{number}.shard") as upload:
            await upload.write(bytes([number]) * (11 * MIB))
            await upload.commit()

    await asyncio.gather(*map(send, range(4)))
    assert [(entry.key, entry.size) async for entry in store.list("v/")] == [
        (f"v/{number}.shard", 11 * MIB) for number in range(4)
    ]
    await store.close()


@pytest.mark.parametrize("server", ["seaweed", "ministack"])
async def test_an_abandoned_upload_is_aborted(s3_store_url: Callable[[str], str], server: str) -> None:
    location = parse_s3_url(s3_store_url(server))
    store = S3Store(location, OPTIONS)
    held = asyncio.Event()

    async def abandon() -> None:
        async with store.upload("v/x.shard") as upload:
            await upload.write(bytes(16 * MIB))
            held.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(abandon())
    await held.wait()
    assert await asyncio.to_thread(unfinished, location) == [location.full_key("v/x.shard")]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(unfinished, location) == []
    await store.close()


async def test_a_part_that_cannot_be_sent_fails_the_upload(proxied_url: str, proxy: Any) -> None:
    store = S3Store(parse_s3_url(proxied_url), OPTIONS, retrier=Retrier(RetryPolicy(attempts=2, first_delay_s=0.01)))
    proxy.cut(b"PUT .*partNumber=1", times=4)
    async with store.upload("v/x.shard") as upload:
        await upload.write(bytes(11 * MIB))
        with pytest.raises(StoreUnavailable):
            await upload.commit()
        # Its bytes were kept: committing again sends what is missing.
        with pytest.raises(StoreUnavailable):
            await upload.commit()
        await upload.commit()
    buffer = bytearray(11 * MIB)
    await store.read_into("v/x.shard", 0, memoryview(buffer))
    await store.close()


async def test_parts_smaller_than_s3_takes_are_refused() -> None:
    with pytest.raises(StoreRefused, match="part_bytes"):
        S3Store(S3Location("bucket"), S3Options(part_bytes=MIB))

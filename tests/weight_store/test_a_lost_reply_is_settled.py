"""A write that the store has done, but whose reply never came, counts once and as ours.

A real SeaweedFS does the write; a TCP proxy closes the connection before its answer gets through.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

from weight_store.errors import PreconditionFailed, StoreUnavailable
from weight_store.opening import open_store, parse_s3_url
from weight_store.register import Created, Existing, create_or_read
from weight_store.retry import RetryPolicy
from weight_store.s3 import S3Store
from weight_store.s3_settings import S3Options
from weight_store.store import Store

MIB = 2**20
OPTIONS = S3Options(part_bytes=5 * MIB, upload_workers=2)
QUICK = RetryPolicy(attempts=6, first_delay_s=0.01, max_delay_s=0.1)


@pytest_asyncio.fixture
async def bare(proxied_url: str) -> AsyncIterator[Store]:
    store = S3Store(parse_s3_url(proxied_url), OPTIONS)
    yield store
    await store.close()


@pytest_asyncio.fixture
async def retrying(proxied_url: str) -> AsyncIterator[Store]:
    store = open_store(proxied_url, policy=QUICK, options=OPTIONS)
    yield store
    await store.close()


async def test_without_retries_the_outcome_is_unknown(bare: Store, proxy: Any) -> None:
    proxy.cut(b"PUT .*/head")
    # Never the success that it was; "exists already" if the HTTP client has repeated the request by itself.
    with pytest.raises((StoreUnavailable, PreconditionFailed)):
        await bare.create("head", b"ours")
    assert (await bare.get("head", max_bytes=10)).data == b"ours"


async def test_a_create_is_ours(retrying: Store, proxy: Any) -> None:
    proxy.cut(b"PUT .*/head")
    etag = await retrying.create("head", b"ours")
    blob = await retrying.get("head", max_bytes=10)
    assert (blob.data, blob.etag) == (b"ours", etag)
    assert proxy.pending == 0


async def test_a_create_is_settled_even_if_the_settling_fails_at_first(retrying: Store, proxy: Any) -> None:
    # Two each, because aiohttp repeats a request once.
    proxy.cut(b"PUT .*/head", times=2)
    proxy.cut(b"GET .*/head", times=2)
    await retrying.create("head", b"ours")
    assert proxy.pending == 0


async def test_a_create_that_lost_is_not_ours(retrying: Store, proxy: Any) -> None:
    await retrying.create("head", b"theirs")
    for data in (b"ours!!", b"o", b"much longer than theirs"):
        proxy.cut(b"PUT .*/head")
        with pytest.raises(PreconditionFailed):
            await retrying.create("head", data)
    assert proxy.pending == 0
    assert (await retrying.get("head", max_bytes=10)).data == b"theirs"


async def test_a_replace_is_ours(retrying: Store, proxy: Any) -> None:
    first = await retrying.create("head", b"1")
    proxy.cut(b"PUT .*/head")
    second = await retrying.replace("head", b"2", etag=first)
    assert (await retrying.get("head", max_bytes=10)).data == b"2"
    # The ETag that came from reading back serves the next replace.
    await retrying.replace("head", b"3", etag=second)
    assert proxy.pending == 0


async def test_a_replace_that_lost_is_not_ours(retrying: Store, proxy: Any) -> None:
    first = await retrying.create("head", b"1")
    await retrying.replace("head", b"theirs", etag=first)
    proxy.cut(b"PUT .*/head")
    with pytest.raises(PreconditionFailed):
        await retrying.replace("head", b"ours", etag=first)
    assert (await retrying.get("head", max_bytes=10)).data == b"theirs"


async def test_a_register_is_decided_once(retrying: Store, proxy: Any) -> None:
    proxy.cut(b"PUT .*/manifest")
    assert isinstance(await create_or_read(retrying, "manifest", b"ours", 100), Created)
    proxy.cut(b"PUT .*/manifest")
    decided = await create_or_read(retrying, "manifest", b"others", 100)
    assert isinstance(decided, Existing)
    assert decided.data == b"ours"


@pytest.mark.parametrize(
    ("size", "request_line"),
    [
        (100, b"PUT .*/x.shard"),
        (12 * MIB, b"POST .*/x.shard\\?uploadId="),
        (12 * MIB, b"PUT .*/x.shard\\?.*partNumber=2"),
        (12 * MIB, b"POST .*/x.shard\\?uploads"),
    ],
    ids=["put", "complete", "part", "begin"],
)
async def test_an_upload_is_ours(
    retrying: Store, proxy: Any, payload: Callable[[int], bytes], size: int, request_line: bytes
) -> None:
    data = payload(size)
    proxy.cut(request_line)
    async with retrying.upload("v/x.shard") as upload:
        await upload.write(data)
        await upload.commit()
    assert proxy.pending == 0
    buffer = bytearray(size)
    await retrying.read_into("v/x.shard", 0, memoryview(buffer))
    assert buffer == data


@pytest.mark.parametrize("size", [100, 6 * MIB])
async def test_an_upload_that_lost_is_not_ours(
    retrying: Store, proxy: Any, payload: Callable[[int], bytes], size: int
) -> None:
    await retrying.create("v/x.shard", b"theirs")
    proxy.cut(b"PUT .*/x.shard" if size == 100 else b"POST .*/x.shard\\?uploadId=")
    async with retrying.upload("v/x.shard") as upload:
        await upload.write(payload(size))
        with pytest.raises(PreconditionFailed):
            await upload.commit()
    assert proxy.pending == 0
    assert (await retrying.get("v/x.shard", max_bytes=10)).data == b"theirs"


async def test_a_body_cut_short_is_never_taken_for_the_whole(
    bare: Store, proxy: Any, payload: Callable[[int], bytes]
) -> None:
    data = payload(MIB)
    await bare.create("shard", data)
    for request_line in (b"GET .*/shard",) * 2:
        proxy.cut(request_line, after_bytes=200_000)
        with pytest.raises(StoreUnavailable):
            await bare.read_into("shard", 5, memoryview(bytearray(MIB - 5)))
        proxy.cut(request_line, after_bytes=200_000)
        with pytest.raises(StoreUnavailable):
            await bare.get("shard", max_bytes=MIB)
    assert proxy.pending == 0


async def test_a_read_that_broke_is_repeated(retrying: Store, proxy: Any, payload: Callable[[int], bytes]) -> None:
    data = payload(MIB)
    await retrying.create("shard", data)
    proxy.cut(b"GET .*/shard", after_bytes=200_000, times=2)
    buffer = bytearray(MIB)
    await retrying.read_into("shard", 0, memoryview(buffer))
    assert buffer == data
    proxy.cut(b"GET .*/shard", after_bytes=1000)
    assert (await retrying.get("shard", max_bytes=MIB)).data == data


async def test_a_listing_goes_on_after_a_broken_page(retrying: Store, proxy: Any) -> None:
    for number in range(5):
        await retrying.create(f"a/{number}", b"x")
    proxy.cut(b"GET .*list-type=2", after_bytes=100)
    assert [entry.key async for entry in retrying.list("a/")] == [f"a/{number}" for number in range(5)]
    assert proxy.pending == 0

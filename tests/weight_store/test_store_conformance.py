"""Every adapter keeps the promises of the port. A new one joins by a line in the ``store`` fixture."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

from weight_store.errors import (
    FormatError,
    ObjectNotFound,
    ObjectTooLarge,
    PreconditionFailed,
    StoreRefused,
)
from weight_store.opening import check_reachable, check_writable
from weight_store.register import Created, Existing, create_or_read
from weight_store.store import Store

MIB = 2**20
Payload = Callable[[int], bytes]


async def _keys(store: Store, prefix: str = "") -> list[str]:
    return [entry.key async for entry in store.list(prefix)]


async def test_what_was_created_is_read(store: Store) -> None:
    etag = await store.create("run/head.json", b"{}")
    blob = await store.get("run/head.json", max_bytes=2)
    assert (blob.data, blob.etag) == (b"{}", etag)


async def test_an_empty_object_is_an_object(store: Store) -> None:
    await store.create("_runs/a", b"")
    assert (await store.get("_runs/a", max_bytes=0)).data == b""
    await store.read_into("_runs/a", 0, memoryview(bytearray()))


async def test_a_missing_object_is_not_found(store: Store) -> None:
    with pytest.raises(ObjectNotFound, match="run/absent"):
        await store.get("run/absent", max_bytes=10)
    with pytest.raises(ObjectNotFound):
        await store.read_into("run/absent", 0, memoryview(bytearray(1)))
    with pytest.raises(PreconditionFailed):
        await store.replace("run/absent", b"new", etag='"d41d8cd98f00b204e9800998ecf8427e"')
    assert await _keys(store) == []


async def test_a_second_create_is_refused_and_changes_nothing(store: Store) -> None:
    await store.create("a/b", b"first")
    with pytest.raises(PreconditionFailed):
        await store.create("a/b", b"second")
    assert (await store.get("a/b", max_bytes=10)).data == b"first"


async def test_one_of_racing_creators_wins(store: Store) -> None:
    for round_ in range(2):
        key = f"race/{round_}"
        outcomes = await asyncio.gather(
            *(store.create(key, f"writer {n}".encode()) for n in range(6)), return_exceptions=True
        )
        winners = [n for n, outcome in enumerate(outcomes) if isinstance(outcome, str)]
        losers = [outcome for outcome in outcomes if not isinstance(outcome, str)]
        assert len(winners) == 1
        assert all(isinstance(loser, PreconditionFailed) for loser in losers), losers
        assert (await store.get(key, max_bytes=99)).data == f"writer {winners[0]}".encode()


async def test_replace_needs_the_current_etag(store: Store) -> None:
    first = await store.create("head", b"1")
    second = await store.replace("head", b"2", etag=first)
    with pytest.raises(PreconditionFailed):
        await store.replace("head", b"3", etag=first)
    blob = await store.get("head", max_bytes=9)
    assert (blob.data, blob.etag) == (b"2", second)
    assert second != first


async def test_compare_and_set_loses_no_update(store: Store) -> None:
    await store.create("counter", b"0")

    async def add(times: int) -> None:
        while times:
            blob = await store.get("counter", max_bytes=20)
            try:
                await store.replace("counter", b"%d" % (int(blob.data) + 1), etag=blob.etag)
            except PreconditionFailed:
                continue
            times -= 1

    await asyncio.gather(*(add(4) for _ in range(4)))
    assert (await store.get("counter", max_bytes=20)).data == b"16"


async def test_ranges_are_exact(store: Store, payload: Payload) -> None:
    data = payload(3 * MIB + 17)
    await store.create("shard", data)
    for offset, size in ((0, 1), (0, len(data)), (1, 2 * MIB), (len(data) - 1, 1), (MIB, 0)):
        buffer = bytearray(size)
        await store.read_into("shard", offset, memoryview(buffer))
        assert bytes(buffer) == data[offset : offset + size]


async def test_a_range_fills_only_the_given_view(store: Store) -> None:
    await store.create("shard", b"0123456789")
    buffer = bytearray(b"........")
    await store.read_into("shard", 3, memoryview(buffer)[2:5])
    assert buffer == b"..345..."


async def test_concurrent_ranges_do_not_mix(store: Store, payload: Payload) -> None:
    data = payload(4 * MIB)
    await store.create("shard", data)
    buffer = bytearray(len(data))
    step = len(data) // 8
    await asyncio.gather(
        *(store.read_into("shard", n * step, memoryview(buffer)[n * step : (n + 1) * step]) for n in range(8))
    )
    assert buffer == data


async def test_a_range_past_the_end_is_a_format_error(store: Store) -> None:
    await store.create("shard", b"0123456789")
    for offset, size in ((0, 11), (9, 2), (10, 1), (100, 5), (-1, 2)):
        with pytest.raises(FormatError):
            await store.read_into("shard", offset, memoryview(bytearray(size)))


async def test_an_object_above_the_limit_is_refused(store: Store, payload: Payload) -> None:
    await store.create("big", payload(MIB))
    with pytest.raises(ObjectTooLarge, match="big"):
        await store.get("big", max_bytes=MIB - 1)
    assert len((await store.get("big", max_bytes=MIB)).data) == MIB


@pytest.mark.parametrize("size", [0, 1, 5 * MIB, 5 * MIB + 1, 17 * MIB + 3])
async def test_an_upload_is_what_was_written(store: Store, payload: Payload, size: int) -> None:
    data = payload(size)
    async with store.upload("v/00000-a.shard") as upload:
        scratch = bytearray(MIB + 1)
        for start in range(0, size, len(scratch)):
            piece = data[start : start + len(scratch)]
            scratch[: len(piece)] = piece
            # The buffer is ours again at once: spoil it.
            await upload.write(memoryview(scratch)[: len(piece)])
            scratch[:] = bytes(len(scratch))
        assert await _keys(store) == []
        await upload.commit()
    buffer = bytearray(size)
    await store.read_into("v/00000-a.shard", 0, memoryview(buffer))
    assert buffer == data
    [entry] = [entry async for entry in store.list("")]
    assert (entry.key, entry.size) == ("v/00000-a.shard", size)


@pytest.mark.parametrize("size", [10, 11 * MIB])
async def test_an_abandoned_upload_leaves_nothing(store: Store, payload: Payload, size: int) -> None:
    class LostInterestError(Exception):
        pass

    async def lose_interest() -> None:
        async with store.upload("v/x.shard") as upload:
            await upload.write(payload(size))
            raise LostInterestError

    with pytest.raises(LostInterestError):
        await lose_interest()
    with pytest.raises(ObjectNotFound):
        await store.get("v/x.shard", max_bytes=MIB)
    assert await _keys(store) == []


async def test_a_cancelled_upload_leaves_nothing(store: Store, payload: Payload) -> None:
    begun = asyncio.Event()

    async def upload_for_ever() -> None:
        async with store.upload("v/x.shard") as upload:
            await upload.write(payload(11 * MIB))
            begun.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(upload_for_ever())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await _keys(store) == []


@pytest.mark.parametrize("size", [10, 6 * MIB])
async def test_an_upload_creates_only(store: Store, payload: Payload, size: int) -> None:
    await store.create("v/x.shard", b"first")
    async with store.upload("v/x.shard") as upload:
        await upload.write(payload(size))
        with pytest.raises(PreconditionFailed):
            await upload.commit()
    assert (await store.get("v/x.shard", max_bytes=99)).data == b"first"


async def test_one_of_racing_uploads_wins(store: Store, payload: Payload) -> None:
    async def race(number: int) -> int | None:
        async with store.upload("v/x.shard") as upload:
            await upload.write(bytes([number]) * (6 * MIB))
            try:
                await upload.commit()
            except PreconditionFailed:
                return None
        return number

    [winner] = [number for number in await asyncio.gather(*map(race, range(3))) if number is not None]
    buffer = bytearray(6 * MIB)
    await store.read_into("v/x.shard", 0, memoryview(buffer))
    assert buffer == bytes([winner]) * (6 * MIB)


async def test_delete_is_idempotent(store: Store) -> None:
    await store.create("a/b/c", b"x")
    await store.delete("a/b/c")
    await store.delete("a/b/c")
    await store.delete("never/was")
    with pytest.raises(ObjectNotFound):
        await store.get("a/b/c", max_bytes=9)
    await store.create("a/b/c", b"again")
    assert await _keys(store) == ["a/b/c"]


async def test_list_is_in_key_order_and_below_the_prefix(store: Store) -> None:
    # "a-b" beside "a/1" is left out: Amazon sorts by whole key, SeaweedFS part by part. A run's keys have no such pair.
    keys = ["a/1", "a/2/x", "a/2/y", "a/20", "b", "v/000000000010/open.json", "v/000000000009/open.json"]
    for key in keys:
        await store.create(key, key.encode())
    assert await _keys(store) == sorted(keys)
    assert await _keys(store, "a/") == ["a/1", "a/2/x", "a/2/y", "a/20"]
    assert await _keys(store, "a/2") == ["a/2/x", "a/2/y", "a/20"]
    assert await _keys(store, "v/0000000000") == ["v/000000000009/open.json", "v/000000000010/open.json"]
    assert await _keys(store, "nothing/here") == []


async def test_list_tells_size_etag_and_time(store: Store) -> None:
    etag = await store.create("a/one", b"12345")
    await store.create("a/two", b"1")
    one, two = [entry async for entry in store.list("a/")]
    assert (one.size, one.etag) == (5, etag)
    assert two.modified_s >= one.modified_s > 1.6e9


async def test_a_key_that_is_no_plain_name_is_refused(store: Store) -> None:
    async def upload(key: str) -> None:
        async with store.upload(key):
            pass

    for key in ("../x", "a/../x", "/etc/passwd", "a//b", "a/", "", ".", "a\0b", "a\nb", "a\\b", "k" * 1025, "\ud800"):
        outcomes = await asyncio.gather(
            store.create(key, b"x"),
            store.replace(key, b"x", etag='"e"'),
            store.get(key, max_bytes=1),
            store.read_into(key, 0, memoryview(bytearray(1))),
            store.delete(key),
            upload(key),
            return_exceptions=True,
        )
        assert {type(outcome) for outcome in outcomes} == {StoreRefused}, (key, outcomes)
    assert await _keys(store) == []


async def test_keys_of_the_layout_and_beyond_survive(store: Store) -> None:
    keys = ["run/v/000000000001/00000-0123456789abcdef.shard", "run/asset name+%20.json", "grün/ключ"]
    for key in keys:
        await store.create(key, key.encode())
    assert await _keys(store) == sorted(keys)
    for key in keys:
        assert (await store.get(key, max_bytes=99)).data == key.encode()


async def test_a_register_is_decided_once(store: Store) -> None:
    decisions = await asyncio.gather(
        *(create_or_read(store, "v/manifest.json", json.dumps({"by": n}).encode(), 1000) for n in range(6))
    )
    [winner] = [n for n, decision in enumerate(decisions) if isinstance(decision, Created)]
    for n, decision in enumerate(decisions):
        if n != winner:
            assert isinstance(decision, Existing)
            assert json.loads(decision.data) == {"by": winner}


async def test_a_register_that_holds_our_bytes_is_ours(store: Store) -> None:
    etag = await store.create("v/manifest.json", b"decided")
    assert await create_or_read(store, "v/manifest.json", b"decided", 100) == Created(etag)
    assert await create_or_read(store, "v/manifest.json", b"otherwise", 100) == Existing(b"decided", etag)


async def test_a_register_is_read_within_bounds(store: Store) -> None:
    await store.create("v/manifest.json", bytes(1000))
    with pytest.raises(ObjectTooLarge):
        await create_or_read(store, "v/manifest.json", b"mine", 999)


async def test_the_checks_pass_and_leave_nothing(store: Store) -> None:
    await check_reachable(store)
    await check_writable(store, "one")
    await check_writable(store, "one")
    assert await _keys(store) == []

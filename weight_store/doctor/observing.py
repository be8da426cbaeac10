"""Does things to a store through the port, from several connections, and notes what happens."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence

from weight_store.doctor.diagnosis import Conditional, Multipart, Reply
from weight_store.errors import (
    FormatError,
    ObjectNotFound,
    ObjectTooLarge,
    PreconditionFailed,
    StoreRefused,
    StoreUnwritable,
)
from weight_store.store import Blob, Store

_SMALL = 1 << 16
_PATTERN = bytes(range(251)) * 4200  # a million bytes that repeat only after 251, so that misplaced pieces show
_MARK_BYTES = 16
_PARALLEL_READS = 4
_READ_PATTERNS = 8
"""How many times ``_PATTERN`` a read is long: what each of those in parallel holds in memory."""
_MAX_TRIES = 200


async def reply_of(write: Awaitable[object]) -> Reply:
    """How a conditional write ended. ``StoreUnavailable`` and ``StoreUnwritable`` pass: they say nothing about
    conditions.
    """
    try:
        await write
    except PreconditionFailed:
        return "precondition"
    except StoreUnwritable:
        raise
    except StoreRefused:
        return "refused"
    return "done"


async def observe_conditional(stores: Sequence[Store], place: str, *, rounds: int, increments: int) -> Conditional:
    """Write with conditions below ``place``, one at a time and then in ``rounds`` races of all ``stores``."""
    store, key = stores[0], f"{place}/one"
    new = await reply_of(store.create(key, b"first"))
    if new != "done":
        return Conditional(new)
    await _just_written(store, key)  # else a refusal to create it again would be taken for one that may pass
    again = await reply_of(store.create(key, b"second"))
    etag = (await _just_written(store, key)).etag
    current = await reply_of(store.replace(key, b"third", etag=etag))
    stale = await reply_of(store.replace(key, b"fourth", etag=etag)) if current == "done" else None
    missing = await reply_of(store.replace(f"{place}/gone", b"x", etag=etag))
    unquoted: tuple[Reply | None, Reply | None] = (None, None)
    if current == "precondition":
        unquoted = await _unquoted(store, key)
    sound = again == "precondition"
    compared = current == "done" and stale == "precondition"
    counted = await _count(stores, f"{place}/count", increments) if compared else 0
    return Conditional(
        create_new=new,
        create_again=again,
        replace_current=current,
        replace_stale=stale,
        replace_missing=missing,
        unquoted_current=unquoted[0],
        unquoted_stale=unquoted[1],
        writers=len(stores),
        create_winners=await _races(stores, place, rounds, _create_race) if sound else (),
        replace_winners=await _races(stores, place, rounds, _replace_race) if compared else (),
        increments=increments * len(stores) if compared else 0,
        counted=counted,
    )


async def _just_written(store: Store, key: str) -> Blob:
    """Get an object that was written before. ``StoreRefused`` if the store does not have it."""
    try:
        return await store.get(key, max_bytes=_SMALL)
    except ObjectNotFound:
        raise StoreRefused(
            f"the store does not have object {key} right after it took it: writes that were confirmed must be seen by "
            "the next read; use another store, or reach it without a cache in between",
            key=key,
        ) from None


async def _unquoted(store: Store, key: str) -> tuple[Reply, Reply]:
    etag = (await _just_written(store, key)).etag.strip('"')
    current = await reply_of(store.replace(key, b"fifth", etag=etag))
    return current, await reply_of(store.replace(key, b"sixth", etag=etag))


async def _races(
    stores: Sequence[Store], place: str, rounds: int, race: Callable[[Sequence[Store], str], Awaitable[int]]
) -> tuple[int, ...]:
    return tuple([await race(stores, f"{place}/{race.__name__.strip('_')}-{number}") for number in range(rounds)])


async def _create_race(stores: Sequence[Store], key: str) -> int:
    """Successes among writers that create one key at once."""
    replies = await asyncio.gather(*(reply_of(store.create(key, b"%d" % i)) for i, store in enumerate(stores)))
    return replies.count("done")


async def _replace_race(stores: Sequence[Store], key: str) -> int:
    """Successes among writers that replace one object with the same ETag at once."""
    etag = await stores[0].create(key, b"start")
    replies = await asyncio.gather(*(reply_of(s.replace(key, b"%d" % i, etag=etag)) for i, s in enumerate(stores)))
    return replies.count("done")


async def _count(stores: Sequence[Store], key: str, increments: int) -> int:
    """What a counter holds after every writer has added ``increments`` to it by compare-and-set.

    Each value carries who wrote it: equal bytes would be taken for a lost reply.
    """
    await stores[0].create(key, b"0 -")

    async def add(number: int, store: Store) -> None:
        done = 0
        for attempt in range(_MAX_TRIES):
            if done == increments:
                return
            blob = await _just_written(store, key)
            value = _counted(blob, key) + 1
            done += await reply_of(store.replace(key, b"%d %d.%d" % (value, number, attempt), etag=blob.etag)) == "done"

    await asyncio.gather(*(add(number, store) for number, store in enumerate(stores)))
    return _counted(await _just_written(stores[0], key), key)


def _counted(blob: Blob, key: str) -> int:
    try:
        return int(blob.data.split()[0])
    except (ValueError, IndexError):
        raise StoreRefused(
            f"the store gave other bytes for object {key} than were written: use another store", key=key
        ) from None


async def observe_freshness(writer: Store, reader: Store, place: str, *, rounds: int) -> tuple[tuple[str, ...], bool]:
    """Write from one connection, read from another at once: (what was not seen, whether listings kept up)."""
    faults: list[str] = []
    lists = True
    for number in range(rounds):
        key = f"{place}/fresh-{number}"
        # Asked before it is there: a server that remembers the answer would repeat it.
        await _holds(reader, key, None)
        etag = await writer.create(key, b"one")
        if not await _holds(reader, key, b"one"):
            faults.append("a new object was not seen")
        lists = lists and key in [entry.key async for entry in reader.list(f"{place}/fresh-")]
        if await reply_of(writer.replace(key, b"two", etag=etag)) == "done" and not await _holds(reader, key, b"two"):
            faults.append("a replaced object was read as it was before")
        await writer.delete(key)
        if not await _holds(reader, key, None):
            faults.append("a deleted object was still read")
    return tuple(dict.fromkeys(faults)), lists


async def _holds(store: Store, key: str, expected: bytes | None) -> bool:
    try:
        return (await store.get(key, max_bytes=_SMALL)).data == expected
    except ObjectNotFound:
        return expected is None


async def observe_ranges(store: Store, place: str) -> tuple[str, ...]:
    """Read parts of an object; what came back wrong."""
    data, key = _PATTERN[:1000], f"{place}/ranges"
    await store.create(key, data)
    faults = []
    for offset, size in ((0, 1000), (0, 1), (999, 1), (17, 501)):
        buffer = bytearray(size)
        try:
            await store.read_into(key, offset, memoryview(buffer))
        except (FormatError, StoreRefused) as error:
            faults.append(f"bytes {offset} to {offset + size}: {error}")
            continue
        if buffer != data[offset : offset + size]:
            faults.append(f"bytes {offset} to {offset + size} came back as others")
    if not faults:
        try:
            await store.read_into(key, 990, memoryview(bytearray(20)))
            faults.append("a range beyond the end was answered with something")
        except FormatError:
            pass
    return tuple(faults)


async def observe_multipart(
    store: Store, place: str, size: int, clock: Callable[[], float]
) -> tuple[Multipart, float, float]:
    """Upload ``size`` bytes in parts, read them in parallel ranges: (what happened, bytes a second up, and down)."""
    key, first, second = f"{place}/parts", secrets.token_bytes(_MARK_BYTES), secrets.token_bytes(_MARK_BYTES)
    started_s = clock()
    try:
        async with store.upload(key) as upload:
            early = await _send(store, key, upload.write, first, size)
            await upload.commit()
    except StoreUnwritable:
        raise
    except StoreRefused:
        return Multipart(False, False, "refused", False), 0.0, 0.0
    up_s = clock() - started_s
    started_s = clock()
    intact = await _is_intact(store, key, first, size)
    down_s = clock() - started_s
    async with store.upload(key) as upload:
        await _send(store, key, upload.write, second, size)
        again = await reply_of(upload.commit())
    intact = intact and await _is_intact(store, key, second if again == "done" else first, size)
    return Multipart(True, early, again, intact), size / max(up_s, 1e-9), size / max(down_s, 1e-9)


async def _send(store: Store, key: str, write: Callable[[bytes], Awaitable[None]], mark: bytes, size: int) -> bool:
    """Write ``size`` bytes, ``mark`` in front; returns whether anything was visible half way."""
    visible = False
    for offset in range(0, size, len(_PATTERN)):
        piece = _PATTERN[: size - offset]
        await write(mark + piece[_MARK_BYTES:] if offset == 0 else piece)
        if offset <= size // 2 < offset + len(_PATTERN):
            visible = await _exists(store, key)
    return visible


async def _exists(store: Store, key: str) -> bool:
    try:
        await store.get(key, max_bytes=1)
    except ObjectNotFound:
        return False
    except ObjectTooLarge:
        return True
    return True


async def _is_intact(store: Store, key: str, mark: bytes, size: int) -> bool:
    """Whether the object is what :func:`_send` wrote, to the last byte and not one more."""
    step = _READ_PATTERNS * len(_PATTERN)
    starts = iter(range(0, size, step))

    async def reads() -> bool:
        for start in starts:
            buffer = bytearray(min(step, size - start))
            try:
                await store.read_into(key, start, memoryview(buffer))
            except (FormatError, ObjectNotFound):  # it ends too early, or is not there
                return False
            if start == 0:
                if buffer[:_MARK_BYTES] != mark:
                    return False
                buffer[:_MARK_BYTES] = _PATTERN[:_MARK_BYTES]
            if buffer != expected[: len(buffer)]:
                return False
        return True

    expected = _PATTERN * _READ_PATTERNS
    same = await asyncio.gather(*(reads() for _ in range(_PARALLEL_READS)))
    return all(same) and await _ends_at(store, key, size)


async def _ends_at(store: Store, key: str, size: int) -> bool:
    try:
        await store.read_into(key, size - 1, memoryview(bytearray(2)))
    except FormatError:
        return True
    return False

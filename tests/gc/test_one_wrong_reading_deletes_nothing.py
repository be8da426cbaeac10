"""A bit that flips once on its way to a collection, or a floor that no collection raised, costs nobody anything."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.gc.conftest import HOUR, RUN, Bucket, Clock
from weight_store.control import Control
from weight_store.errors import FormatError, StoreRefused
from weight_store.gc import Wish
from weight_store.head import Head
from weight_store.keys import GC_PREFIX, control_key, head_key, receipt_key
from weight_store.memory import MemoryStore
from weight_store.reading import read_head
from weight_store.receipt import Receipt
from weight_store.store import Blob, Entry


class Flipping(MemoryStore):
    """The bucket, of which the first reading of a key with this end has one bit wrong: ``new`` in place of ``old``."""

    def __init__(self, bucket: Bucket, end: str, old: bytes, new: bytes) -> None:
        super().__init__(clock=bucket.clock)
        assert isinstance(bucket.store, MemoryStore)
        self._objects = bucket.store._objects
        (changed,) = [a ^ b for a, b in zip(old, new, strict=True) if a != b]
        assert changed.bit_count() == 1
        self._end, self._old, self._new = end, old, new
        self.flipped = False

    async def get(self, key: str, *, max_bytes: int) -> Blob:
        blob = await super().get(key, max_bytes=max_bytes)
        if self.flipped or not key.endswith(self._end):
            return blob
        assert self._old in blob.data
        self.flipped = True
        return Blob(blob.data.replace(self._old, self._new, 1), blob.etag)


class Mistimed(MemoryStore):
    """The bucket, of which the first listing of this prefix has a time that is ``off_s`` wrong."""

    def __init__(self, bucket: Bucket, prefix: str, off_s: float) -> None:
        super().__init__(clock=bucket.clock)
        assert isinstance(bucket.store, MemoryStore)
        self._objects = bucket.store._objects
        self._prefix, self._off_s = prefix, off_s
        self.flipped = False

    async def list(self, prefix: str) -> AsyncIterator[Entry]:
        async for entry in super().list(prefix):
            if prefix == self._prefix and not self.flipped:
                self.flipped = True
                yield Entry(entry.key, entry.size, entry.etag, entry.modified_s + self._off_s)
            else:
                yield entry


async def with_full(bucket: Bucket, *, full: int, head: int) -> None:
    await bucket.publish(full)
    await bucket.training.extra_full(full)
    await bucket.publish(head - full)


async def put_floor(bucket: Bucket, floor: int) -> None:
    """Write it, as only a hand does."""
    await bucket.aim()
    blob = await bucket.store.get(control_key(RUN), max_bytes=1 << 20)
    control = Control.parse(blob.data).model_copy(update={"floor": floor})
    await bucket.store.replace(control_key(RUN), control.to_bytes(), etag=blob.etag)


async def test_a_floor_read_too_high_deletes_nothing_above_it(bucket: Bucket, clock: Clock) -> None:
    await with_full(bucket, full=4, head=12)
    await bucket.collector().collect(Wish(floor=4))
    clock.now_s += 2 * HOUR
    store = Flipping(bucket, "control.json", b'"floor":4', b'"floor":5')
    await bucket.collector(store).collect(Wish(), wait=False)
    assert store.flipped
    assert await bucket.versions() == set(range(4, 13))
    await bucket.check_reachable(4)


async def test_a_floor_is_not_written_back_as_it_was_misread(bucket: Bucket, clock: Clock) -> None:
    await with_full(bucket, full=4, head=12)
    await bucket.aim(**{"eu-west": 9})
    clock.now_s += 2 * HOUR
    store = Flipping(bucket, "control.json", b'"eu-west"', b'"eu-wesu"')
    await bucket.collector(store).collect(Wish(floor=4), wait=False)
    assert store.flipped
    control = await bucket.control()
    assert (control.floor, control.targets) == (4, {"eu-west": 9})


@pytest.mark.parametrize("wait", [True, False])
async def test_a_floor_above_the_newest_full_is_refused(bucket: Bucket, clock: Clock, wait: bool) -> None:
    await with_full(bucket, full=4, head=12)
    await put_floor(bucket, 11)
    clock.now_s += 2 * HOUR
    with pytest.raises(StoreRefused, match="has floor 11, above version 4, the newest full"):
        await bucket.collector().collect(Wish(), wait=wait)
    with pytest.raises(StoreRefused, match="correct the floor to 4 at most"):
        await bucket.collector().preview(Wish(), clock.now_s)
    assert await bucket.versions() == set(range(1, 13))


@pytest.mark.parametrize(("prefix", "off_s"), [(control_key(RUN), -24 * HOUR), (GC_PREFIX, 24 * HOUR)])
async def test_a_floor_that_only_seems_to_have_aged_waits(
    bucket: Bucket, clock: Clock, prefix: str, off_s: float
) -> None:
    await with_full(bucket, full=4, head=6)
    clock.now_s += 2 * HOUR
    await bucket.collector().collect(Wish(floor=4), wait=False)
    store = Mistimed(bucket, prefix, off_s)
    assert (await bucket.collector(store).collect(Wish(), wait=False)).pending
    assert store.flipped
    assert await bucket.versions() == set(range(1, 7))


async def test_a_term_read_too_high_leaves_what_is_in_flight(bucket: Bucket, clock: Clock) -> None:
    await bucket.publish(4)
    await bucket.open(5)
    kept = {await bucket.shard(5), await bucket.receipt(5), await bucket.offer(1)}
    clock.now_s += 2 * HOUR
    store = Flipping(bucket, "head.json", b'"term":1', b'"term":3')
    assert (await bucket.collector(store).collect(Wish())).doomed == []
    assert store.flipped
    assert kept <= await bucket.keys()


async def test_an_opening_read_as_older_leaves_what_is_in_flight(bucket: Bucket, clock: Clock) -> None:
    await bucket.publish(4)
    await bucket.take_over()
    await bucket.take_over()
    await bucket.open(5)
    kept = {await bucket.shard(5), await bucket.receipt(5)}
    clock.now_s += 2 * HOUR
    store = Flipping(bucket, "5/open.json", b'"term":3', b'"term":2')
    assert (await bucket.collector(store).collect(Wish())).doomed == []
    assert store.flipped
    assert kept <= await bucket.keys()


async def test_a_receipt_read_wrong_does_not_take_its_shard_for_one_that_lost(bucket: Bucket, clock: Clock) -> None:
    await bucket.publish(3)
    lost = await bucket.shard(2, rank=1)
    blob = await bucket.store.get(receipt_key(RUN, 2, 1), max_bytes=1 << 20)
    nonce = Receipt.parse(blob.data).nonce
    other = next(digit for digit in "0123456789abcdef" if (ord(digit) ^ ord(nonce[0])).bit_count() == 1)
    clock.now_s += 2 * HOUR
    field = b'"nonce":"'
    store = Flipping(bucket, receipt_key(RUN, 2, 1), field + nonce[:1].encode(), field + other.encode())
    report = await bucket.collector(store).collect(Wish())
    assert store.flipped
    assert [verdict.key for verdict in report.doomed] == [lost]
    await bucket.check_reachable(1)


async def test_a_head_that_contradicts_its_manifest_is_refused(bucket: Bucket) -> None:
    await bucket.publish(1)
    await bucket.take_over()
    await bucket.publish(1)
    head, etag = await read_head(bucket.store, RUN)
    older: Head = head.model_copy(update={"term": 1})
    await bucket.store.replace(head_key(RUN), older.to_bytes(), etag=etag)
    with pytest.raises(FormatError, match=r"wrote or damaged head\.json"):
        await bucket.collector().collect(Wish())

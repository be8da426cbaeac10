"""A bit that flips once between store and coordinator becomes nothing that lasts: not in the bucket, not in memory."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.errors import BucketDamaged, BucketUnavailable
from coordinator.wire import TermRequest
from tests.coordinator.passing import Passing
from weight_store.errors import StoreUnavailable
from weight_store.head import Head
from weight_store.keys import head_key, parse_key
from weight_store.reading import read_head, read_manifest
from weight_store.store import Blob, Store


class Flipping(Passing):
    """A store of which a reading has one bit wrong, where a test says so; counts readings by kind of object."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.reads: list[str] = []
        self.armed: tuple[str, bytes, bytes] | None = None
        self.always = False
        self.heads_stay = False

    def arm(self, end: str, old: bytes, new: bytes) -> None:
        """The next reading of a key with this end that holds ``old`` shows ``new``, which differs by a bit."""
        (changed,) = [a ^ b for a, b in zip(old, new, strict=True) if a != b]
        assert changed.bit_count() == 1
        self.armed = (end, old, new)

    async def get(self, key: str, *, max_bytes: int) -> Blob:
        blob = await self._store.get(key, max_bytes=max_bytes)
        self.reads.append(parse_key(key).kind)
        if self.always:
            at = len(self.reads) % len(blob.data)
            return Blob(blob.data[:at] + bytes([blob.data[at] ^ 1]) + blob.data[at + 1 :], blob.etag)
        if self.armed is None or not key.endswith(self.armed[0]) or self.armed[1] not in blob.data:
            return blob
        _, old, new = self.armed
        self.armed = None
        return Blob(blob.data.replace(old, new, 1), blob.etag)

    async def replace(self, key: str, data: bytes, *, etag: str) -> str:
        if self.heads_stay:
            raise StoreUnavailable("lost on the way there", key=key)
        return await self._store.replace(key, data, etag=etag)


@pytest.fixture
def store(place: Any) -> Flipping:
    return Flipping(place.store)


@pytest.fixture
async def node(place: Any, store: Flipping) -> Any:
    """A coordinator that starts empty behind the flipping store."""
    return await place.node(store)


@pytest.fixture
async def published(place: Any) -> Any:
    """A job that has published version 1 by another coordinator."""
    job = await place.job(await place.node()).start()
    await job.publish(step=1)
    return job


async def test_a_register_read_wrong_does_not_become_the_head(
    place: Any, store: Flipping, node: Any, published: Any
) -> None:
    opened = await published.open(step=2)
    for rank in (0, 1):
        await published.write_receipt(opened, rank)
    store.heads_stay = True
    await node.tick()  # creates the register, and cannot move the head
    store.heads_stay = False
    other = await place.node(store)
    store.arm("2/manifest.json", b'"step":2', b'"step":3')
    await other.tick()
    assert store.armed is None
    head, _ = await read_head(place.store, "demo")
    assert head.position.version == 2
    assert (await read_manifest(place.store, "demo", head.position)).step == 2


async def test_a_term_read_too_high_fences_nobody(place: Any, store: Flipping, node: Any, published: Any) -> None:
    opened = await published.open(step=2)
    store.arm("head.json", b'"term":1', b'"term":3')
    await node.tick()
    assert store.armed is None
    published.client = node.client
    for rank in (0, 1):
        answer = await published.receipt(opened, rank)
    assert answer.state == "sealed"


async def test_a_term_read_too_low_is_not_given_out_again(place: Any, store: Flipping, node: Any) -> None:
    for number in range(7):
        await place.job(await place.node(), f"launch-{number}").start()
    store.arm("head.json", b'"term":7', b'"term":3')
    assert (await node.client.takeover("demo", TermRequest(launch="launch-new"))).term == 8
    assert store.armed is None


async def test_a_run_id_read_wrong_is_not_written_back(place: Any, store: Flipping, node: Any, published: Any) -> None:
    before, _ = await read_head(place.store, "demo")
    store.arm("head.json", *_one_digit_off(b'"run_id":"', before.run_id))
    job = await place.job(node, "launch-b").start()
    assert store.armed is None
    after, _ = await read_head(place.store, "demo")
    assert (after.run_id, after.term) == (before.run_id, 2)
    assert (await job.publish(step=2)).state == "sealed"


def _one_digit_off(field: bytes, digits: str) -> tuple[bytes, bytes]:
    other = next(digit for digit in "0123456789abcdef" if (ord(digit) ^ ord(digits[0])).bit_count() == 1)
    return field + digits[:1].encode(), field + other.encode()


@pytest.mark.parametrize("what", ["term", "step", "layout"])
async def test_an_opening_read_wrong_is_not_remembered(store: Flipping, node: Any, published: Any, what: str) -> None:
    if what == "layout":
        store.arm("2/open.json", *_one_digit_off(b'"layout":"', published.layout_sha256))
    else:
        store.arm("2/open.json", *{"term": (b'"term":1', b'"term":3'), "step": (b'"step":2', b'"step":6')}[what])
    opened = await published.open(step=2)
    published.client = node.client
    for rank in (0, 1):
        answer = await published.receipt(opened, rank)
    assert store.armed is None
    assert (answer.state, answer.step) == ("sealed", 2)


async def test_an_offer_read_wrong_refuses_no_layout(place: Any, store: Flipping, node: Any) -> None:
    store.arm("00001.offer", b"WCPACK", b"WCPACC")
    assert (await place.job(node).start()).layout is not None
    assert store.armed is None


@pytest.mark.parametrize("end", ["head.json", "1/manifest.json"])
async def test_a_rank_is_not_failed_by_a_record_that_is_unreadable_once(
    store: Flipping, node: Any, published: Any, end: str
) -> None:
    opened = await published.open(step=2)
    published.client = node.client
    store.arm(end, b'"format"', b'"fnrmat"')
    for rank in (0, 1):
        answer = await published.receipt(opened, rank)
    assert store.armed is None
    assert answer.state == "sealed"


async def test_who_never_reads_the_same_twice_says_try_again(store: Flipping, node: Any, published: Any) -> None:
    store.always = True
    with pytest.raises(BucketUnavailable, match="reads otherwise each time"):
        await node.client.head("demo")
    store.always = False
    assert (await node.client.head("demo")).position.version == 1


async def test_a_head_that_contradicts_its_manifest_is_refused(place: Any, node: Any, published: Any) -> None:
    for number in (2, 3):
        published = await place.job(await place.node(), f"launch-{number}").start()
    await published.publish(step=2)
    head, etag = await read_head(place.store, "demo")
    for wrong in (head.model_copy(update={"term": 2}), _another_run(head)):
        etag = await place.store.replace(head_key("demo"), wrong.to_bytes(), etag=etag)
        with pytest.raises(BucketDamaged, match=r"wrote or damaged head\.json"):
            await node.client.head("demo")


def _another_run(head: Head) -> Head:
    return head.model_copy(update={"run_id": "00000000-0000-4000-8000-000000000000"})


async def test_looking_again_costs_one_reading(store: Flipping, node: Any, published: Any) -> None:
    await node.client.head("demo")
    store.reads.clear()
    for _ in range(5):
        await node.client.head("demo")
    assert store.reads.count("head") == 5
    assert store.reads.count("manifest") == 0

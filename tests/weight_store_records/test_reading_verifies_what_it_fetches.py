"""Readers go by digest from the head downwards; a damaged object is named before anybody uses it."""

from __future__ import annotations

import hashlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weight_store.boxes import Box
from weight_store.errors import DigestMismatch, FormatError, ObjectNotFound, ObjectTooLarge
from weight_store.head import Head
from weight_store.keys import asset_key, head_key, layout_key, manifest_key, receipt_key, shard_key
from weight_store.layout import Layout
from weight_store.memory import MemoryStore
from weight_store.position import Position
from weight_store.reading import (
    MAX_FETCH_BYTES,
    coalesce,
    fetch_groups,
    read_asset,
    read_head,
    read_layout,
    read_manifest,
    read_receipt,
)
from weight_store.receipt import BLOCK_BYTES, SHARD_MAGIC, Asset, GroupRange, Receipt, group_ranges
from weight_store.records import pack, sha256_hex

MIB = 1 << 20


class CountingStore(MemoryStore):
    """A store that notes the ranges it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges: list[tuple[int, int]] = []

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self.ranges.append((offset, len(buffer)))
        await super().read_into(key, offset, buffer)


def big_layout(groups: int, group_bytes: int) -> Layout:
    """``groups`` groups of one rank, bytes as elements."""
    return Layout(
        world_size=1,
        names=tuple(f"w{i}" for i in range(groups)),
        dtypes=("U8",) * groups,
        itemsizes=(1,) * groups,
        shapes=((group_bytes,),) * groups,
        piece_tensor=tuple(range(groups)),
        piece_offsets=((0,),) * groups,
        piece_sizes=(Box((0,), (group_bytes,)).sizes,) * groups,
        group_owner=(0,) * groups,
        group_start=tuple(range(groups)),
    )


async def stored(make, store: MemoryStore, sizes: list[int]) -> tuple[Receipt, list[GroupRange], list[bytes], str]:
    layout = big_layout(len(sizes), max(sizes))
    opened = make.opened(layout)
    payloads = [bytes([i % 251 + 1]) * size for i, size in enumerate(sizes)]
    receipt = make.receipt(opened, layout, 0, payloads)
    key = shard_key(make.run, 1, 0, receipt.nonce)
    await store.create(key, SHARD_MAGIC + b"".join(payloads))
    return receipt, group_ranges(receipt, layout), payloads, key


async def damage(store: MemoryStore, key: str, at: int) -> None:
    blob = await store.get(key, max_bytes=1 << 30)
    data = bytearray(blob.data)
    data[at] ^= 1
    await store.replace(key, bytes(data), etag=blob.etag)


async def fetched(make, store: MemoryStore, receipt: Receipt, ranges: list[GroupRange]) -> list[bytes]:
    return [bytes(item.payload) async for item in fetch_groups(store, make.run, receipt, ranges)]


async def test_every_group_arrives_whole_and_in_order(make) -> None:
    store = CountingStore()
    receipt, ranges, payloads, _ = await stored(make, store, [5 * MIB, 0, 1, 20 * MIB, 33 * MIB, 3])
    assert await fetched(make, store, receipt, ranges) == payloads
    assert sum(size for _, size in store.ranges) == sum(map(len, payloads))


async def test_no_groups_means_no_request(make) -> None:
    store = CountingStore()
    receipt, _, _, _ = await stored(make, store, [10])
    assert await fetched(make, store, receipt, []) == []
    assert store.ranges == []


@pytest.mark.parametrize("at", [8, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 5, 20 * MIB + 7])
async def test_a_flipped_bit_is_found_and_its_block_named(at: int, make) -> None:
    store = MemoryStore()
    receipt, ranges, _, key = await stored(make, store, [6 * MIB, 6 * MIB, 8 * MIB])
    await damage(store, key, at)
    with pytest.raises(DigestMismatch) as caught:
        await fetched(make, store, receipt, ranges)
    assert f"block {at // BLOCK_BYTES} of {key}" in str(caught.value)


async def test_no_payload_of_a_damaged_block_is_handed_out_first(make) -> None:
    store = MemoryStore()
    receipt, ranges, _, key = await stored(make, store, [MIB] * 20)
    await damage(store, key, 10)
    items = fetch_groups(store, make.run, receipt, ranges)
    with pytest.raises(DigestMismatch):
        await anext(items)


async def test_blocks_fetched_in_part_are_left_to_the_group_digests(make) -> None:
    store = MemoryStore()
    receipt, ranges, payloads, key = await stored(make, store, [6 * MIB, 6 * MIB, 12 * MIB, 2 * MIB])
    await damage(store, key, 8)
    # Groups 1 and 2 cover block 1 whole, and blocks 0 and 2 in part.
    assert await fetched(make, store, receipt, ranges[1:3]) == payloads[1:3]
    await damage(store, key, BLOCK_BYTES + 3)
    with pytest.raises(DigestMismatch, match="block 1 of"):
        await fetched(make, store, receipt, ranges[1:3])


async def test_a_gap_between_groups_does_not_confuse_the_check(make) -> None:
    store = MemoryStore()
    receipt, ranges, payloads, key = await stored(make, store, [9 * MIB, MIB, 17 * MIB, MIB])
    wanted = [ranges[0], ranges[2]]
    assert await fetched(make, store, receipt, wanted) == [payloads[0], payloads[2]]
    await damage(store, key, 16 * MIB + 3)
    with pytest.raises(DigestMismatch, match="block 2 of"):
        await fetched(make, store, receipt, wanted)


async def test_a_shard_that_ends_early_is_an_error(make) -> None:
    store = MemoryStore()
    receipt, ranges, _, key = await stored(make, store, [100, 100])
    blob = await store.get(key, max_bytes=1000)
    await store.replace(key, blob.data[:-1], etag=blob.etag)
    with pytest.raises(FormatError, match="ends at byte 207"):
        await fetched(make, store, receipt, ranges)
    await store.delete(key)
    with pytest.raises(ObjectNotFound):
        await fetched(make, store, receipt, ranges)


async def test_leaving_early_leaves_no_request_behind(make) -> None:
    store = MemoryStore()
    receipt, ranges, payloads, _ = await stored(make, store, [20 * MIB] * 5)
    items = fetch_groups(store, make.run, receipt, ranges)
    assert bytes((await anext(items)).payload) == payloads[0]
    await items.aclose()


@given(st.lists(st.integers(0, 40), max_size=30), st.data())
def test_requests_cover_exactly_what_is_wanted(make, sizes: list[int], data: st.DataObject) -> None:
    group = make.layout().groups[0]
    starts = list(itertools.accumulate(sizes, initial=8))
    ranges = [GroupRange(group, start, size, b"", 0, False) for start, size in zip(starts, sizes, strict=False)]
    wanted = [r for r in ranges if data.draw(st.booleans())]
    requests = coalesce(wanted, max_bytes=64)
    assert [r for request in requests for r in request.ranges] == wanted
    for request in requests:
        assert request.size == sum(r.size for r in request.ranges)
        assert request.offset == request.ranges[0].offset
        assert request.size <= 64 or len(request.ranges) == 1
    for one, other in itertools.pairwise(requests):  # neighbours stay apart only where joining them is too much
        touching = one.offset + one.size == other.offset
        assert not touching or one.size + other.ranges[0].size > 64


def test_usual_groups_are_one_request_each_and_small_ones_share(make) -> None:
    group = make.layout().groups[0]
    small = [GroupRange(group, 8 + i * MIB, MIB, b"", 0, False) for i in range(40)]
    assert [request.size for request in coalesce(small)] == [MAX_FETCH_BYTES, 8 * MIB]


async def test_small_objects_are_read_by_digest(make) -> None:
    store = MemoryStore()
    layout = make.layout()
    manifest, position = make.seal(layout)
    opened = make.opened(layout)
    receipts = make.receipts(opened, layout)
    await store.create(manifest_key(make.run, 1), manifest.to_bytes())
    await store.create(layout_key(make.run, manifest.layout), pack(layout.to_bytes()))
    for rank, (_, data) in enumerate(receipts):
        await store.create(receipt_key(make.run, 1, rank), data)
    assert await read_manifest(store, make.run, position) == manifest
    assert await read_layout(store, make.run, manifest.layout) == layout
    assert await read_receipt(store, make.run, position, 1, manifest.receipts[1]) == receipts[1][0]
    other = Position(version=1, sha256="0" * 64)
    with pytest.raises(DigestMismatch, match=f"has SHA-256 {position.sha256}, expected 0000"):
        await read_manifest(store, make.run, other)
    with pytest.raises(ObjectNotFound):
        await read_manifest(store, make.run, Position(version=2, sha256=position.sha256))
    for key in (layout_key(make.run, manifest.layout), receipt_key(make.run, 1, 1)):
        await damage(store, key, 30)
    with pytest.raises(FormatError, match="layouts"):
        await read_layout(store, make.run, manifest.layout)
    with pytest.raises(DigestMismatch, match=r"00001\.json"):
        await read_receipt(store, make.run, position, 1, manifest.receipts[1])


async def test_an_object_under_anothers_key_is_noticed(make) -> None:
    store = MemoryStore()
    layout = make.layout()
    manifest, position = make.seal(layout)
    receipts = make.receipts(make.opened(layout), layout)
    await store.create(manifest_key(make.run, 2), manifest.to_bytes())
    with pytest.raises(FormatError, match="describes version 1"):
        await read_manifest(store, make.run, Position(version=2, sha256=position.sha256))
    await store.create(receipt_key(make.run, 1, 1), receipts[0][1])
    with pytest.raises(FormatError, match="is the receipt of rank 0 at version 1"):
        await read_receipt(store, make.run, position, 1, manifest.receipts[0])
    await store.create(layout_key(make.run, "a" * 64), pack(layout.to_bytes()))
    with pytest.raises(DigestMismatch, match=f"has SHA-256 {manifest.layout}"):
        await read_layout(store, make.run, "a" * 64)


async def test_the_head_says_where_to_start(make) -> None:
    store = MemoryStore()
    _, position = make.seal(make.layout())
    head = Head(run_id=make.run_id, term=3, launch="job", position=position, write_id="a" * 16)
    etag = await store.create(head_key(make.run), head.to_bytes())
    assert await read_head(store, make.run) == (head, etag)
    with pytest.raises(ObjectNotFound):
        await read_head(store, "other")


async def test_assets_are_verified_and_bounded_by_the_size_they_were_given(make) -> None:
    store = MemoryStore()
    content = b'{"model_type":"qwen3"}'
    sha256 = sha256_hex(content)
    await store.create(asset_key(make.run, sha256), content)
    assert await read_asset(store, make.run, Asset(name="config.json", sha256=sha256, size=len(content))) == content
    with pytest.raises(ObjectTooLarge):
        await read_asset(store, make.run, Asset(name="config.json", sha256=sha256, size=5))
    assert hashlib.sha256(content).hexdigest() == sha256
    await damage(store, asset_key(make.run, sha256), 0)
    with pytest.raises(DigestMismatch):
        await read_asset(store, make.run, Asset(name="config.json", sha256=sha256, size=len(content)))

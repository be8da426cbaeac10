"""Offers become one layout for all ranks, or one sentence for all ranks that names the tensor and the rank."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from coordinator.errors import BucketDamaged, LayoutRefused
from coordinator.wire import LayoutAnswer, TermRequest
from weight_store.errors import FormatError
from weight_store.keys import offer_key
from weight_store.reading import read_layout
from weight_store.records import pack, sha256_hex


@pytest.fixture
async def fresh(place: Any, node: Any) -> Any:
    """A job that has its term but no layout yet."""
    job = place.job(node)
    job.term = await node.client.takeover("demo", TermRequest(launch="launch-a"))
    return job


async def test_the_last_offer_settles_the_layout(fresh: Any, place: Any) -> None:
    first = await fresh.offer(1)
    assert (first.layout, first.missing) == (None, (0,))
    last = await fresh.offer(0)
    layout = await read_layout(place.store, "demo", last.layout)
    assert sha256_hex(layout.to_bytes()) == last.layout
    assert await fresh.offer(0) == last
    other = await place.node()  # computes the same from the bucket
    assert await other.client.layout("demo", 1, 2) == last


async def test_waiting_ranks_hear_of_the_layout(fresh: Any) -> None:
    await fresh.offer(0)
    waiting = asyncio.create_task(fresh.client.layout("demo", 1, 2, wait_s=30))
    await asyncio.sleep(0.01)
    answer = await fresh.offer(1)
    assert await waiting == answer


async def test_an_offer_that_nobody_reported_is_found(fresh: Any, place: Any) -> None:
    await fresh.offer(0)
    offer = fresh.make_offer(1)
    await place.store.create(offer_key("demo", 1, 1), pack(offer.to_bytes()))
    assert (await fresh.client.layout("demo", 1, 2)).layout is not None


async def test_missing_ranks_are_named(fresh: Any) -> None:
    await fresh.offer(0)
    assert await fresh.client.layout("demo", 1, 2) == LayoutAnswer(layout=None, world_size=2, missing=(1,))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"offsets": ((3, 0), (4, 0))}, "layers.0.w: box .* of rank 0 and box .* of rank 1 overlap"),
        ({"sizes": ((3, 8), (4, 8))}, r"layers.0.w: no rank offers \[7:8, 0:8\]"),
        ({"dtypes": ("F16", "BF16")}, "rank 0 offers layers.0.w as BF16 .*, rank 1 as F16"),
        ({"shapes": ((8, 8), (16, 8))}, "rank 0 offers layers.1.w"),
        ({"world_size": 4}, "rank 1 offers as rank 1 of a world of 4"),
        ({"run_id": "00000000-0000-4000-8000-000000000009"}, "rank 1 offers as"),
    ],
)
async def test_impossible_offers_are_refused_to_every_rank(
    fresh: Any, place: Any, changes: dict[str, Any], sentence: str
) -> None:
    await fresh.offer(0)
    with pytest.raises(LayoutRefused, match=sentence):
        await fresh.offer(1, **changes)
    for client in (fresh.client, (await place.node()).client):
        with pytest.raises(LayoutRefused, match=sentence):
            await client.layout("demo", 1, 2)
    with pytest.raises(LayoutRefused, match=sentence):
        await fresh.offer(0)


async def test_an_offer_that_is_no_offer_is_refused(fresh: Any, place: Any) -> None:
    await place.store.create(offer_key("demo", 1, 1), b"not packed")
    with pytest.raises(LayoutRefused, match="the offer of rank 1 cannot be used"):
        await fresh.offer(1)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"names": ("layers.0.w", "layers.9.w")}, "layers.1.w is missing; layers.9.w was added"),
        ({"names": ("layers.0.w",)}, "layers.1.w is missing"),
        ({"rows": 5}, "layers.0.w changed shape from .8, 8. to .10, 8."),
    ],
)
async def test_a_new_launch_must_keep_the_tensors(job: Any, place: Any, node: Any, changes: Any, sentence: str) -> None:
    await job.publish(step=1)
    with pytest.raises(LayoutRefused, match=sentence):
        await place.job(node, "launch-b", **changes).start()


async def test_a_new_launch_may_shard_otherwise(job: Any, place: Any, node: Any) -> None:
    first = await job.publish(step=1)
    wider = await place.job(node, "launch-b", world_size=4, rows=2).start()
    assert wider.layout_sha256 != job.layout_sha256
    second = await wider.publish(step=2)
    assert (second.version, second.parent, second.world_size) == (2, first.position, 4)


async def test_a_damaged_layout_is_not_trusted(job: Any, place: Any) -> None:
    await job.publish(step=1)
    key = f"demo/layouts/{job.layout_sha256}"
    blob = await place.store.get(key, max_bytes=1 << 20)
    await place.store.replace(key, pack(b'{"format":"weightcast.layout"}'), etag=blob.etag)
    node = await place.node()
    with pytest.raises(FormatError):
        await read_layout(place.store, "demo", job.layout_sha256)
    with pytest.raises(BucketDamaged, match="altered or damaged"):
        await place.job(node, "launch-b", world_size=4, rows=2).start()

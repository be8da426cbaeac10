"""Remains go once their death is proved; whatever may yet be needed stays, and the reason is said."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.gc.conftest import HOUR, RUN, Begun, Bucket, Clock
from weight_store.gc import Report, Wish
from weight_store.gc.evidence import Line
from weight_store.keys import (
    head_key,
    layout_key,
    manifest_key,
    open_key,
    parse_key,
    receipt_key,
    shard_key,
    sign_key,
)
from weight_store.memory import MemoryStore
from weight_store.position import Position
from weight_store.reading import read_head
from weight_store.store import Store, UnfinishedUpload
from weight_store.version import Open

MakeBucket = Callable[[Store], Bucket]


async def collected(bucket: Bucket, *, later_s: float = HOUR) -> Report:
    bucket.clock.now_s += later_s
    return await bucket.collector().collect(Wish())


def why(report: Report, key: str) -> tuple[bool, str]:
    verdict = next(verdict for verdict in report.verdicts if verdict.key == key)
    return verdict.delete, verdict.why


async def test_a_healthy_run_loses_nothing(bucket: Bucket) -> None:
    await bucket.publish(3)
    before = await bucket.keys()
    assert (await collected(bucket)).doomed == []
    assert await bucket.keys() == before


async def test_an_aborted_attempt_loses_its_data_and_keeps_its_number(bucket: Bucket) -> None:
    await bucket.publish(2)
    opened = await bucket.open(3)
    await bucket.abort(opened)
    gone = {await bucket.shard(3), await bucket.receipt(3)}
    report = await collected(bucket)
    assert {verdict.key for verdict in report.doomed} == gone
    assert why(report, receipt_key(RUN, 3, 0)) == (True, "version 3 is dead: aborted, expired")
    assert {open_key(RUN, 3), manifest_key(RUN, 3)} <= await bucket.keys()


async def test_a_version_in_flight_is_left_alone_however_old(bucket: Bucket) -> None:
    await bucket.publish(2)
    await bucket.open(3)
    kept = {await bucket.shard(3), await bucket.shard(3, nonce="e" * 16), await bucket.receipt(3)}
    report = await collected(bucket, later_s=1000 * HOUR)
    assert report.doomed == []
    assert kept <= await bucket.keys()


async def test_an_opening_of_a_past_term_is_dead(bucket: Bucket) -> None:
    await bucket.publish(2)
    await bucket.open(3)
    key = await bucket.shard(3)
    await bucket.take_over()
    report = await collected(bucket)
    assert why(report, key) == (True, "version 3 is dead: opened in term 1, which is over")
    assert open_key(RUN, 3) in await bucket.keys()


async def test_a_manifest_that_the_head_has_not_come_to_yet_is_kept_and_a_stranded_one_is_not(bucket: Bucket) -> None:
    await bucket.publish(2)
    blob = await bucket.store.get(head_key(RUN), max_bytes=1 << 20)
    await bucket.publish(1)
    now = await bucket.store.get(head_key(RUN), max_bytes=1 << 20)
    await bucket.store.replace(head_key(RUN), blob.data, etag=now.etag)
    assert (await collected(bucket)).doomed == []
    await bucket.take_over()
    report = await collected(bucket)
    dead = {verdict.key for verdict in report.doomed if "stranded" in verdict.why}
    assert {parse_key(key).kind for key in dead} == {"shard", "receipt"}
    assert {manifest_key(RUN, 3), open_key(RUN, 3)} <= await bucket.keys()


async def test_signs_of_life_go_once_their_version_is_decided(bucket: Bucket) -> None:
    await bucket.publish(2)
    await bucket.open(3)
    for version in (2, 3):
        await bucket.store.create(sign_key(RUN, version, 0), b"")
    report = await collected(bucket)
    assert why(report, sign_key(RUN, 2, 0)) == (True, "version 2 is sealed and needs no more signs of life")
    assert why(report, sign_key(RUN, 3, 0)) == (False, "version 3 is undecided: its ranks may still be publishing it")
    await bucket.take_over()
    assert why(await collected(bucket), sign_key(RUN, 3, 0))[0]


async def test_shards_above_the_head_without_an_opening_are_kept(bucket: Bucket) -> None:
    await bucket.publish(1)
    key = await bucket.shard(9)
    report = await collected(bucket)
    assert why(report, key) == (False, "version 9 is unknown: it has no open.json")


async def test_the_remains_of_an_earlier_run_of_this_name_are_kept(bucket: Bucket) -> None:
    await bucket.publish(1)
    opened = Open(
        run_id="00000000-0000-4000-8000-00000000000e",
        version=2,
        term=1,
        step=0,
        ordinal=0,
        parent=bucket.training.position,
        layout="0" * 64,
        world_size=1,
        write_id="0" * 16,
    )
    await bucket.store.create(open_key(RUN, 2), opened.to_bytes())
    key = await bucket.shard(2)
    assert not why(await collected(bucket), key)[0]


async def test_an_attempt_that_lost_to_another_shard_goes(bucket: Bucket) -> None:
    await bucket.publish(3)
    gone = await bucket.shard(2, rank=1)
    report = await collected(bucket)
    assert [verdict.key for verdict in report.doomed] == [gone]
    assert "the receipt of rank 1 names shard" in why(report, gone)[1]
    await bucket.check_reachable(floor=1)


async def test_a_lost_attempt_is_kept_while_the_receipt_cannot_be_read(bucket: Bucket) -> None:
    await bucket.publish(3)
    key = await bucket.shard(2, rank=1)
    await bucket.store.delete(receipt_key(RUN, 2, 1))
    await bucket.receipt(2, rank=1)
    assert not why(await collected(bucket), key)[0]


def test_a_number_that_the_head_passed_over_is_dead() -> None:
    position = Position(version=3, sha256="1" * 64)
    line = Line({3: position, 5: position}, known_from=3, broken="rot")
    assert [line.fate(version).state for version in range(2, 6)] == ["unknown", "sealed", "dead", "sealed"]


async def test_an_unfinished_full_goes_once_a_newer_one_is_visible(bucket: Bucket) -> None:
    await bucket.publish(3)
    abandoned = await bucket.shard(2, extra_full=True)
    pending = await bucket.shard(3, extra_full=True)
    assert (await collected(bucket)).doomed == []
    await bucket.publish(1)
    await bucket.training.extra_full(4)
    await bucket.publish(1)
    report = await collected(bucket)
    assert {verdict.key for verdict in report.doomed} == {abandoned, pending}
    await bucket.check_reachable(floor=1)


async def test_an_upload_goes_once_nobody_can_need_what_it_sends(make_bucket: MakeBucket, clock: Clock) -> None:
    store = Begun(clock)
    bucket = make_bucket(store)
    await bucket.publish(3)
    await bucket.training.extra_full(2)
    await bucket.publish(1)
    await bucket.abort(await bucket.open(5))
    await bucket.open(6)
    gone = [shard_key(RUN, version, 0, "d" * 16, extra_full=True) for version in (1, 2)]
    gone += [shard_key(RUN, version, 0, "d" * 16) for version in (4, 5)]
    kept = [shard_key(RUN, version, 0, "d" * 16) for version in (6, 7)]
    kept += [shard_key(RUN, 3, 0, "d" * 16, extra_full=True), manifest_key(RUN, 4), f"{RUN}/notes.txt"]
    store.uploads = [UnfinishedUpload(key, "begun", clock.now_s) for key in gone + kept]
    assert (await collected(bucket, later_s=HOUR - 60)).doomed == []
    report = await collected(bucket, later_s=60)
    assert [verdict.key for verdict in report.doomed if verdict.upload] == gone
    assert [upload.key for upload in store.uploads] == kept
    assert why(report, shard_key(RUN, 3, 0, "d" * 16, extra_full=True))[1].startswith("perhaps still being sent")


async def test_offers_of_past_terms_go(bucket: Bucket) -> None:
    await bucket.publish(1)
    old, new = await bucket.offer(1), await bucket.offer(2)
    await bucket.take_over()
    report = await collected(bucket)
    assert why(report, old) == (True, "term 1 is over")
    assert why(report, new) == (False, "term 2 is the present one")


async def test_what_is_young_is_kept(bucket: Bucket) -> None:
    await bucket.publish(1)
    key = await bucket.offer(1)
    await bucket.take_over()
    report = await collected(bucket, later_s=HOUR - 1)
    assert why(report, key) == (False, "younger than 3600 s by the store's clock (term 1 is over)")
    assert why(report, head_key(RUN)) == (False, "the run itself")  # at any age
    assert (await collected(bucket, later_s=1)).doomed


async def resharded(bucket: Bucket) -> str:
    """The key of the layout of two ranks, which no version above the floor uses; the present launch has one rank."""
    await bucket.publish(2)
    old = layout_key(RUN, bucket.training.manifests[2].layout)
    await bucket.take_over()
    await bucket.training.publish(world=1)
    await bucket.training.extra_full(3)
    await bucket.publish(1)
    return old


async def test_layouts_and_assets_stay_with_the_run(bucket: Bucket) -> None:
    """No version that is kept names them any more, but the next launch may."""
    old = await resharded(bucket)
    before = await bucket.keys(f"{RUN}/layouts/") | await bucket.keys(f"{RUN}/assets/")
    report = await bucket.collector().collect(Wish(floor=3))
    assert report.doomed
    assert why(report, old) == (False, "a later launch may name this layout again")
    assert before <= await bucket.keys()
    await bucket.take_over()
    await bucket.training.publish(world=2)
    await bucket.check_reachable(floor=3)


async def test_what_is_not_ours_is_kept(bucket: Bucket) -> None:
    await bucket.publish(1)
    keys = {f"{RUN}/notes.txt", f"{RUN}/v/000000000001/extra", "tiny-2/head.json"}
    for key in keys:
        await bucket.store.create(key, b"x")
    await collected(bucket)
    assert keys <= await bucket.keys("")


async def test_broken_links_prove_nothing(bucket: Bucket) -> None:
    # 70 versions, so that the head's manifest names only the newest of them; the next manifest on the way is damaged.
    await bucket.publish(68)
    await bucket.training.extra_full(67)
    await bucket.publish(2)
    oldest = bucket.training.manifests[70].chain[0].version
    assert oldest > 1
    key = await bucket.shard(oldest - 1)
    lost = await bucket.store.get(manifest_key(RUN, oldest), max_bytes=1 << 20)
    await bucket.store.replace(manifest_key(RUN, oldest), b"rot", etag=lost.etag)
    report = await collected(bucket)
    assert report.doomed == []
    assert "the parent links end at version" in why(report, key)[1]


async def test_a_preview_writes_nothing_and_says_the_same(bucket: Bucket) -> None:
    await bucket.publish(4)
    await bucket.training.extra_full(4)
    await bucket.publish(2)
    await bucket.shard(5, rank=1)
    before = dict(bucket.store._objects)  # type: ignore[attr-defined]
    preview = await bucket.collector().preview(Wish(keep_versions=2), bucket.clock.now_s + HOUR)
    assert bucket.store._objects == before  # type: ignore[attr-defined]
    bucket.clock.now_s += HOUR
    report = await bucket.collector().collect(Wish(keep_versions=2))
    assert {v.key for v in preview.doomed} == {v.key for v in report.doomed}
    assert preview.floor == report.floor


@pytest.mark.parametrize("seed", range(8))
async def test_nothing_that_can_be_reached_is_ever_deleted(
    seed: int, make_bucket: Callable[[Store], Bucket], clock: Clock
) -> None:
    """Random lives of a run, with collections, aborted attempts, takeovers and fulls in any order."""
    bucket = make_bucket(MemoryStore(clock=clock))
    draw = random.Random(seed)
    await bucket.publish(1)
    for _ in range(30):
        at = bucket.training.position.version
        match draw.choice(["publish", "publish", "full", "loser", "takeover", "reshard", "collect", "age", "late"]):
            case "publish":
                await bucket.publish(1)
            case "full" if at not in bucket.training.fulls:
                await bucket.training.extra_full(at)
            case "loser":
                await bucket.shard(
                    draw.randint(1, at + 2), rank=draw.randint(0, 1), nonce=f"{draw.getrandbits(64):016x}"
                )
            case "takeover":
                await bucket.take_over()
            case "reshard":
                await bucket.take_over()
                await bucket.training.publish(world=draw.choice([1, 2, 3]))
            case "collect":
                wish = Wish(keep_versions=draw.randint(1, 4))
                await bucket.collector().collect(wish, wait=draw.random() < 0.5)
                await bucket.check_reachable(floor=await bucket.floor())
            case "age":
                clock.now_s += draw.choice([60.0, HOUR / 2, 2 * HOUR])
            case "late":
                # A rank of an older version wakes up and uploads: garbage, and it changes nothing.
                await bucket.shard(draw.randint(1, at), nonce=f"{draw.getrandbits(64):016x}", extra_full=True)
    await bucket.collector().collect(Wish(keep_versions=1))
    await bucket.check_reachable(floor=await bucket.floor())
    head, _ = await read_head(bucket.store, RUN)
    assert head.position == bucket.training.position

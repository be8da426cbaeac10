"""Open, receipts, sealed: the ordinary life of versions, and that every request can be repeated."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from coordinator.errors import (
    BadRequest,
    Fenced,
    LayoutRefused,
    PublicationConflict,
    PublicationPassed,
    ReceiptMissing,
    TermPending,
    UnknownRun,
    UnknownTerm,
    UnknownVersion,
    VersionAborted,
    VersionUndecided,
    WrongRun,
)
from coordinator.wire import TermRequest
from weight_store.keys import head_key, layout_key, receipt_key
from weight_store.manifest import Manifest
from weight_store.position import GENESIS
from weight_store.reading import read_head, read_manifest
from weight_store.records import sha256_hex


async def test_a_version_is_sealed_by_its_last_receipt(job: Any, place: Any) -> None:
    opened = await job.open(step=10)
    assert (opened.version, opened.state, opened.parent, opened.missing) == (1, "undecided", GENESIS, (0, 1))
    half = await job.receipt(opened, 1)
    assert (half.state, half.receipts, half.missing) == ("undecided", 1, (0,))
    place.clock.advance(2)
    done = await job.receipt(opened, 0)
    assert (done.state, done.receipts, done.missing, done.step) == ("sealed", 2, (), 10)
    assert (done.encode_s, done.upload_s, done.seal_s) == (0.5, 0.25, 2)

    head, _ = await read_head(place.store, "demo")
    assert head.position == done.position
    manifest = await read_manifest(place.store, "demo", head.position)
    for name in ("run_id", "term", "ordinal", "parent", "layout", "world_size", "full_version"):
        assert getattr(done, name) == getattr(manifest, name)
    for name in ("payload_bytes", "changed", "elements", "weight_bytes"):
        assert getattr(done, name) == getattr(manifest, name) > 0


async def test_versions_follow_each_other_by_parent(job: Any) -> None:
    first = await job.publish(step=1)
    second = await job.publish(step=2)
    again = await job.publish(step=1)  # resumed from a checkpoint: the step goes back, the version goes on
    assert [first.version, second.version, again.version] == [1, 2, 3]
    assert second.parent == first.position
    assert again.parent == second.position
    assert (await job.client.head("demo")).step == 1


async def test_every_request_may_be_repeated(job: Any) -> None:
    same_term = await job.client.takeover("demo", TermRequest(launch=job.launch))
    assert same_term == job.term
    opened = await job.open(step=1)
    assert await job.open(step=1) == opened
    sha256 = await job.write_receipt(opened, 0)
    assert await job.report(opened, 0, sha256) == await job.report(opened, 0, sha256)
    sealed = await job.receipt(opened, 1)
    assert (await job.report(opened, 1)).state == "sealed"
    assert (await job.open(step=1)).position == sealed.position


async def test_ranks_that_disagree_on_a_publication_are_told(job: Any) -> None:
    await job.open(step=1)
    with pytest.raises(PublicationConflict, match=r"step 1 of 2 ranks.*step 2 of 2 ranks"):
        await job.open(step=2, ordinal=0)
    with pytest.raises(VersionUndecided, match="version 1"):
        await job.open(step=2, ordinal=1)


async def test_a_publication_long_decided_is_not_opened_again(job: Any) -> None:
    await job.publish(step=1)
    await job.publish(step=2)
    with pytest.raises(PublicationPassed, match="version 2 is publication 1"):
        await job.open(step=1, ordinal=0)


async def test_a_later_launch_fences_the_earlier_one(job: Any, place: Any, node: Any) -> None:
    sealed = await job.publish(step=1)
    opened = await job.open(step=2)
    later = await place.job(node, "launch-b").start()
    assert (later.term.term, later.term.position) == (2, sealed.position)

    for refused in (job.open(step=3), job.receipt(opened, 0), job.offer(0)):
        with pytest.raises(Fenced, match=r"term 1 is over.*launch-b"):
            await refused
    given_up = await job.client.version("demo", opened.version)
    assert (given_up.state, given_up.reason.split(":")[0]) == ("aborted", "fenced")
    assert (await later.publish(step=2)).version == 3  # the number of an aborted version is never used again


async def test_a_takeover_that_comes_late_is_told_who_was_quicker(node: Any, place: Any) -> None:
    async def take(launch: str, seen: int | None) -> int:
        request = TermRequest(launch=launch, expected_term=seen)
        return (await node.client.takeover("demo", request)).term

    assert await take("launch-a", 0) == 1
    with pytest.raises(Fenced, match=r"launch-a took the run over \(term 1\) after launch launch-b had seen"):
        await take("launch-b", 0)
    assert await take("launch-c", 1) == 2
    assert await take("launch-c", 1) == 2  # its reply was lost: asked again, whatever it saw before
    with pytest.raises(Fenced, match="launch-c took the run over"):
        await take("launch-d", 1)  # sent before launch-c, came after it
    assert await take("launch-e", None) == 3
    await place.store.delete(head_key("demo"))
    with pytest.raises(WrongRun, match="is gone"):
        await take("launch-f", 3)
    assert await take("launch-f", 0) == 1
    with pytest.raises(WrongRun, match="was replaced by another one of its name"):
        await take("launch-g", 3)


async def test_only_rank_0_takes_over_and_others_wait_for_it(place: Any, node: Any) -> None:
    waiting = TermRequest(launch="launch-a", takeover=False)
    with pytest.raises(TermPending, match="rank 0"):
        await node.client.takeover("demo", waiting)
    assert await node.client.runs() == []
    mine = await node.client.takeover("demo", TermRequest(launch="launch-a"))
    assert await node.client.takeover("demo", waiting) == mine
    await node.client.takeover("demo", TermRequest(launch="launch-b"))
    with pytest.raises(Fenced, match="lost the run to launch launch-b"):  # not to be waited for: it never comes back
        await node.client.takeover("demo", waiting)


async def test_ranks_that_are_quicker_than_rank_0_wait_for_a_run_that_is_new(node: Any) -> None:
    asked = TermRequest(launch="launch-a", takeover=False, wait_s=60)
    waiting = asyncio.create_task(node.client.takeover("demo", asked))
    await asyncio.sleep(0.01)
    await node.tick()  # the bucket does not have the run yet
    mine = await node.client.takeover("demo", TermRequest(launch="launch-a"))
    assert await asyncio.wait_for(waiting, 20) == mine


async def test_a_version_without_all_receipts_expires(job: Any, place: Any, node: Any) -> None:
    opened = await job.open(step=1)
    await job.receipt(opened, 0)
    place.clock.advance(119)
    await node.tick()
    assert (await job.client.version("demo", 1)).state == "undecided"
    place.clock.advance(1)
    await node.tick()
    aborted = await job.client.version("demo", 1)
    assert (aborted.state, aborted.missing, aborted.receipts) == ("aborted", (1,), 0)
    assert (
        "version 1 (step 1) could not be sealed, and for 120 s there was no sign of life: no receipt of rank 1"
        in aborted.reason
    )

    late = await job.receipt(opened, 1)  # after the decision: told, and nothing changes
    assert late.state == "aborted"
    again = await job.open(step=1, ordinal=1)
    assert (again.version, again.parent) == (2, GENESIS)


async def test_a_rank_that_comes_after_the_abort_does_not_hold_up_the_others(job: Any, place: Any, node: Any) -> None:
    opened = await job.open(step=1)
    place.clock.advance(120)
    await node.tick()

    for coordinator in (node, await place.node()):  # one that starts empty knows it as well
        told = await job.open(step=1, ordinal=0, at=coordinator.client)
        assert (told.version, told.state) == (opened.version, "aborted")
        with pytest.raises(PublicationConflict, match="step 1 of 2 ranks"):
            await job.open(step=7, ordinal=0, at=coordinator.client)
    second = await job.open(step=2, ordinal=1)
    assert second.version == 2
    place.clock.advance(120)
    await node.tick()
    with pytest.raises(PublicationPassed, match="publication 1 was opened after it, as version 2"):
        await job.open(step=1, ordinal=0)
    assert (await job.open(step=3, ordinal=2)).version == 3

    later = await place.job(node, "launch-b").start()  # ordinals count anew in each term
    assert (await later.open(step=1, ordinal=0)).version == 4


async def test_a_version_whose_layout_is_lost_expires_too(job: Any, place: Any) -> None:
    opened = await job.open(step=1)
    for rank in (0, 1):
        await job.write_receipt(opened, rank)
    await place.store.delete(layout_key("demo", job.layout_sha256))
    fresh = await place.node()
    await fresh.tick()
    assert (await fresh.client.version("demo", 1)).state == "undecided"
    place.clock.advance(121)
    await fresh.tick()
    assert "the layout cannot be read" in (await fresh.client.version("demo", 1)).reason


async def test_receipts_that_do_not_fit_are_refused_by_rank_and_tensor(job: Any) -> None:
    opened = await job.open(step=1)
    await job.receipt(opened, 0)
    short = {"sizes": (), "changed": (), "digests": "", "full": (), "shard_bytes": 8}
    refused = await job.receipt(opened, 1, **short)
    assert refused.state == "aborted"
    assert "rank 1 reports 0 groups of 1" in refused.reason
    assert "layers.0.w" in refused.reason


async def test_a_receipt_that_is_no_receipt_refuses_the_version(job: Any, place: Any) -> None:
    opened = await job.open(step=1)
    await job.receipt(opened, 0)
    await place.store.create(receipt_key("demo", 1, 1), b"{}")
    refused = await job.report(opened, 1)
    assert (refused.state, refused.reason.split(":")[0]) == ("aborted", "refused")
    assert "the receipt of rank 1 cannot be used" in refused.reason


async def test_a_first_version_of_deltas_is_refused(job: Any) -> None:
    opened = await job.open(step=1)
    await job.receipt(opened, 0, full=())
    assert "rank 0 reports a delta" in (await job.receipt(opened, 1)).reason


async def test_reports_of_what_is_not_there(job: Any) -> None:
    opened = await job.open(step=1)
    with pytest.raises(ReceiptMissing, match="rank 1 at version 1 is not in the bucket"):
        await job.report(opened, 1)
    with pytest.raises(BadRequest, match="rank 7 is outside the world of 2"):
        await job.report(opened, 7)
    with pytest.raises(UnknownVersion):
        await job.report(opened.model_copy(update={"version": 9}), 1)
    with pytest.raises(UnknownRun):
        await job.client.run("nothing-here")
    with pytest.raises(UnknownTerm, match="never had term 7"):
        await job.client.layout("demo", 7, 2)


async def test_a_layout_must_be_in_the_bucket_and_for_this_world(job: Any) -> None:
    job.layout_sha256, known = "ab" * 32, job.layout_sha256
    with pytest.raises(LayoutRefused, match="abababababab is not in the bucket"):
        await job.open(step=1)
    job.layout_sha256, job.world_size = known, 3
    with pytest.raises(LayoutRefused, match="for a world of 2"):
        await job.open(step=1)


async def test_the_manifest_comes_byte_for_byte(job: Any) -> None:
    sealed = await job.publish(step=1)
    data = await job.client.manifest("demo", 1)
    assert sha256_hex(data) == sealed.position.sha256
    assert Manifest.parse(data).step == 1
    await job.open(step=2)
    with pytest.raises(VersionUndecided):
        await job.client.manifest("demo", 2)
    with pytest.raises(UnknownVersion):
        await job.client.manifest("demo", 3)


async def test_an_aborted_version_has_no_manifest(job: Any, place: Any, node: Any) -> None:
    await job.open(step=1)
    place.clock.advance(121)
    await node.tick()
    with pytest.raises(VersionAborted, match="expired"):
        await job.client.manifest("demo", 1)


async def test_versions_are_listed_newest_first_with_what_became_of_them(job: Any, place: Any, node: Any) -> None:
    await job.publish(step=1)
    await job.open(step=2)
    place.clock.advance(121)
    await node.tick()
    job.published += 1
    await job.publish(step=2)
    await job.open(step=3)
    listed = await job.client.versions("demo")
    assert [(v.version, v.state) for v in listed] == [
        (4, "undecided"),
        (3, "sealed"),
        (2, "aborted"),
        (1, "sealed"),
    ]
    assert [v.version for v in await job.client.versions("demo", limit=2, before=4)] == [3, 2]
    assert (await job.client.run("demo")).undecided == 4
    assert [run.run for run in await job.client.runs()] == ["demo"]

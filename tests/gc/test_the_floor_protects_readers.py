"""The floor never passes what somebody needs, and nothing below it goes before it has aged by the store's clock."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from rollout_agent.replica import Replica
from tests.gc.conftest import HOUR, RUN, Begun, Bucket, Clock
from weight_store.control import Control
from weight_store.errors import FormatError, ObjectNotFound, StoreRefused
from weight_store.gc import Wish
from weight_store.gc.floor import wanted_floor
from weight_store.head import Head
from weight_store.keys import control_key, head_key, manifest_key
from weight_store.memory import MemoryStore
from weight_store.position import GENESIS
from weight_store.store import Blob, Entry, Store, UnfinishedUpload

ReadDir = Callable[[Path], dict[str, bytes]]


async def with_full(bucket: Bucket, *, full: int, head: int) -> None:
    """``head`` versions, an extra full of version ``full`` visible in the last one."""
    await bucket.publish(head - 1)
    await bucket.training.extra_full(full)
    await bucket.publish(1)


async def test_old_versions_go_and_all_that_is_needed_stays(bucket: Bucket) -> None:
    await with_full(bucket, full=5, head=8)
    report = await bucket.collector().collect(Wish(keep_versions=4))
    assert (report.floor.before, report.floor.after, report.floor.limited_by) == (0, 5, "")
    assert await bucket.versions() == {5, 6, 7, 8}
    assert (await bucket.control()).floor == 5
    await bucket.check_reachable(floor=5)
    await bucket.publish(3)
    await bucket.check_reachable(floor=5)


async def test_the_floor_stops_at_the_newest_full(bucket: Bucket) -> None:
    await with_full(bucket, full=4, head=8)
    report = await bucket.collector().collect(Wish(floor=7))
    assert report.floor.after == 4
    assert report.floor.limited_by == "the newest full is version 4"
    assert await bucket.versions() == {4, 5, 6, 7, 8}


async def test_without_a_newer_full_nothing_goes(bucket: Bucket) -> None:
    await bucket.publish(5)
    before = await bucket.keys()
    report = await bucket.collector().collect(Wish(keep_versions=1))
    assert report.floor.after == 1
    assert await bucket.keys() - {control_key(RUN)} == before


async def test_a_run_without_a_version_has_no_floor_yet(bucket: Bucket) -> None:
    head = Head(run_id=bucket.training.run_id, term=1, launch="first", position=GENESIS, write_id=bucket.nonce())
    await bucket.store.create(head_key(RUN), head.to_bytes())
    await bucket.open(1)
    await bucket.shard(1)
    before = await bucket.keys()
    bucket.clock.now_s += HOUR
    for wish, limited_by in ((Wish(), ""), (Wish(floor=1), "the run has no version yet")):
        report = await bucket.collector().collect(wish)
        assert (report.floor.after, report.floor.limited_by, report.doomed) == (0, limited_by, [])
    assert await bucket.keys() == before


async def test_a_region_keeps_what_it_is_told_to_run(bucket: Bucket) -> None:
    await with_full(bucket, full=3, head=5)
    await bucket.publish(3)
    await bucket.training.extra_full(7)
    await bucket.publish(1)
    await bucket.aim(**{"eu-west": 6})
    report = await bucket.collector().collect(Wish(keep_versions=1))
    assert report.floor.after == 3
    assert "region eu-west is told to run version 6" in report.floor.limited_by
    assert await bucket.versions() == set(range(3, 10))


async def test_a_target_that_cannot_be_read_holds_the_floor(bucket: Bucket) -> None:
    await with_full(bucket, full=5, head=8)
    await bucket.aim(**{"eu-west": 6})
    await bucket.store.delete(manifest_key(RUN, 6))
    with pytest.raises(StoreRefused, match="region eu-west is told to run version 6"):
        await bucket.collector().collect(Wish(keep_versions=1))
    assert (await bucket.control()).floor == 0


async def test_a_target_that_the_links_do_not_lead_to_holds_the_floor(bucket: Bucket) -> None:
    """70 versions, so that the head's manifest names only the newest; the next manifest on the way is damaged."""
    await with_full(bucket, full=67, head=70)
    oldest = bucket.training.manifests[70].chain[0].version
    await bucket.aim(**{"eu-west": oldest - 1})
    lost = await bucket.store.get(manifest_key(RUN, oldest), max_bytes=1 << 20)
    await bucket.store.replace(manifest_key(RUN, oldest), b"rot", etag=lost.etag)
    with pytest.raises(StoreRefused, match=f"run version {oldest - 1}.*the parent links end at version {oldest}"):
        await bucket.collector().collect(Wish(keep_versions=1))
    assert (await bucket.control()).floor == 0


async def test_a_target_that_was_given_up_holds_nothing(bucket: Bucket) -> None:
    await bucket.publish(2)
    await bucket.abort(await bucket.open(3))
    bucket.training.aborted = 1
    await bucket.publish(1)
    bucket.training.aborted = 0
    await bucket.training.extra_full(2)
    await bucket.publish(1)
    await bucket.aim(**{"eu-west": 3})
    report = await bucket.collector().collect(Wish(keep_versions=1))
    assert (report.floor.after, report.floor.limited_by) == (2, "the newest full is version 2")


async def test_the_floor_is_never_lowered(bucket: Bucket) -> None:
    await with_full(bucket, full=5, head=8)
    await bucket.collector().collect(Wish(floor=5))
    report = await bucket.collector().collect(Wish(floor=2))
    assert (report.floor.before, report.floor.after) == (5, 5)


async def test_the_floor_ages_by_the_stores_clock(bucket: Bucket, clock: Clock) -> None:
    await with_full(bucket, full=5, head=8)
    await bucket.collector().collect(Wish(floor=5))
    assert HOUR <= sum(clock.slept) <= HOUR + 60
    assert max(clock.slept) <= 60  # so that progress is told


async def test_without_waiting_the_next_call_deletes(bucket: Bucket, clock: Clock) -> None:
    await with_full(bucket, full=5, head=8)
    clock.now_s += 2 * HOUR
    first = await bucket.collector().collect(Wish(floor=4), wait=False)
    assert (first.floor.after, first.pending, first.doomed) == (4, True, [])
    clock.now_s += HOUR / 2
    second = await bucket.collector().collect(Wish(floor=5), wait=False)
    assert (second.floor.after, second.pending, second.doomed) == (4, True, [])
    clock.now_s += HOUR / 2
    third = await bucket.collector().collect(Wish(floor=5), wait=False)
    assert third.doomed
    assert third.floor.after == 5
    assert await bucket.versions() == {4, 5, 6, 7, 8}
    assert clock.slept == []


async def test_a_change_of_the_control_object_makes_the_floor_wait_again(bucket: Bucket, clock: Clock) -> None:
    await with_full(bucket, full=5, head=8)
    clock.now_s += 2 * HOUR
    await bucket.collector().collect(Wish(floor=5), wait=False)
    clock.now_s += HOUR
    await bucket.aim(**{"eu-west": 6})
    assert (await bucket.collector().collect(Wish(), wait=False)).pending
    assert (await bucket.control()).targets == {"eu-west": 6}
    assert 4 in await bucket.versions()


async def test_a_target_set_at_the_same_moment_is_not_lost(bucket: Bucket, store: MemoryStore) -> None:
    await with_full(bucket, full=3, head=5)
    await bucket.publish(2)
    await bucket.training.extra_full(6)
    await bucket.publish(2)
    await bucket.aim()

    class Meddled(MemoryStore):
        """Somebody sets a target between the collector's look and its write."""

        def __init__(self) -> None:
            super().__init__(clock=bucket.clock)
            self._objects = store._objects

        async def replace(self, key: str, data: bytes, *, etag: str) -> str:
            if key == control_key(RUN) and not (await bucket.control()).targets:
                await bucket.aim(**{"eu-west": 5})
            return await super().replace(key, data, etag=etag)

    report = await bucket.collector(Meddled()).collect(Wish(floor=6))
    control = await bucket.control()
    assert report.floor.after == control.floor == 3
    assert control.targets == {"eu-west": 5}


class Interrupted(MemoryStore):
    """A reader's view of the bucket in which ``meanwhile`` happens before its ``at``-th request."""

    def __init__(
        self, objects: dict[str, tuple[bytes, float]], at: int, meanwhile: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__()
        self._objects = objects
        self.left, self.meanwhile, self.missing = at, meanwhile, 0

    async def _turn(self) -> None:
        self.left -= 1
        if self.left == 0:
            await self.meanwhile()

    async def get(self, key: str, *, max_bytes: int) -> Blob:
        await self._turn()
        try:
            return await super().get(key, max_bytes=max_bytes)
        except ObjectNotFound:
            self.missing += 1
            raise

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        await self._turn()
        try:
            await super().read_into(key, offset, buffer)
        except ObjectNotFound:
            self.missing += 1
            raise


@pytest.mark.parametrize("at", range(2, 30, 3))
@pytest.mark.parametrize("age_s", [HOUR - 1, HOUR])
async def test_a_reader_at_work_is_not_disturbed_until_the_floor_has_aged(
    bucket: Bucket, store: MemoryStore, clock: Clock, tmp_path: Path, read_dir: ReadDir, at: int, age_s: float
) -> None:
    await bucket.publish(6)

    async def meanwhile() -> None:
        # The head moves on, a newer full appears, and all that the reader has planned to fetch falls below the floor.
        await bucket.training.extra_full(6)
        await bucket.publish(2)
        clock.now_s += HOUR
        await bucket.collector().collect(Wish(floor=6), wait=False)
        clock.now_s += age_s
        await bucket.collector().collect(Wish(floor=6), wait=False)

    reading = Interrupted(store._objects, at, meanwhile)
    async with await Replica.open(run=RUN, model_dir=tmp_path, store=reading) as replica:
        await replica.catch_up()
        assert replica.position is not None
        assert read_dir(tmp_path) == bucket.training.tensors(replica.position.version)
    if age_s < HOUR:
        assert reading.missing == 0
    elif at > 2:
        assert await bucket.versions() == {6, 7, 8}


async def test_a_late_joiner_ends_bit_equal_after_a_collection(
    bucket: Bucket, tmp_path: Path, read_dir: ReadDir
) -> None:
    await with_full(bucket, full=5, head=8)
    await bucket.collector().collect(Wish(keep_versions=1))
    async with await Replica.open(run=RUN, model_dir=tmp_path, store=bucket.store) as replica:
        await replica.catch_up()
        assert read_dir(tmp_path) == bucket.training.tensors(8)


async def test_a_collection_that_is_stopped_goes_on_later(
    bucket: Bucket, make_bucket: Callable[[Store], Bucket], store: MemoryStore
) -> None:
    class Stopping(MemoryStore):
        left = 0

        async def delete(self, key: str) -> None:
            if key.startswith(RUN):
                self.left -= 1
                if self.left < 0:
                    raise StoreRefused("stopped")
            await super().delete(key)

    await with_full(bucket, full=5, head=8)
    stopping = Stopping(clock=bucket.clock)
    stopping._objects = store._objects
    seen = set()
    for left in range(40):
        stopping.left = left
        with contextlib.suppress(StoreRefused):
            await bucket.collector(stopping).collect(Wish(floor=5))
        seen.add(len(await bucket.keys()))
        await bucket.check_reachable(floor=5)
    assert len(seen) > 5
    assert await bucket.versions() == {5, 6, 7, 8}


async def test_a_run_that_is_not_there_is_an_error(bucket: Bucket) -> None:
    with pytest.raises(ObjectNotFound):
        await bucket.collector().collect(Wish())


async def test_the_control_object_of_another_run_is_refused(bucket: Bucket) -> None:
    await bucket.publish(1)
    other = Control(run_id="00000000-0000-4000-8000-00000000000f", write_id="0" * 16)
    await bucket.store.create(control_key(RUN), other.to_bytes())
    with pytest.raises(FormatError, match="an earlier run"):
        await bucket.collector().collect(Wish())


async def test_a_floor_below_which_nothing_lies_needs_no_wait(bucket: Bucket, clock: Clock) -> None:
    await bucket.publish(2)
    before_s = clock.now_s
    report = await bucket.collector().collect(Wish(floor=1))
    assert (report.floor.after, report.doomed) == (1, [])
    assert clock.now_s - before_s < HOUR
    await bucket.training.extra_full(2)
    await bucket.publish(1)
    assert (await bucket.collector().collect(Wish(floor=2))).doomed
    assert clock.now_s - before_s >= HOUR


async def test_what_killed_tools_left_is_removed_and_what_works_is_not(
    make_bucket: Callable[[Store], Bucket], clock: Clock
) -> None:
    bucket = make_bucket(store := Begun(clock))
    await bucket.publish(1)
    for place in ("_gc/", "_doctor/"):
        await store.create(f"{place}killed/races/1", b"")
    store.uploads = [UnfinishedUpload("_doctor/killed/parts", "killed", clock.now_s)]
    clock.now_s += 2 * HOUR
    for place in ("_gc/", "_doctor/"):
        await store.create(f"{place}at-work", b"")
    store.uploads.append(UnfinishedUpload("_doctor/at-work", "working", clock.now_s))
    await bucket.collector(min_age_s=1.0).collect(Wish())
    assert await bucket.keys("_") == {"_gc/at-work", "_doctor/at-work"}
    assert [upload.upload_id for upload in store.uploads] == ["working"]


async def test_who_may_not_look_after_other_tools_still_collects(bucket: Bucket, clock: Clock) -> None:
    class Narrow(MemoryStore):
        """Its owner may list the run and the probes of collections alone."""

        async def list(self, prefix: str) -> AsyncIterator[Entry]:
            if prefix == "_doctor/":
                raise StoreRefused("AccessDenied")
            async for entry in super().list(prefix):
                yield entry

    await bucket.publish(1)
    old = await bucket.offer(1)
    await bucket.take_over()
    clock.now_s += 2 * HOUR
    narrow = Narrow(clock=clock)
    assert isinstance(bucket.store, MemoryStore)
    narrow._objects = bucket.store._objects
    report = await bucket.collector(narrow).collect(Wish())
    assert [verdict.key for verdict in report.doomed] == [old]


def test_fewer_versions_than_are_to_be_kept_keep_all() -> None:
    assert wanted_floor(Wish(keep_versions=3), [4, 7]) == 0
    assert wanted_floor(Wish(keep_versions=2), [4, 7, 9]) == 7
    assert wanted_floor(Wish(), [4, 7, 9]) == 0

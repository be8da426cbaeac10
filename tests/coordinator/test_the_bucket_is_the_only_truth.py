"""Coordinators that start empty, that share a bucket, or whose store loses replies: one outcome, and the same one."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from coordinator.ambient import Settings
from coordinator.client import Backoff, CoordinatorClient, retrying
from coordinator.errors import BucketUnavailable, Fenced, TooBusy
from coordinator.wire import TermRequest
from tests.coordinator.passing import Passing
from weight_store.errors import StoreUnavailable
from weight_store.keys import manifest_key, parse_key
from weight_store.layout import Layout
from weight_store.local import LocalStore
from weight_store.manifest import Manifest
from weight_store.opening import open_store
from weight_store.reading import read_head, read_manifest, read_receipt
from weight_store.records import record_format
from weight_store.store import Blob, Store


class Unreliable(Passing):
    """A store whose writes may lose their request or their reply; ``faults`` says what befalls each write in turn.

    ``request``: nothing happens. ``reply``: it happens and nobody is told.
    """

    def __init__(self, store: Store, faults: dict[int, str] | None = None) -> None:
        super().__init__(store)
        self.arm(faults or {})

    def arm(self, faults: dict[int, str]) -> None:
        """Count writes from 0 again; ``writes`` are their keys."""
        self._faults = faults
        self._numbers = itertools.count()
        self.writes: list[str] = []

    async def create(self, key: str, data: bytes) -> str:
        return await self._faulty(key, lambda: self._store.create(key, data))

    async def replace(self, key: str, data: bytes, *, etag: str) -> str:
        return await self._faulty(key, lambda: self._store.replace(key, data, etag=etag))

    async def _faulty(self, key: str, act: Any) -> str:
        self.writes.append(key)
        fault = self._faults.get(next(self._numbers))
        if fault == "request":
            raise StoreUnavailable("lost on the way there", key=key)
        etag: str = await act()
        if fault == "reply":
            raise StoreUnavailable("lost on the way back", key=key)
        return etag


class Patient:
    """A client as agents use it: what may succeed later is tried again."""

    def __init__(self, client: CoordinatorClient) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)

        async def call(*args: Any) -> Any:
            return await retrying(lambda: method(*args), Backoff(first_s=0, attempts=3))

        return call


async def life(place: Any, node: Any, run: str) -> list[int]:
    """Two publications, a takeover that fences a third, and a fourth; returns the sealed versions."""
    first = await place.job(node, run=run).start()
    sealed = [await first.publish(step=1), await first.publish(step=2)]
    await first.open(step=3)
    second = await place.job(node, "launch-b", run=run).start()
    sealed.append(await second.publish(step=3))
    with pytest.raises(Fenced):
        await first.open(step=4)
    assert all(version.state == "sealed" for version in sealed)
    return [version.version for version in sealed]


@pytest.mark.parametrize("fault", ["request", "reply"])
async def test_a_lost_write_of_any_kind_changes_nothing(place: Any, fault: str) -> None:
    store = Unreliable(place.store)
    node = await place.node(store)
    node.client = Patient(node.client)
    assert await life(place, node, "no-fault") == [1, 2, 4]
    for number, key in enumerate(list(store.writes)):
        run = f"fault-{number}"
        store.arm({number: fault})
        assert await life(place, node, run) == [1, 2, 4], f"with the {fault} of writing {key} lost"
        head, _ = await read_head(place.store, run)
        assert (head.term, head.position.version) == (2, 4)


class Garbling(Unreliable):
    """A store whose first reading of each receipt has one letter changed on its way, and is still a receipt."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._seen: set[str] = set()

    async def get(self, key: str, *, max_bytes: int) -> Blob:
        blob = await super().get(key, max_bytes=max_bytes)
        if parse_key(key).kind != "receipt" or key in self._seen:
            return blob
        self._seen.add(key)
        return Blob(blob.data.replace(b'"nonce":"', b'"nonce":"f').replace(b'0","parent"', b'","parent"'), blob.etag)


async def test_a_receipt_altered_on_its_way_seals_nothing_that_cannot_be_read(place: Any) -> None:
    node = await place.node(Garbling(place.store))
    node.client = Patient(node.client)
    job = await place.job(node).start()
    sealed = await job.publish(step=1)
    assert sealed.state == "sealed"
    manifest = await read_manifest(place.store, "demo", sealed.position)
    for rank, ref in enumerate(manifest.receipts):
        await read_receipt(place.store, "demo", sealed.position, rank, ref)


async def test_writes_that_are_never_answered_are_given_up(place: Any) -> None:
    node = await place.node(Unreliable(place.store, dict.fromkeys(range(1000), "request")))
    with pytest.raises((TooBusy, BucketUnavailable)):
        await node.client.takeover("demo", TermRequest(launch="launch-a"))


async def test_a_coordinator_that_starts_empty_goes_on(job: Any, place: Any) -> None:
    sealed = await job.publish(step=1)
    opened = await job.open(step=2)
    await job.receipt(opened, 0)

    fresh = await place.node()  # knows neither the term, the layout, the opening nor the receipt
    assert (await fresh.client.head("demo")).position == sealed.position
    assert await fresh.client.layout("demo", 1, 2) == await job.client.layout("demo", 1, 2)
    job.client = fresh.client
    assert (await job.open(step=2)).version == opened.version
    assert (await job.receipt(opened, 1)).state == "undecided"  # it has not looked for the receipt of rank 0 yet
    await fresh.tick()
    assert (await fresh.client.version("demo", 2)).state == "sealed"
    assert [v.state for v in await fresh.client.versions("demo")] == ["sealed", "sealed"]


async def test_a_run_left_behind_is_found_and_its_version_decided(job: Any, place: Any) -> None:
    opened = await job.open(step=1)
    for rank in (0, 1):
        await job.write_receipt(opened, rank)  # in the bucket, and then coordinator and reports are lost
    fresh = await place.node()
    await fresh.tick()
    head, _ = await read_head(place.store, "demo")
    assert head.position.version == 1


async def test_a_run_in_trouble_is_told_of_once_and_delays_no_other(
    place: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Down(Passing):
        down = False

        async def get(self, key: str, *, max_bytes: int) -> Blob:
            if self.down and key.startswith("demo/"):
                raise StoreUnavailable("no answer", key=key)
            return await super().get(key, max_bytes=max_bytes)

    node = await place.node(store := Down(place.store))
    for run in ("demo", "other"):
        await (await place.job(node, run=run).start()).open(step=1)
    caplog.set_level(logging.INFO, "coordinator")
    for told in (1, 2):
        store.down = True
        for _ in range(5):
            place.clock.advance(30)
            await node.tick()
        assert caplog.text.count("run demo waits: no answer") == told
        store.down = False
        for _ in range(2):
            place.clock.advance(60)
            await node.tick()
        assert caplog.text.count("run demo goes on") == told
    assert (await node.client.version("other", 1)).state == "aborted"


def layouts_held() -> int:
    gc.collect()
    return sum(type(thing) is Layout for thing in gc.get_objects())  # isinstance() asks strangers for their class


async def test_a_run_at_rest_takes_little_memory_and_goes_on(job: Any, place: Any, node: Any) -> None:
    """A layout of a million pieces takes hundreds of megabytes, and a coordinator sees many runs in its life."""
    await job.publish(step=1)
    held = layouts_held()
    place.clock.advance(3599)
    await node.tick()
    assert layouts_held() == held
    place.clock.advance(61)
    await node.tick()
    assert layouts_held() == held - 1
    assert (await job.publish(step=2)).state == "sealed"


async def test_expiry_counts_from_when_this_coordinator_first_saw_the_version(job: Any, place: Any) -> None:
    await job.open(step=1)
    place.clock.advance(119)
    fresh = await place.node()
    await fresh.tick()
    place.clock.advance(119)
    await fresh.tick()
    assert (await fresh.client.version("demo", 1)).state == "undecided"
    place.clock.advance(1)
    await fresh.tick()
    assert (await fresh.client.version("demo", 1)).state == "aborted"


async def test_receipts_reported_at_different_coordinators_seal(job: Any, place: Any, node: Any) -> None:
    other = await place.node()
    opened = await job.open(step=1)
    assert (await job.open(step=1, at=other.client)).version == opened.version
    await job.receipt(opened, 0, at=node.client)
    await job.receipt(opened, 1, at=other.client)
    await asyncio.gather(node.tick(), other.tick())
    one, two = await node.client.version("demo", 1), await other.client.version("demo", 1)
    assert one.state == two.state == "sealed"
    assert one.position == two.position


@pytest.mark.parametrize(("kind", "steps"), [("memory", 20), ("local", 5), ("seaweed", 5)])
async def test_two_coordinators_race_through_many_versions(
    place: Any, kind: str, steps: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if kind == "local":
        place.store = LocalStore(tmp_path / "store")
    elif kind == "seaweed":
        url = request.getfixturevalue("s3_url")("coordinator", f"race-{time.monotonic_ns()}")
        place.store = open_store(url)
        place.stack.push_async_callback(place.store.close)
    nodes = [await place.node(), await place.node()]
    job = await place.job(nodes[0]).start()
    for step in range(1, steps + 1):
        opened = await asyncio.gather(*(job.open(step, at=nodes[rank].client) for rank in (0, 1)))
        assert len({version.version for version in opened}) == 1
        await asyncio.gather(*(job.receipt(opened[rank], rank, at=nodes[rank].client) for rank in (0, 1)))
        await asyncio.gather(*(node.tick() for node in (*nodes, *nodes)))
        job.published += 1
    head, _ = await read_head(place.store, "demo")
    position = head.position
    for version in range(steps, 0, -1):
        assert position.version == version
        position = (await read_manifest(place.store, "demo", position)).parent


async def test_a_late_receipt_and_an_expiry_never_both_win(place: Any) -> None:
    outcomes = set()
    early, late = await place.node(), await place.node(settings=Settings(expire_after_s=1e9))
    for turns in range(0, 60, 2):
        run = f"race-{turns}"
        job = await place.job(late, run=run).start()
        opened = await job.open(step=1)
        await early.client.version(run, 1)
        await job.receipt(opened, 0)
        sha256 = await job.write_receipt(opened, 1)
        place.clock.advance(121)
        await asyncio.gather(job.report(opened, 1, sha256), _expire_blindly(early, run, turns))
        states = {(await node.client.version(run, 1)).state for node in (early, late)}
        assert len(states) == 1
        state = states.pop()
        register = await place.store.get(manifest_key(run, 1), max_bytes=1 << 20)
        head, _ = await read_head(place.store, run)
        is_manifest = record_format(register.data) == Manifest.FORMAT
        assert (state == "sealed") == is_manifest == (head.position.version == 1)
        outcomes.add(state)
    assert outcomes == {"sealed", "aborted"}


async def _expire_blindly(node: Any, run_name: str, after_turns: int) -> None:
    """Let a coordinator that has not looked for receipts decide that time is over, some turns of the loop later."""
    for _ in range(after_turns):
        await asyncio.sleep(0)
    run, _ = node.service.registry.get(run_name)
    await run.settle(probe=False)


async def test_a_manifest_without_its_head_is_finished_by_anybody(job: Any, place: Any) -> None:
    opened = await job.open(step=1)
    await job.write_receipt(opened, 0)
    sha256 = await job.write_receipt(opened, 1)
    # The coordinator dies between register and head: every write after the first is lost for good.
    dying = await place.node(Unreliable(place.store, dict.fromkeys(range(1, 1000), "request")))
    await job.report(opened, 0, sha256, at=dying.client)
    with pytest.raises(TooBusy):
        await job.report(opened, 1, sha256, at=dying.client)
    assert (await read_head(place.store, "demo"))[0].position.version == 0

    fresh = await place.node()
    assert (await fresh.client.version("demo", 1)).state == "undecided"  # not before readers can reach it
    await fresh.tick()
    assert (await fresh.client.version("demo", 1)).state == "sealed"


async def test_a_takeover_finishes_what_was_decided_before_it(job: Any, place: Any) -> None:
    opened = await job.open(step=1)
    await job.write_receipt(opened, 0)
    sha256 = await job.write_receipt(opened, 1)
    dying = await place.node(Unreliable(place.store, dict.fromkeys(range(1, 1000), "request")))
    await job.report(opened, 0, sha256, at=dying.client)
    with pytest.raises(TooBusy):
        await job.report(opened, 1, sha256, at=dying.client)

    fresh = await place.node()
    later = await fresh.client.takeover("demo", TermRequest(launch="launch-b"))
    assert (later.term, later.position.version) == (2, 1)


class Pausing(Unreliable):
    """A store that lets a test act just before the first write of a key, like a coordinator that sleeps there."""

    def __init__(self, store: Store, key: str, meanwhile: Any) -> None:
        super().__init__(store)
        self._key, self._meanwhile = key, meanwhile

    async def _faulty(self, key: str, act: Any) -> str:
        if key == self._key and self._meanwhile is not None:
            meanwhile, self._meanwhile = self._meanwhile, None
            await meanwhile()
        return await super()._faulty(key, act)


async def test_a_manifest_written_after_a_takeover_never_counts(job: Any, place: Any, node: Any) -> None:
    first = await job.publish(step=1)
    opened = await job.open(step=2)

    async def take_over() -> None:
        # The head moves to term 2 while the sleeper is about to write the manifest of term 1; the new term has not
        # fenced version 2 yet.
        run, _ = node.service.registry.get("demo")
        await run.take_over("launch-b")

    sleeper = await place.node(Pausing(place.store, manifest_key("demo", 2), take_over))
    for rank in (0, 1):
        await job.receipt(opened, rank, at=sleeper.client) if rank == 0 else await job.write_receipt(opened, rank)
    await sleeper.tick()
    register = await place.store.get(manifest_key("demo", 2), max_bytes=1 << 20)
    assert Manifest.parse(register.data).term == 1

    for coordinator in (node, sleeper, await place.node()):
        await coordinator.tick()
        stranded = await coordinator.client.version("demo", 2)
        assert (stranded.state, stranded.reason.split(":")[0]) == ("aborted", "fenced")
    later = place.job(node, "launch-b")
    await later.start()
    third = await later.publish(step=2)
    assert (third.version, third.parent) == (3, first.position)
    listed = await (await place.node()).client.versions("demo")
    assert [v.state for v in listed] == ["sealed", "aborted", "sealed"]


async def test_launches_that_take_over_at_once_get_terms_of_their_own(place: Any) -> None:
    nodes = [await place.node() for _ in range(3)]
    launches = [f"launch-{number}" for number in range(6)]
    answers = await asyncio.gather(
        *(nodes[i % 3].client.takeover("demo", TermRequest(launch=launch)) for i, launch in enumerate(launches))
    )
    assert sorted(answer.term for answer in answers) == [1, 2, 3, 4, 5, 6]
    assert len({answer.run_id for answer in answers}) == 1


async def test_nothing_expires_whose_receipts_are_all_in_the_bucket(place: Any) -> None:
    job = await place.job(await place.node(), world_size=5).start()
    opened = await job.open(step=1)
    for rank in range(5):
        await job.write_receipt(opened, rank)
    fresh = await place.node(settings=Settings(max_probes=1))  # looks for one receipt at a time
    await fresh.tick()
    place.clock.advance(121)
    await fresh.tick()
    assert (await fresh.client.version("demo", 1)).state == "sealed"

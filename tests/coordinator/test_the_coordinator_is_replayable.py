"""Clock, identifiers and threads are injected: the same requests write the same bucket, byte for byte."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from coordinator import decisions
from coordinator.ambient import Ambient
from coordinator.app import create_app
from coordinator.backoff import Backoff, retrying
from coordinator.client import CoordinatorClient
from coordinator.decisions import CreateRegister, Done, Evidence, Reread, Sealing, Slot, View
from coordinator.errors import BucketDamaged, TermPending, UnknownRun
from weight_store.head import Head
from weight_store.memory import MemoryStore
from weight_store.version import Abort


async def inline(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


async def bucket_after(place: Any) -> dict[str, bytes]:
    """What a run, an expiry and a takeover leave in a store."""
    numbers = itertools.count()
    clock = type(place.clock)()
    ambient = Ambient(
        clock=clock,
        nonce=lambda: f"{next(numbers):016x}",
        run_id=lambda: "00000000-0000-4000-8000-000000000001",
        offload=inline,
    )
    store = MemoryStore(clock=clock)
    app = create_app(store, ambient=ambient)
    async with CoordinatorClient("http://coordinator", transport=httpx.ASGITransport(app)) as client:
        here = type(place)(store, clock)
        node = type("Node", (), {"client": client})
        job = await here.job(node).start()
        await job.publish(step=1)
        await job.open(step=2)
        clock.advance(121)
        await app.state.coordinator.registry.tick()
        later = await here.job(node, "launch-b").start()
        await later.publish(step=2)
    return {entry.key: (await store.get(entry.key, max_bytes=1 << 20)).data async for entry in store.list("")}


async def test_the_same_requests_write_the_same_bytes(place: Any) -> None:
    first, second = await bucket_after(place), await bucket_after(place)
    assert first == second
    assert "demo/v/000000000003/manifest.json" in first


async def seen(place: Any, name: str = "demo") -> View:
    node = await place.node()
    run, _ = node.service.registry.get(name)
    view = await run.fresh()
    assert isinstance(view, View)
    return view


async def test_views_that_are_torn_are_read_again(job: Any, place: Any, node: Any) -> None:
    await job.publish(step=1)
    old = (await seen(place)).head
    later = await place.job(node, "launch-b").start()
    opened = await later.open(step=2)
    new = await seen(place)
    torn = View(old, new.current, new.slot)  # the head was read before the takeover, the slot after the opening
    assert decisions.settle(torn, Evidence(), "0" * 16) == Reread()
    await later.receipt(opened, 0)
    await later.receipt(opened, 1)
    newer = await seen(place)
    decided = Slot(2, new.slot.opened, Sealing(newer.current, newer.head.position))
    torn = View(old, new.current, decided)
    assert decisions.settle(torn, Evidence(), "0" * 16) == Reread()
    assert decisions.take_over(torn, "launch-c", "", "0" * 16) == Reread()


async def test_what_waits_is_left_alone_until_it_expires(job: Any, place: Any) -> None:
    await job.open(step=1)
    view = await seen(place)
    assert decisions.settle(view, Evidence(quiet_s=119.9, expire_after_s=120), "0" * 16) == Done()
    step = decisions.settle(view, Evidence(quiet_s=120, expire_after_s=120), "0" * 16)
    assert isinstance(step, CreateRegister)
    assert isinstance(step.record, Abort)
    assert (step.record.reason, step.record.missing) == ("expired", (0, 1))


async def test_objects_of_an_earlier_run_of_the_name_are_noticed(job: Any, place: Any) -> None:
    await job.publish(step=1)
    await job.open(step=2)
    view = await seen(place)
    other = Head(**{**dict(view.head), "run_id": "00000000-0000-4000-8000-00000000000f"})
    with pytest.raises(BucketDamaged, match="belongs to run"):
        decisions.is_dead(other, view.slot)


async def test_a_manifest_on_another_parent_is_noticed(job: Any, place: Any) -> None:
    await job.publish(step=1)
    view = await seen(place)
    assert view.current is not None
    slot = Slot(2, None, Sealing(view.current, view.head.position))
    with pytest.raises(BucketDamaged, match="something else writes"):
        decisions.is_dead(view.head, slot)


class Steps:
    """A clock that the pauses of a retry move on."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.pauses: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now_s += seconds


async def failing(error: Exception) -> None:
    raise error


async def test_retries_back_off_with_full_jitter_within_their_budget() -> None:
    steps = Steps()
    with pytest.raises(TermPending):
        await retrying(
            lambda: failing(TermPending("not yet")),
            Backoff(first_s=1, longest_s=8, budget_s=20),
            clock=lambda: steps.now_s,
            sleep=steps.sleep,
            draw=lambda: 0.5,
        )
    assert steps.pauses == [0.5, 1, 2, 4, 4, 4, 4]


def test_who_tried_for_days_waits_no_longer_than_the_longest_pause() -> None:
    assert Backoff(longest_s=8).pause_s(100_000, 1.0) == 8


async def test_what_can_never_succeed_is_not_tried_again() -> None:
    steps = Steps()
    with pytest.raises(UnknownRun):
        await retrying(lambda: failing(UnknownRun("no")), sleep=steps.sleep)
    with pytest.raises(TermPending):
        await retrying(lambda: failing(TermPending("no")), Backoff(attempts=3), sleep=steps.sleep, draw=lambda: 0.0)
    assert steps.pauses == [0, 0]

"""Where an object on the cheapest way to the head is damaged for good, a replica that can go another way does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from rollout_agent.detours import cheapest_start, leads_on
from rollout_agent.disk import LocalDisk
from rollout_agent.errors import DamagedObject
from rollout_agent.places import Places
from rollout_agent.replica import Replica
from tests.rollout_agent.training import Training
from weight_store.errors import FormatError, ObjectNotFound
from weight_store.position import Position

ReadDir = Callable[[Path], dict[str, bytes]]


async def opened(training: Training, path: Path) -> Replica:
    return await Replica.open(run="tiny", model_dir=path, store=training.store)


async def publish(training: Training, share: float) -> None:
    training.step(share)
    await training.publish()


def spoil(training: Training, kind: str, *, full: bool, version: int) -> None:
    objects = training.store._objects  # type: ignore[attr-defined]
    inside = f"/v/{version:012d}/full/" if full else f"/v/{version:012d}/0"
    for key in [key for key in objects if inside in key and key.endswith(".shard")]:
        data, modified = objects.pop(key)
        if kind == "altered":
            middle = len(data) // 2
            objects[key] = (data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :], modified)


async def gets_there(replica: Replica, position: Position) -> None:
    for _ in range(3):
        with contextlib.suppress(DamagedObject, FormatError, ObjectNotFound):
            assert await replica.catch_up() == position
            return
        assert replica.position is not None
    raise AssertionError(f"stays at {replica.position}")


@pytest.mark.parametrize(("kind", "deltas", "share"), [("altered", 24, 0.5), ("gone", 24, 0.5), ("altered", 45, 0.01)])
async def test_by_the_deltas_where_the_full_would_cost_less(
    training: Training, tmp_path: Path, read_dir: ReadDir, kind: str, deltas: int, share: float
) -> None:
    await publish(training, 0.0)
    async with await opened(training, tmp_path) as replica:
        held = await replica.catch_up()
        for _ in range(deltas):
            await publish(training, share)
        full = training.position.version
        await training.extra_full(full)
        await publish(training, 0.01)
        manifest = training.manifests[full + 1]
        assert cheapest_start(held, manifest, training.position) == "full"
        spoil(training, kind, full=True, version=full)
        await gets_there(replica, training.position)
        assert not LocalDisk().names(Places.of(tmp_path).new), "nothing stays of the files begun from the full"
    assert read_dir(tmp_path) == training.tensors(training.position.version)


@pytest.mark.parametrize("kind", ["altered", "gone"])
async def test_by_a_later_full_where_the_deltas_would_cost_less(
    training: Training, tmp_path: Path, read_dir: ReadDir, kind: str
) -> None:
    await publish(training, 0.0)
    async with await opened(training, tmp_path) as replica:
        held = await replica.catch_up()
        await publish(training, 0.01)
        await training.extra_full(2)
        await publish(training, 0.01)
        assert cheapest_start(held, training.manifests[3], training.position) == "delta"
        spoil(training, kind, full=False, version=2)
        await gets_there(replica, training.position)
    assert read_dir(tmp_path) == training.tensors(3)


async def test_there_is_none_past_a_delta_that_no_full_follows(training: Training, tmp_path: Path) -> None:
    await publish(training, 0.0)
    async with await opened(training, tmp_path) as replica:
        await replica.catch_up()
        await publish(training, 0.01)
        spoil(training, "altered", full=False, version=2)
        fetched = replica.fetched_bytes
        for _ in range(3):
            with pytest.raises((DamagedObject, FormatError)):
                await replica.catch_up()
        assert replica.position == training.positions[1]
        assert replica.fetched_bytes - fetched < training.manifests[1].payload_bytes, "a full is of no use"
        assert not LocalDisk().names(Places.of(tmp_path).new), "nor is a second copy of the files"


async def test_another_way_is_one_of_later_objects_alone(training: Training) -> None:
    await publish(training, 0.0)
    await publish(training, 0.01)
    held = training.positions[1]
    assert not leads_on(held, training.manifests[2], training.positions[2]), "the full is of what is held"
    await training.extra_full(2)
    await publish(training, 0.01)
    assert leads_on(held, training.manifests[3], training.positions[3])
    elsewhere = Position(version=1, sha256="0" * 64)
    assert not leads_on(elsewhere, training.manifests[3], training.positions[3]), "no delta leads on from there"

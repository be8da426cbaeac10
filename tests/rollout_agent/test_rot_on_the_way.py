"""What rotted in the bucket stops nobody whom another way leads past it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rollout_agent.errors import DamagedObject
from rollout_agent.replica import Replica
from tests.rollout_agent.following import enters
from tests.rollout_agent.training import Training
from weight_store.errors import FormatError
from weight_store.memory import MemoryStore

ReadDir = Callable[[Path], dict[str, bytes]]


@pytest.mark.parametrize("what", [".shard", "00000.json", "manifest.json"])
async def test_a_newer_full_leads_past_a_rotten_delta(
    training: Training, store: MemoryStore, tmp_path: Path, read_dir: ReadDir, what: str
) -> None:
    async def publish(versions: int) -> None:
        for _ in range(versions):
            training.step(0.003)
            await training.publish()

    await publish(2)
    async with await Replica.open(run="tiny", model_dir=tmp_path, store=store) as replica:
        await replica.catch_up()
        await publish(3)
        key = next(key for key in store._objects if key.startswith("tiny/v/000000000004/") and key.endswith(what))
        data, written_s = store._objects[key]
        store._objects[key] = data[:-9] + bytes([data[-9] ^ 1]) + data[-8:], written_s
        for _ in range(3):
            with pytest.raises((DamagedObject, FormatError)):
                await replica.catch_up()
        assert enters(tmp_path) in (2, 3), "it keeps what it has"
        await training.extra_full(5)
        await publish(1)
        assert await replica.catch_up() == training.position
    assert read_dir(tmp_path) == training.tensors(6)


@pytest.mark.parametrize("what", ["tiny/head.json", ".shard", "00000.json", "manifest.json"])
async def test_a_rotten_object_is_counted_once_until_it_is_put_right(
    training: Training, store: MemoryStore, tmp_path: Path, what: str
) -> None:
    await training.publish()
    async with await Replica.open(run="tiny", model_dir=tmp_path, store=store) as replica:
        for times in (1, 2):
            training.step(0.003)
            await training.publish()
            key = max(key for key in store._objects if key.endswith(what))
            right = store._objects[key]
            at = 0 if what == "tiny/head.json" else -9  # much of a head may change and still be one
            rotten = bytearray(right[0])
            rotten[at] ^= 1
            store._objects[key] = bytes(rotten), right[1]
            for _ in range(3):
                with pytest.raises((DamagedObject, FormatError)):
                    await replica.catch_up()
            assert replica.faults.found_by_kind["object"] == times
            store._objects[key] = right
            assert await replica.catch_up() == training.position

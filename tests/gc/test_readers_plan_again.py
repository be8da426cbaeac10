"""A reader that lost the race with a collection plans again, and ends bit-equal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rollout_agent.replica import Replica
from tests.gc.conftest import RUN, Bucket
from weight_store.gc import Wish

ReadDir = Callable[[Path], dict[str, bytes]]


async def collected_past(bucket: Bucket) -> None:
    """The head's chain still leads back to version 2, but everything below version 7 is gone."""
    await bucket.publish(5)
    await bucket.training.extra_full(7)
    await bucket.publish(2)
    report = await bucket.collector().collect(Wish(floor=7))
    assert report.floor.after == 7
    assert bucket.training.manifests[9].chain[0].version <= 2


async def test_a_laggard_whose_deltas_were_collected_starts_from_the_full(
    bucket: Bucket, tmp_path: Path, read_dir: ReadDir
) -> None:
    await bucket.publish(2)
    async with await Replica.open(run=RUN, model_dir=tmp_path, store=bucket.store) as replica:
        assert await replica.catch_up() == bucket.training.position
        await collected_past(bucket)
        assert await replica.catch_up() == bucket.training.position
        assert read_dir(tmp_path) == bucket.training.tensors(9)
        await bucket.publish(1)
        await replica.catch_up()
        assert read_dir(tmp_path) == bucket.training.tensors(10)


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_damaged_laggard_whose_version_was_collected_does_so_too(
    bucket: Bucket, tmp_path: Path, read_dir: ReadDir, restarted: bool
) -> None:
    await bucket.publish(2)
    replica = await Replica.open(run=RUN, model_dir=tmp_path, store=bucket.store)
    await replica.catch_up()
    await collected_past(bucket)
    if restarted:
        await replica.close()
    path = max(tmp_path.glob("*.safetensors"), key=lambda found: found.stat().st_size)  # noqa: ASYNC240
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    if restarted:
        replica = await Replica.open(run=RUN, model_dir=tmp_path, store=bucket.store)
    try:
        await replica.catch_up()
        assert read_dir(tmp_path) == bucket.training.tensors(9)
    finally:
        await replica.close()

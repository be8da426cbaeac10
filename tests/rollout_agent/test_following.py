"""A replica ends up, bit for bit, where the trainer was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rollout_agent.replica import Replica
from tests.rollout_agent.training import Training

ReadDir = Callable[[Path], dict[str, bytes]]


async def test_follows_each_version(training: Training, tmp_path: Path, read_dir: ReadDir) -> None:
    await training.publish()
    async with await Replica.open(run="tiny", model_dir=tmp_path, store=training.store) as replica:
        for _ in range(5):
            assert await replica.catch_up() == training.position
            assert read_dir(tmp_path) == training.tensors(training.position.version)
            training.step()
            await training.publish()

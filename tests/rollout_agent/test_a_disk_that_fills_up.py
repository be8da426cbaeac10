"""A small filesystem that is full leaves the old version whole, says so, and goes on once there is room."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rollout_agent.errors import DiskFull
from rollout_agent.gate import shared
from rollout_agent.replica import Replica
from tests.rollout_agent.harming import fill
from tests.rollout_agent.training import Training

ReadDir = Callable[[Path], dict[str, bytes]]


@pytest.mark.parametrize("what", ["first version", "delta", "dense delta", "checkpoint"])
async def test_a_full_filesystem(
    training: Training, small_tmpfs: Callable[[str], Path], tmp_path: Path, read_dir: ReadDir, what: str
) -> None:
    disk = small_tmpfs("2m")
    model = disk / "model"
    # Logs and the checkpoint, a copy of what lies in memory, are in the state directory.
    state = (disk if what in ("delta", "checkpoint") else tmp_path) / "state"
    await training.publish()
    async with await Replica.open(run="tiny", model_dir=model, store=training.store, state_dir=state) as replica:
        if what != "first version":
            await replica.catch_up()
            await replica.checkpoint(force=True)
            training.step(1.0 if what == "dense delta" else 0.02)
            await training.publish()
        if what == "checkpoint":
            await replica.catch_up()
        others = fill(disk)
        with pytest.raises(DiskFull, match="free space"):
            await (replica.checkpoint(force=True) if what == "checkpoint" else replica.catch_up())
        if what in ("delta", "dense delta"):
            with shared(model, timeout_s=1) as whole:
                assert whole.position == training.positions[1]
                assert read_dir(model) == training.tensors(1)
        others.unlink()
        assert await replica.catch_up() == training.position
        await replica.checkpoint(force=True)
    assert read_dir(model) == training.tensors(training.position.version)

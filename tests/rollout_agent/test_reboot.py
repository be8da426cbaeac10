"""A model directory in memory, on the machine's own tmpfs, comes back from checkpoint and logs without the store."""

# ruff: noqa: ASYNC240 - a test has its event loop to itself

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rollout_agent.disk import LocalDisk
from rollout_agent.replica import Replica
from tests.rollout_agent.harming import edit
from tests.rollout_agent.training import Down, Training

ReadDir = Callable[[Path], dict[str, bytes]]


@pytest.mark.parametrize("checkpoints", [1, 2])
async def test_weights_come_back_after_a_reboot(
    training: Training, memory_dir: Path, tmp_path: Path, read_dir: ReadDir, checkpoints: int
) -> None:
    model, state = memory_dir / "model", tmp_path / "state"
    await training.publish()
    async with await Replica.open(run="tiny", model_dir=model, state_dir=state, store=training.store) as replica:
        await replica.catch_up()
        await replica.checkpoint()
        for number in range(3):
            training.step(0.01)
            await training.publish()
            await replica.catch_up()
            await replica.checkpoint(force=number < checkpoints - 1)
    shutil.rmtree(model)
    async with await Replica.open(run="tiny", model_dir=model, state_dir=state, store=Down()) as replica:
        assert replica.position == training.position
        assert read_dir(model) == training.tensors(4)
    shutil.rmtree(model)
    async with await Replica.open(run="tiny", model_dir=model, state_dir=state, store=training.store) as replica:
        training.step(0.01)
        await training.publish()
        await replica.catch_up()
        assert replica.fetched_bytes < training.manifests[1].payload_bytes / 2
    assert read_dir(model) == training.tensors(5)


async def test_a_checkpoint_found_wrong_is_replaced_though_no_version_comes(
    training: Training, memory_dir: Path, tmp_path: Path, read_dir: ReadDir
) -> None:
    model, state = memory_dir / "model", tmp_path / "state"
    await training.publish()
    async with await Replica.open(run="tiny", model_dir=model, state_dir=state, store=training.store) as replica:
        await replica.catch_up()
        await replica.checkpoint()
    shutil.rmtree(model)
    edit(next(state.glob("checkpoint-*/*.safetensors")))
    async with await Replica.open(run="tiny", model_dir=model, state_dir=state, store=training.store) as replica:
        await replica.catch_up()
        assert replica.faults.found_by_kind["checkpoint"] == 1
        await replica.checkpoint()
    shutil.rmtree(model)
    async with await Replica.open(run="tiny", model_dir=model, state_dir=state, store=Down()) as replica:
        assert replica.position == training.position
    assert read_dir(model) == training.tensors(1)


async def test_a_disk_keeps_its_weights_itself(training: Training, tmp_path: Path) -> None:
    if LocalDisk().is_volatile(tmp_path):
        pytest.skip("temporary files are on tmpfs here")
    await training.publish()
    async with await Replica.open(run="tiny", model_dir=tmp_path / "m", store=training.store) as replica:
        await replica.catch_up()
        await replica.checkpoint(force=True)
    assert not list(tmp_path.rglob("checkpoint-*"))

"""A checkpoint that is slow or fails holds up nobody, and what it leaves survives the loss of the model directory."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_agent.agent import Agent, Pace
from rollout_agent.changelog import ends_committed
from rollout_agent.disk import LocalDisk, copy_file
from rollout_agent.errors import AgentRunning, DamagedFiles, DiskError, DiskFailed, DiskFull
from rollout_agent.gate import shared
from rollout_agent.places import Places, checkpoint_name
from rollout_agent.replica import Replica
from rollout_agent.state import State, load
from tests.rollout_agent.following import until
from tests.rollout_agent.training import Down, Training
from weight_store.position import Position

ReadDir = Callable[[Path], dict[str, bytes]]
QUICK = Pace(poll_s=0.02, first_retry_s=0.02, longest_retry_s=0.05, heartbeat_s=0.05)


@pytest.fixture
def memory(memory_dir: Path) -> Path:
    """A directory whose files are gone after a reboot."""
    return memory_dir / "model"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A directory whose files stay."""
    if LocalDisk().is_volatile(tmp_path):
        pytest.skip("the tests' directory is a tmpfs")
    return tmp_path / "state"


class SlowDisk(LocalDisk):
    """Copies wait for ``go``, then fail while ``error`` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.error: DiskError | None = None
        self.asked = 0

    def copy(self, source: Path, target: Path, start: int, count: int) -> None:
        self.asked += 1
        assert self.go.wait(60)
        if self.error is not None:
            raise self.error
        super().copy(source, target, start, count)


async def opened(
    training: Training, model: Path, state: Path, disk: LocalDisk | None = None, **options: Any
) -> Replica:
    return await Replica.open(run="tiny", model_dir=model, state_dir=state, store=training.store, disk=disk, **options)


async def begun(replica: Replica, disk: SlowDisk, **options: Any) -> asyncio.Task[None]:
    """A checkpoint of which the first copy waits."""
    saving = asyncio.ensure_future(replica.checkpoint(**options))
    await until(lambda: disk.asked > 0)
    return saving


def recorded(model: Path, state: Path) -> Position | None:
    found = load(LocalDisk(), Places.of(model, state).checkpoint, State)
    return found.version.position if found is not None else None


def weights_in(model: Path) -> Path:
    return min(model.glob("*.safetensors"))


def spoil(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def is_committed(log: Path) -> bool:
    return log.exists() and ends_committed(np.fromfile(log, np.uint8))


async def test_versions_are_applied_while_one_is_made(
    training: Training, memory: Path, state: Path, read_dir: ReadDir
) -> None:
    disk = SlowDisk()
    await training.publish()
    async with await opened(training, memory, state, disk) as replica:
        await replica.catch_up()
        saving = await begun(replica, disk)
        for _ in range(3):
            training.step(0.01)
            assert await replica.catch_up() != await training.publish()
            assert await replica.catch_up() == training.position
        assert not saving.done()
        disk.go.set()
        await saving
        assert recorded(memory, state) == training.positions[1]
    # The copy is of no single version; with the logs that came after it began it is the newest.
    shutil.rmtree(memory)
    training.store = None  # type: ignore[assignment]
    async with await opened(training, memory, state) as replica:
        assert replica.position == training.position
    assert read_dir(memory) == training.tensors(4)


@pytest.mark.parametrize("error", [DiskFailed("the disk says no"), DiskFull("no room for a copy")])
async def test_one_that_fails_delays_no_version(
    training: Training, memory: Path, state: Path, error: DiskError
) -> None:
    disk = SlowDisk()
    disk.error = error
    disk.go.set()
    pace = Pace(QUICK.poll_s, QUICK.first_retry_s, QUICK.longest_retry_s, first_save_retry_s=3600)
    await training.publish()
    async with await opened(training, memory, state, disk) as replica:
        agent = Agent(replica, "tiny", "eu-west", "a1", pace=pace)
        task = asyncio.ensure_future(agent.follow())
        try:
            await until(lambda: bool(agent.status.unsaved))
            for _ in range(3):
                training.step(0.01)
                await training.publish()
                await until(lambda: replica.position == training.position)
            assert agent.status.unsaved == str(error)
            assert agent.status.error == ""
            assert disk.asked == 1
            assert not [n for n in disk.names(state) if "checkpoint" in n], "an unfinished copy takes the space of logs"
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_it_is_tried_again(training: Training, memory: Path, state: Path) -> None:
    disk = SlowDisk()
    disk.error = DiskFailed("not yet")
    disk.go.set()
    pace = Pace(QUICK.poll_s, first_save_retry_s=0.02, longest_save_retry_s=0.05)
    await training.publish()
    async with await opened(training, memory, state, disk) as replica:
        agent = Agent(replica, "tiny", "eu-west", "a1", pace=pace)
        task = asyncio.ensure_future(agent.follow())
        try:
            await until(lambda: disk.asked > 2)
            disk.error = None
            await until(lambda: recorded(memory, state) == training.position)
            await until(lambda: agent.status.unsaved == "")
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_one_of_files_that_were_replaced_meanwhile_is_no_failure(
    training: Training, memory: Path, state: Path, read_dir: ReadDir
) -> None:
    await training.publish()
    some = sorted(training.weights)[:1]
    async with await opened(training, memory, state, include=some) as replica:
        await replica.catch_up()
    disk = SlowDisk()
    async with await opened(training, memory, state, disk, file_bytes=1000) as replica:
        saving = await begun(replica, disk, force=True)
        await replica.catch_up()  # all tensors, in other files
        disk.go.set()
        await saving
        assert recorded(memory, state) is None
        await replica.checkpoint()
    assert recorded(memory, state) == training.position
    assert read_dir(memory) == training.tensors(1)


@pytest.mark.parametrize("at", [20, -1], ids=["head", "weights"])
async def test_one_of_files_that_were_found_wrong_meanwhile_does_not_count(
    training: Training, memory: Path, state: Path, at: int
) -> None:
    disk = SlowDisk()
    await training.publish()
    async with await opened(training, memory, state, disk) as replica:
        await replica.catch_up()
        saving = await begun(replica, disk)
        spoil(weights_in(memory), at)
        assert await replica.check()
        disk.go.set()
        await saving
        assert recorded(memory, state) is None, "what was copied may be what was wrong"
        await replica.checkpoint()
    assert recorded(memory, state) == training.position


async def test_one_is_due_where_a_log_that_leads_on_from_the_last_is_found_damaged(
    training: Training, memory: Path, state: Path
) -> None:
    await training.publish()
    async with await opened(training, memory, state) as replica:
        await replica.catch_up()
        await replica.checkpoint()
        training.step(0.01)
        await training.publish()
        await replica.catch_up()
        for path in (Places.of(memory, state).log(2), weights_in(memory)):
            spoil(path, -100)
        assert await replica.check()
        assert replica.position == training.position
        assert replica.faults.found_by_kind["log"] == 1
        assert recorded(memory, state) == training.positions[1]
        await replica.checkpoint()
        assert recorded(memory, state) == training.position


@pytest.mark.parametrize("harm", [lambda path: spoil(path, 9), lambda path: os.truncate(path, 100)])
async def test_one_that_is_found_damaged_is_made_anew(
    training: Training, memory: Path, state: Path, read_dir: ReadDir, harm: Callable[[Path], None]
) -> None:
    await training.publish()
    async with await opened(training, memory, state) as replica:
        await replica.catch_up()
        await replica.checkpoint()
        harm(weights_in(state / checkpoint_name(1)))
        training.step(0.01)
        await training.publish()
        await replica.catch_up()
        with pytest.raises(DamagedFiles, match="checkpoint-000000000001"):
            await replica.checkpoint(force=True)
        await replica.checkpoint()
        assert recorded(memory, state) == training.position
    shutil.rmtree(memory)
    training.store = Down()
    async with await opened(training, memory, state) as replica:
        assert replica.position == training.position
    assert read_dir(memory) == training.tensors(2)


@pytest.mark.parametrize(("by_size", "in_memory"), [(True, True), (False, True), (True, False)])
async def test_one_is_due_after_logs_of_a_quarter_of_the_model_or_sixteen(
    training: Training,
    memory: Path,
    state: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    by_size: bool,
    in_memory: bool,
) -> None:
    if not by_size:
        monkeypatch.setattr("rollout_agent.replica.CHECKPOINT_SHARE", 100)
    model = memory if in_memory else tmp_path / "model"
    await training.publish()
    async with await opened(training, model, state) as replica:
        first = await replica.catch_up()
        await replica.checkpoint(force=True)
        while recorded(model, state) == first:
            training.step(0.0)
            await training.publish()
            await replica.catch_up()
            sizes = [path.stat().st_size for path in state.glob("change-*.log")]  # noqa: ASYNC240
            await replica.checkpoint()
            early = 4 * sum(sizes) < replica.nbytes if by_size else len(sizes) < 16
            assert recorded(model, state) == (first if early else training.position)
        assert len(sizes) > 1


async def test_one_that_ends_after_a_version_was_committed_leaves_all_that_this_needs(
    training: Training, memory: Path, state: Path
) -> None:
    disk = SlowDisk()
    await training.publish()
    async with await opened(training, memory, state, disk) as replica:
        await replica.catch_up()
        saving = await begun(replica, disk)
        training.step(0.01)
        training.assets["tokenizer.json"] = b'{"other": 1}'
        await training.publish()
        with shared(memory):
            following = asyncio.ensure_future(replica.catch_up())
            await until(lambda: is_committed(Places.of(memory, state).log(2)))
            following.cancel()  # its stores wait for an engine
            with pytest.raises(asyncio.CancelledError):
                await following
        disk.go.set()
        await saving
    training.store = None  # type: ignore[assignment]
    async with await opened(training, memory, state) as replica:
        assert replica.position == training.position


async def test_stopping_waits_for_one_piece_only(training: Training, memory: Path, state: Path) -> None:
    disk = SlowDisk()
    await training.publish()
    replica = await opened(training, memory, state, disk)
    await replica.catch_up()
    saving = await begun(replica, disk)
    closing = asyncio.ensure_future(replica.close())
    await asyncio.wait({closing}, timeout=0.3)
    with pytest.raises(AgentRunning):  # no other may write there before that piece is
        await opened(training, memory, state)
    disk.go.set()
    await closing
    await saving
    assert disk.asked == 1
    assert recorded(memory, state) is None


def test_files_are_copied_between_file_systems(memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways, in several pieces, also where the kernel refuses ``copy_file_range`` between file systems."""
    disk = LocalDisk()
    memory.mkdir()
    data = bytes(range(256)) * 40 + b"odd end"
    monkeypatch.setattr("rollout_agent.disk.COPY_BYTES", 3000)
    (memory / "a").write_bytes(data)
    for source, target in ((memory / "a", tmp_path / "b"), (tmp_path / "b", memory / "c")):
        disk.allocate(target, len(data))
        for _ in copy_file(disk, source, target):
            pass
        assert target.read_bytes() == data
    with pytest.raises(DiskFailed, match="shrank"):
        disk.copy(memory / "a", tmp_path / "b", len(data) - 10, 20)

"""An engine that is told of a version may read the files until it answers: it reads that version and no other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rollout_agent.agent import Agent, Pace
from rollout_agent.disk import Appender, LocalDisk
from rollout_agent.engine import Staged
from rollout_agent.errors import EngineLoading
from rollout_agent.replica import Replica
from tests.rollout_agent.following import followed, until
from tests.rollout_agent.harming import edit
from tests.rollout_agent.training import Training
from weight_store.errors import StoreUnavailable
from weight_store.keys import receipt_key
from weight_store.memory import MemoryStore
from weight_store.store import Blob

ReadDir = Callable[[Path], dict[str, bytes]]
QUICK = Pace(poll_s=0.02, first_retry_s=0.02, longest_retry_s=0.05, watch_s=0.02)


class HalfAndHalf:
    """An engine that reads the first half of each file, and the second once ``go_on`` is set; no gate."""

    def __init__(self, read_dir: ReadDir) -> None:
        self.read_dir = read_dir
        self.loading, self.go_on = asyncio.Event(), asyncio.Event()
        self.go_on.set()
        self.loaded: list[tuple[int, dict[str, bytes]]] = []

    def pause(self) -> None:
        """Take the next time to load."""
        self.loading.clear()
        self.go_on.clear()

    async def load(self, staged: Staged) -> None:
        first = self.read_dir(staged.path)
        self.loading.set()
        await self.go_on.wait()
        second = self.read_dir(staged.path)
        halves = {name: raw[: len(raw) // 2] + second[name][len(raw) // 2 :] for name, raw in first.items()}
        self.loaded.append((staged.version, halves))


class Slow(MemoryStore):
    """A store that keeps whoever reads ``key`` waiting, then fails as often as it is told to."""

    key = ""
    failures = 0

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.answer = asyncio.Event(), asyncio.Event()

    async def get(self, key: str, *, max_bytes: int) -> Blob:
        if key == self.key:
            self.asked.set()
            await self.answer.wait()
            if self.failures:
                self.failures -= 1
                raise StoreUnavailable("down", key=key)
        return await super().get(key, max_bytes=max_bytes)


def one_file(directory: Path) -> Path:
    (path,) = directory.glob("*.safetensors")
    return path


async def rather_not(condition: Callable[[], bool]) -> None:
    """Give what must not happen the time that it would need."""
    for _ in range(20):
        await asyncio.sleep(0.01)
        assert not condition()


class SlowToNote(LocalDisk):
    """A disk that takes until ``go_on`` is set to note that an engine is told."""

    def __init__(self) -> None:
        self.noting, self.go_on = threading.Event(), threading.Event()

    def append(self, path: Path) -> Appender:
        if path.name.startswith("told.json"):
            self.noting.set()
            self.go_on.wait(20)
        return super().append(path)


async def test_no_version_takes_the_place_of_one_that_an_engine_is_about_to_be_told_of(
    training: Training, tmp_path: Path
) -> None:
    await training.publish()
    disk = SlowToNote()
    async with await Replica.open(run="tiny", model_dir=tmp_path, store=training.store, disk=disk) as replica:
        first = await replica.catch_up()
        assert first is not None
        training.step()
        await training.publish()
        telling = asyncio.create_task(replica.tells(first))
        await asyncio.to_thread(disk.noting.wait, 20)
        following = asyncio.create_task(replica.catch_up())
        await rather_not(following.done)
        disk.go_on.set()
        await telling
        with pytest.raises(EngineLoading):
            await following
        assert replica.position == first
        replica.told()
        assert await replica.catch_up() == training.position


def check(engine: HalfAndHalf, training: Training) -> None:
    for version, tensors in engine.loaded:
        assert tensors == training.tensors(version), f"a mixture, loaded as version {version}"


async def test_files_that_are_lost_while_an_engine_is_told_are_made_anew(
    training: Training, tmp_path: Path, read_dir: ReadDir
) -> None:
    """It may be waiting at the gate for them: nobody would wait for the other to be first."""
    await training.publish()
    async with await Replica.open(run="tiny", model_dir=tmp_path, store=training.store) as replica:
        await replica.catch_up()
        await replica.tells(training.position)
        one_file(tmp_path).unlink()
        assert await replica.catch_up() == training.position
        assert replica.telling == training.position
    assert read_dir(tmp_path) == training.tensors(1)


async def test_the_next_version_waits_for_an_engine_that_is_told_of_a_repair(
    training: Training, tmp_path: Path, read_dir: ReadDir
) -> None:
    await training.publish()
    async with await Replica.open(run="tiny", model_dir=tmp_path, store=training.store) as replica:
        engine = HalfAndHalf(read_dir)
        async with followed(Agent(replica, "tiny", "eu-west", "a1", engine=engine, pace=QUICK)) as agent:
            await until(lambda: agent.status.state == "serving")
            engine.pause()
            edit(one_file(tmp_path))
            await asyncio.wait_for(engine.loading.wait(), 20)
            training.step()
            await training.publish()
            await rather_not(lambda: replica.position != training.positions[1])
            engine.go_on.set()
            await until(lambda: replica.serving == training.position)
    check(engine, training)
    assert [version for version, _ in engine.loaded] == [1, 1, 2]


@pytest.mark.parametrize("share", [0.003, 0.9], ids=["by log", "as new files"])
async def test_a_version_that_was_being_fetched_when_an_engine_was_told_waits_too(
    tmp_path: Path, read_dir: ReadDir, share: float
) -> None:
    """Fetching was under way already; nothing is stored when it is done."""
    store = Slow()
    training = Training(store)
    await training.publish()
    async with await Replica.open(run="tiny", model_dir=tmp_path, store=store) as replica:
        await replica.catch_up()
        training.step(share)
        await training.publish()
        store.key = receipt_key("tiny", 2, 1)
        fetching = asyncio.ensure_future(replica.catch_up())
        await asyncio.wait_for(store.asked.wait(), 20)
        engine = HalfAndHalf(read_dir)
        engine.pause()
        agent = Agent(replica, "tiny", "eu-west", "a1", engine=engine, pace=QUICK)
        telling = asyncio.ensure_future(agent._hand_over(training.positions[1]))
        await asyncio.wait_for(engine.loading.wait(), 20)
        store.answer.set()
        await asyncio.wait([fetching], timeout=20)
        assert replica.position == training.positions[1]
        engine.go_on.set()
        await telling
        assert replica.serving == training.positions[1]
        await agent.step()
    check(engine, training)
    assert [version for version, _ in engine.loaded] == [1, 2]


async def test_a_version_waits_for_an_engine_that_is_told_because_following_failed(
    tmp_path: Path, read_dir: ReadDir
) -> None:
    """Two versions at once: the first is stored, reading the second fails, so the engine is told beside following."""
    store = Slow()
    training = Training(store)
    await training.publish()
    async with await Replica.open(run="tiny", model_dir=tmp_path, store=store) as replica:
        await replica.catch_up()
    for _ in range(2):
        training.step(0.003)
        await training.publish()
    store.key, store.failures = receipt_key("tiny", 3, 0), 1
    store.answer.set()
    async with await Replica.open(run="tiny", model_dir=tmp_path, store=store) as replica:
        engine = HalfAndHalf(read_dir)
        engine.pause()
        async with followed(Agent(replica, "tiny", "eu-west", "a1", engine=engine, pace=QUICK)):
            await asyncio.wait_for(engine.loading.wait(), 20)
            await rather_not(lambda: replica.position != training.positions[2])
            engine.go_on.set()
            await until(lambda: replica.serving == training.position)
    check(engine, training)
    assert [version for version, _ in engine.loaded] == [2, 3]

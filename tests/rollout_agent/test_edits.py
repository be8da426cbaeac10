"""A file that somebody touched under a running agent is found before an engine loads it, repaired and counted."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rollout_agent import checking
from rollout_agent.agent import Agent, Pace
from rollout_agent.engine import Staged
from rollout_agent.errors import DamagedFiles, NotWhole
from rollout_agent.replica import Replica
from tests.rollout_agent.editing import (
    EDITS,
    FILE_BYTES,
    HARMLESS,
    Loads,
    ReadDir,
    following,
    misspell,
    note_hashed,
    opened,
    replace,
)
from tests.rollout_agent.following import before_commit, enters, until
from tests.rollout_agent.harming import edit, weight_files
from tests.rollout_agent.training import Training
from weight_store.memory import MemoryStore


@pytest.mark.parametrize("harm", EDITS)
async def test_an_edit_under_a_running_agent_is_repaired(
    training: Training,
    tmp_path: Path,
    read_dir: ReadDir,
    caplog: pytest.LogCaptureFixture,
    harm: Callable[[Path], None],
) -> None:
    await training.publish()
    async with await opened(training, tmp_path) as replica:
        engine = Loads(read_dir)
        async with following(replica, engine) as agent:
            await until(lambda: agent.status.state == "serving")
            fetched = replica.fetched_bytes
            harm(weight_files(tmp_path)[1])
            assert await asyncio.to_thread(enters, tmp_path, timeout_s=30) == 1
            assert read_dir(tmp_path) == training.tensors(1)
            await until(lambda: len(engine.loaded) == 2)
        assert engine.loaded[-1] == training.tensors(1), "told again: the edited file may have been loaded before"
        assert 0 < replica.fetched_bytes - fetched < training.manifests[1].payload_bytes / 2
        assert replica.faults.found_by_kind["working"] == 1
        assert replica.faults.repaired_by_route == {"checkpoint": 0, "store": 1, "layout": 0}
        assert 'weightcast_faults_found_total{kind="working"} 1' in replica.faults.text().splitlines()
    assert weight_files(tmp_path)[1].name in caplog.text
    assert "is damaged: group" in caplog.text
    assert ", expected " in caplog.text


async def test_whoever_finds_and_repairs_an_edit_the_engine_is_told_again(
    training: Training, tmp_path: Path, read_dir: ReadDir
) -> None:
    """The next look at the head may come before the next look at the files."""
    await training.publish()
    async with await opened(training, tmp_path) as replica:
        engine = Loads(read_dir)
        agent = Agent(replica, "tiny", "eu-west", "a1", engine=engine)
        for _ in range(2):
            await agent.step()
        assert len(engine.loaded) == 1
        for times in range(1, 4):
            edit(weight_files(tmp_path)[1])
            await (agent.step() if times % 2 else replica.check())
            await agent.step()
            assert len(engine.loaded) == 1 + times
        assert engine.loaded[1:] == [training.tensors(1)] * 3
    async with await opened(training, tmp_path) as replica:
        agent = Agent(replica, "tiny", "eu-west", "a1", engine=engine)
        await agent.step()
        assert len(engine.loaded) == 4, "served already, and nothing was wrong"


@pytest.mark.parametrize("harm", [edit, misspell, Path.unlink, lambda path: os.truncate(path, 10)])
async def test_what_was_repaired_after_a_restart_the_engine_is_told_again(
    training: Training, tmp_path: Path, read_dir: ReadDir, harm: Callable[[Path], None]
) -> None:
    """It goes on serving what it loaded while its agent was down."""
    await training.publish()
    engine = Loads(read_dir)
    for times in (1, 2):
        async with await opened(training, tmp_path) as replica:
            await Agent(replica, "tiny", "eu-west", "a1", engine=engine).step()
        assert engine.loaded == [training.tensors(1)] * times
        harm(weight_files(tmp_path)[1])


@pytest.mark.parametrize("copied", [True, False], ids=["checkpoint", "bucket"])
@pytest.mark.parametrize("harm", [Path.unlink, lambda path: os.truncate(path, 10)], ids=["removed", "cut"])
@pytest.mark.parametrize("files", [1, 4], ids=["all of it", "one of many"])
async def test_a_weight_file_lost_under_a_running_agent_is_restored_and_the_engine_told(
    training: Training,
    memory_dir: Path,
    tmp_path: Path,
    read_dir: ReadDir,
    harm: Callable[[Path], None],
    *,
    copied: bool,
    files: int,
) -> None:
    model = memory_dir / "model"
    await training.publish()
    replica = await Replica.open(
        run="tiny",
        model_dir=model,
        state_dir=tmp_path / "state" if copied else None,
        store=training.store,
        file_bytes=FILE_BYTES if files > 1 else 10**9,
    )
    async with replica:
        engine = Loads(read_dir)
        async with following(replica, engine) as agent:
            await until(lambda: agent.status.state == "serving")
            await until(lambda: not copied or bool(list((tmp_path / "state").glob("checkpoint-*/*"))))
            await replica.checkpoint()
            harm(sorted(model.glob("*.safetensors"))[-1])
            await until(lambda: len(engine.loaded) == 2 and agent.status.state == "serving")
        assert engine.loaded[-1] == training.tensors(1)
        found = replica.faults.found_by_kind["working"]
        assert found > 0
        repaired = {"checkpoint": found, "store": 0} if copied else {"checkpoint": 0, "store": found}
        assert replica.faults.repaired_by_route == {**repaired, "layout": 0}


@pytest.mark.parametrize("handle", HARMLESS)
async def test_a_file_that_was_only_handled_costs_one_look(
    training: Training, tmp_path: Path, handle: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    await training.publish()
    async with await opened(training, tmp_path) as replica:
        await replica.catch_up()
        fetched = replica.fetched_bytes
        handle(weight_files(tmp_path)[1])
        hashed = note_hashed(monkeypatch)
        assert not await replica.check()
        table = replica._holding.weights.table  # type: ignore[union-attr]
        held = replica._holding.held
        assert held is not None
        assert set(hashed) == checking.groups_in(held.groups, table, [weight_files(tmp_path)[1].name])
        assert len(hashed) < len(held.groups)
        hashed.clear()
        assert not await replica.check()
        assert enters(tmp_path) == 1
        assert hashed == [], "recorded anew, so nobody looks again"
        assert replica.faults.touched_files == 1
        assert replica.fetched_bytes == fetched
        training.step()
        await training.publish()
        assert await replica.catch_up() == training.position


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors.index.json"])
async def test_an_edited_index_or_asset_is_put_back(
    training: Training, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    await training.publish()
    async with await opened(training, tmp_path) as replica:
        await replica.catch_up()
        before = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(before[:-1] + b"!")
        with pytest.raises(NotWhole, match=f"{name} is absent or edited"):
            enters(tmp_path)
        await replica.check()
        assert enters(tmp_path) == 1
        assert (tmp_path / name).read_bytes() == before
        assert replica.faults.found_by_kind["asset"] == 1
    assert f"{name} absent or edited" in caplog.text


async def test_an_edit_while_a_version_is_fetched_is_not_taken_over(
    training: Training, tmp_path: Path, read_dir: ReadDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    await training.publish()
    async with await opened(training, tmp_path) as replica:
        await replica.catch_up()
        training.step(0.01)
        await training.publish()
        before_commit(replica, monkeypatch, lambda: edit(weight_files(tmp_path)[1]))
        assert await replica.catch_up() == training.position
        assert replica.faults.found_by_kind["working"] == 1
    assert read_dir(tmp_path) == training.tensors(2)


async def test_a_file_replaced_while_groups_are_refetched_is_not_taken_for_repaired(
    training: Training, tmp_path: Path, read_dir: ReadDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    await training.publish()
    async with await opened(training, tmp_path) as replica:
        await replica.catch_up()
        path = weight_files(tmp_path)[1]
        edit(path)
        read = MemoryStore.read_into

        async def meddled(self: MemoryStore, key: str, offset: int, buffer: memoryview) -> None:
            monkeypatch.undo()
            replace(path)
            edit(path)
            misspell(path)
            await read(self, key, offset, buffer)

        monkeypatch.setattr(MemoryStore, "read_into", meddled)
        with pytest.raises(DamagedFiles, match="replaced"):
            await replica.check()
        with pytest.raises(NotWhole):
            enters(tmp_path, verify=True)
        assert await replica.catch_up() == training.position
        assert enters(tmp_path, verify=True) == 1
    assert read_dir(tmp_path) == training.tensors(1)


class Slow(Loads):
    """An engine that has ``started`` to load and goes on once it may ``answer``."""

    def __init__(self, read_dir: ReadDir) -> None:
        super().__init__(read_dir)
        self.started, self.answer = asyncio.Event(), asyncio.Event()

    async def load(self, staged: Staged) -> None:
        self.started.set()
        await self.answer.wait()
        await super().load(staged)


@pytest.mark.parametrize("scrub_s", [0.0, 0.01])
async def test_an_engine_that_is_told_is_not_disturbed_while_it_loads(
    training: Training, tmp_path: Path, read_dir: ReadDir, scrub_s: float
) -> None:
    """An edit while it loads is repaired when it has answered, and then it is told again."""
    await training.publish()
    async with await opened(training, tmp_path) as replica:
        engine = Slow(read_dir)
        async with following(replica, engine, Pace(watch_s=0.02, scrub_s=scrub_s)):
            await asyncio.wait_for(engine.started.wait(), 20)
            edit(weight_files(tmp_path)[1])
            await asyncio.sleep(0.2)
            assert replica.position == training.position, "still shown: the engine is reading"
            engine.answer.set()
            await until(lambda: len(engine.loaded) == 2)
        assert engine.loaded == [engine.loaded[0], training.tensors(1)]
        assert engine.loaded[0] != training.tensors(1)


async def test_an_engine_that_loads_while_a_repair_is_made_for_another_one_is_told_again(
    training: Training, tmp_path: Path, read_dir: ReadDir
) -> None:
    await training.publish()
    async with await opened(training, tmp_path) as replica:
        engine = Slow(read_dir)
        async with following(replica, engine) as agent:
            await asyncio.wait_for(engine.started.wait(), 20)
            edit(weight_files(tmp_path)[1])
            assert await asyncio.to_thread(enters, tmp_path, timeout_s=20) == 1
            engine.answer.set()
            await until(lambda: len(engine.loaded) == 2)
            await until(lambda: agent.status.state == "serving")


@pytest.mark.parametrize(
    "harm",
    [
        lambda model: edit(weight_files(model)[1]),
        lambda model: (model / ".weightcast").rename(model.with_name("away")),
        lambda model: (model / ".weightcast" / "whole.json").unlink(),
    ],
    ids=["edited", "private directory removed", "mark removed"],
)
async def test_an_engine_that_is_told_and_enters_through_the_gate_gets_its_repair(
    training: Training, tmp_path: Path, read_dir: ReadDir, harm: Callable[[Path], object]
) -> None:
    class Gated(Loads):
        told = 0

        async def load(self, staged: Staged) -> None:
            self.told += 1
            if self.told == 1:
                await asyncio.to_thread(harm, staged.path)
            await asyncio.to_thread(enters, staged.path, timeout_s=20)
            await super().load(staged)

    await training.publish()
    async with await opened(training, tmp_path) as replica:
        engine = Gated(read_dir)
        async with following(replica, engine) as agent:
            await until(lambda: agent.status.state == "serving")
        # Perhaps once more: had it read without the gate, what it loaded first might have been damaged.
        assert engine.loaded in ([training.tensors(1)] * 2, [training.tensors(1)])
        assert engine.told == len(engine.loaded), "no engine waited in vain"

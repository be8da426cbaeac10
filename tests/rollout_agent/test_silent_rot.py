"""What rots leaves no trace but in the bytes: verifying and the scrub find it, and the cheapest route repairs it."""

# ruff: noqa: ASYNC110 - waiting for other tasks is what these tests do

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from rollout_agent.agent import Pace
from rollout_agent.disk import LocalDisk
from rollout_agent.errors import DamagedFiles, NotWhole
from rollout_agent.gate import Visitor
from rollout_agent.places import Places
from rollout_agent.state import Whole, load
from rollout_agent.verifying import verify_dir
from tests.rollout_agent.editing import Blind, Loads, ReadDir, following, misspell, opened, replace
from tests.rollout_agent.following import enters, until
from tests.rollout_agent.harming import edit, forge, weight_files
from tests.rollout_agent.training import Down, Training


def rot(disk: Blind, path: Path) -> None:
    """A weight changes, and no stamp tells."""
    disk.frozen = True
    edit(weight_files(path)[1])
    forge(path)


async def test_silent_rot_is_found_by_verifying_and_repaired_on_request(
    training: Training, tmp_path: Path, read_dir: ReadDir
) -> None:
    await training.publish()
    disk = Blind()
    async with await opened(training, tmp_path, disk=disk) as replica:
        await replica.catch_up()
        rot(disk, tmp_path)
        assert enters(tmp_path) == 1, "nothing tells"
        with pytest.raises(NotWhole, match="expected"):
            enters(tmp_path, verify=True)
        async with following(replica):
            assert await asyncio.to_thread(enters, tmp_path, timeout_s=30, verify=True) == 1
        assert read_dir(tmp_path) == training.tensors(1)
        assert replica.faults.repaired_by_route["store"] == 1


async def test_silent_rot_is_found_by_the_scrub(training: Training, tmp_path: Path, read_dir: ReadDir) -> None:
    await training.publish()
    disk = Blind()
    async with await opened(training, tmp_path, disk=disk) as replica:
        await replica.catch_up()
        rot(disk, tmp_path)
        engine = Loads(read_dir)
        async with following(replica, engine, Pace(watch_s=0.02, scrub_s=0.01)):
            await until(lambda: replica.faults.repaired_by_route["store"] == 1)
            await until(lambda: len(engine.loaded) == 2)
        assert replica.faults.scrubbed_bytes > 0
    assert read_dir(tmp_path) == training.tensors(1)


async def test_an_agent_that_finds_nothing_ends_the_waiting(training: Training, tmp_path: Path) -> None:
    """The engine's machine reads something else than the agent's: no repair will help."""
    await training.publish()

    class Rotten(LocalDisk):
        def read(self, path: Path, *, max_bytes: int) -> bytes | None:
            data = super().read(path, max_bytes=max_bytes)
            return data and (data[:-1] + b"!" if path.name == "config.json" else data)

    async with await opened(training, tmp_path) as replica:
        async with following(replica) as agent:
            await until(lambda: agent.status.state == "staged")
            visitor = Visitor(Rotten(), Places.of(tmp_path), verify=True)

            async def enter() -> None:
                while visitor.enter() is None:
                    await asyncio.sleep(0.01)

            with pytest.raises(DamagedFiles, match="check memory and disk"):
                await asyncio.wait_for(enter(), 30)
            visitor.stop_asking()
        assert replica.faults.found_by_kind["working"] == 0


async def test_versions_that_come_while_an_engine_waits_are_no_looks_at_what_it_found(
    training: Training, tmp_path: Path
) -> None:
    """A step stores what changes and leaves the rest, a damaged header too, as it is."""
    await training.publish()
    async with await opened(training, tmp_path) as replica:
        await replica.catch_up()
        misspell(weight_files(tmp_path)[1])
        visitor = Visitor(LocalDisk(), Places.of(tmp_path), verify=True)
        for _ in range(5):
            forge(tmp_path)
            replica._holding._mark = load(LocalDisk(), Places.of(tmp_path).whole, Whole)
            assert visitor.enter() is None
            training.step(0.01)
            await training.publish()
            await replica.catch_up()
        assert visitor.enter() is None
        assert await replica.check()
        entered = visitor.enter()
        assert entered is not None
        assert entered[1].position == training.position
        entered[0].release()
        visitor.stop_asking()


def test_the_scrub_is_spread_and_bounded() -> None:
    pace = Pace(scrub_s=1000, scrub_bytes_per_s=50e6)
    assert pace.scrub_pause_s(1, 100) == 10
    assert pace.scrub_pause_s(32 << 20, 10**12) == (32 << 20) / 50e6, "longer than asked rather than faster"
    assert pace.scrub_pause_s(0, 0) == pace.longest_retry_s


async def test_an_engine_that_gave_up_hears_whether_an_agent_runs(training: Training, tmp_path: Path) -> None:
    with pytest.raises(NotWhole, match=r"no whole version after .* s; is `weightcast rollout` running"):
        enters(tmp_path)
    await training.publish()
    async with await opened(training, tmp_path) as replica:
        with pytest.raises(NotWhole, match=r"no whole version after .* s; `weightcast rollout` runs"):
            enters(tmp_path)
        await replica.catch_up()
        edit(weight_files(tmp_path)[1])
        with pytest.raises(NotWhole, match=r"expected .* damage is not repaired after .* s; `weightcast rollout` runs"):
            enters(tmp_path)
    with pytest.raises(NotWhole, match=r"expected .* damage is not repaired after .* s; is `weightcast rollout` run"):
        enters(tmp_path)


def test_a_mark_is_a_time_that_has_been(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"weights")
    for _ in range(100):
        before = path.stat().st_ctime_ns
        stamp = LocalDisk().mark(path)
        assert stamp is not None
        assert before - 10**9 <= stamp.mtime_ns < before


@pytest.mark.parametrize("harm", [edit, replace, Path.unlink], ids=["edited", "replaced", "removed"])
async def test_a_checkpoint_and_its_logs_repair_without_the_bucket(
    training: Training, memory_dir: Path, tmp_path: Path, read_dir: ReadDir, harm: Callable[[Path], None]
) -> None:
    model, state = memory_dir / "model", tmp_path / "state"
    await training.publish()
    async with await opened(training, model, state_dir=state) as replica:
        await replica.catch_up()
        await replica.checkpoint()
        for _ in range(2):
            training.step(0.01)
            await training.publish()
            await replica.catch_up()
    async with await opened(training, model, state_dir=state, store=Down()) as replica:
        harm(weight_files(model)[1])
        await replica.check()
        assert replica.position == training.position
        assert 0 < replica.faults.found_by_kind["working"] == replica.faults.repaired_by_route["checkpoint"]
        assert enters(model) == 3
        assert replica.fetched_bytes == 0
    assert read_dir(model) == training.tensors(3)


async def test_what_another_launch_cut_otherwise_is_repaired_beside_what_is_right(
    training: Training, tmp_path: Path, read_dir: ReadDir
) -> None:
    """The groups of the older layout that a repair goes through hold bytes that were right, too."""
    for world in (2, 3, 2):
        training.step(0.02)
        await training.publish(world=world)
    async with await opened(training, tmp_path) as replica:
        await replica.catch_up()
        for path in weight_files(tmp_path):
            edit(path)
            assert await replica.check()
            assert replica.position == training.position
            assert read_dir(tmp_path) == training.tensors(3)
            assert verify_dir(tmp_path).good


async def test_a_file_that_is_gone_costs_that_file(training: Training, tmp_path: Path, read_dir: ReadDir) -> None:
    await training.publish()
    async with await opened(training, tmp_path) as replica:
        await replica.catch_up()
        fetched = replica.fetched_bytes
        weight_files(tmp_path)[-1].unlink()
        assert await replica.catch_up() == training.position
        assert replica.fetched_bytes - fetched < training.manifests[1].payload_bytes
    assert read_dir(tmp_path) == training.tensors(1)

"""A file that somebody touched, or that rotted, is found before an engine loads it, named, repaired and counted."""

# ruff: noqa: ASYNC110 - waiting for other tasks is what these tests do

from __future__ import annotations

import asyncio
import mmap
import os
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rollout_agent import checking
from rollout_agent.agent import Agent, Pace
from rollout_agent.disk import LocalDisk, Stamp
from rollout_agent.engine import Staged
from rollout_agent.errors import DamagedFiles, NotWhole
from rollout_agent.gate import Visitor
from rollout_agent.places import Places
from rollout_agent.replica import Replica
from rollout_agent.state import Whole, load, save
from rollout_agent.verifying import verify_dir
from tests.rollout_agent.following import before_commit, enters, followed, until
from tests.rollout_agent.harming import edit, forge, weight_files
from tests.rollout_agent.training import Training
from weight_store.errors import StoreUnavailable
from weight_store.memory import MemoryStore

ReadDir = Callable[[Path], dict[str, bytes]]
QUICK = Pace(poll_s=0.02, first_retry_s=0.02, longest_retry_s=0.05, watch_s=0.02)
FILE_BYTES = 1500
"""Several small files, so that hashing one of them differs from hashing all."""


class Blind(LocalDisk):
    """A disk that does not notice: every stamp is as it was when :attr:`frozen` was set."""

    def __init__(self) -> None:
        self.known: dict[Path, Stamp | None] = {}
        self.frozen = False

    def stat(self, path: Path) -> Stamp | None:
        if not self.frozen:
            self.known[path] = super().stat(path)
        return self.known.get(path)

    def mark(self, path: Path) -> Stamp | None:
        self.known[path] = super().mark(path)
        return self.known[path]


class Loads:
    """An engine that reads the directory without a gate whenever it is told to."""

    def __init__(self, read_dir: ReadDir) -> None:
        self.read_dir = read_dir
        self.loaded: list[dict[str, bytes]] = []

    async def load(self, staged: Staged) -> None:
        self.loaded.append(self.read_dir(staged.path))


class Down(MemoryStore):
    async def get(self, key: str, *, max_bytes: int):  # type: ignore[no-untyped-def]
        raise StoreUnavailable("down", key=key)


async def opened(training: Training, path: Path, **options: object) -> Replica:
    options.setdefault("store", training.store)
    return await Replica.open(run="tiny", model_dir=path, file_bytes=FILE_BYTES, **options)  # type: ignore[arg-type]


@asynccontextmanager
async def following(replica: Replica, engine: Loads | None = None, pace: Pace = QUICK) -> AsyncIterator[Agent]:
    async with followed(Agent(replica, "tiny", "eu-west", "a1", engine=engine, pace=pace)) as agent:
        yield agent


def edit_and_restore_mtime(path: Path) -> None:
    before = path.stat()
    edit(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def edit_through_a_map(path: Path) -> None:
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        data[len(data) - 3] ^= 0x10


def replace(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 0x10
    path.with_suffix(".new").write_bytes(data)
    path.with_suffix(".new").rename(path)


def rewrite_equal(path: Path) -> None:
    data = path.read_bytes()
    with path.open("r+b") as file:
        file.write(data)


def replace_by_equal(path: Path) -> None:
    shutil.copyfile(path, path.with_suffix(".new"))
    path.with_suffix(".new").rename(path)


def touch(path: Path) -> None:
    path.touch()


def change_mode(path: Path) -> None:
    path.chmod(0o600)


def link(path: Path) -> None:
    path.with_suffix(".backup").hardlink_to(path)


def misspell(path: Path) -> None:
    """A byte of the header."""
    with path.open("r+b") as file:
        data = file.read()
        file.seek(data.index(b"data_offsets") + 4)
        file.write(b"-")


EDITS = [edit, edit_and_restore_mtime, edit_through_a_map, replace]
HARMLESS = [rewrite_equal, replace_by_equal, touch, change_mode, link]


# ---- while an agent runs


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


def note_hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    hashed: list[int] = []
    damaged = checking.damaged

    def noting(weights: object, held: object, wanted: frozenset[int], pool: object):  # type: ignore[no-untyped-def]
        hashed.extend(wanted)
        return damaged(weights, held, wanted, pool)  # type: ignore[arg-type]

    monkeypatch.setattr(checking, "damaged", noting)
    return hashed


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


async def test_an_engine_that_is_told_is_not_disturbed_while_it_loads(
    training: Training, tmp_path: Path, read_dir: ReadDir
) -> None:
    """An edit while it loads is repaired when it has answered, and then it is told again."""
    started, answer = asyncio.Event(), asyncio.Event()

    class Slow(Loads):
        async def load(self, staged: Staged) -> None:
            started.set()
            await answer.wait()
            await super().load(staged)

    await training.publish()
    async with await opened(training, tmp_path) as replica:
        engine = Slow(read_dir)
        async with following(replica, engine):
            await asyncio.wait_for(started.wait(), 20)
            edit(weight_files(tmp_path)[1])
            await asyncio.sleep(0.2)
            assert replica.position == training.position, "still shown: the engine is reading"
            answer.set()
            await until(lambda: len(engine.loaded) == 2)
        assert engine.loaded == [engine.loaded[0], training.tensors(1)]
        assert engine.loaded[0] != training.tensors(1)


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


# ---- while no agent runs


@pytest.mark.parametrize("harm", EDITS)
async def test_without_an_agent_the_gate_finds_an_edit_itself_and_says_so(
    training: Training, tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: Callable[[Path], None]
) -> None:
    await training.publish()
    async with await opened(training, tmp_path) as replica:
        await replica.catch_up()
    harm(weight_files(tmp_path)[1])
    caplog.clear()
    with pytest.raises(NotWhole, match=r"group \d+ .* has digest .*, expected .*weightcast rollout"):
        enters(tmp_path)
    assert len(caplog.records) == 1, "said once, not at every look"
    assert "start it if it does not run" in caplog.text
    async with await opened(training, tmp_path) as replica:
        await replica.catch_up()
        assert replica.faults.found_by_kind["working"] == 1
    assert enters(tmp_path) == 1


async def test_without_an_agent_a_damaged_file_that_is_touched_again_and_again_is_waited_for(
    training: Training, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await training.publish()
    async with await opened(training, tmp_path) as replica:
        await replica.catch_up()
    damaged, *others = weight_files(tmp_path)
    edit(damaged)
    caplog.clear()
    visitor = Visitor(LocalDisk(), Places.of(tmp_path))
    try:
        for path in [damaged, *others, damaged, damaged]:
            assert visitor.enter() is None
            touch(path)
        assert len(caplog.records) == 1, "the same fault is said once"
        async with await opened(training, tmp_path) as replica:
            await replica.catch_up()
            entered = visitor.enter()
            assert entered is not None
            entered[0].release()
    finally:
        visitor.stop_asking()


@pytest.mark.parametrize("handle", HARMLESS)
async def test_without_an_agent_a_file_that_was_only_handled_is_let_in(
    training: Training, tmp_path: Path, handle: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    await training.publish()
    async with await opened(training, tmp_path) as replica:
        await replica.catch_up()
        held = replica._holding.held
    handle(weight_files(tmp_path)[1])
    hashed = note_hashed(monkeypatch)
    assert enters(tmp_path) == 1
    assert held is not None
    assert 0 < len(hashed) < len(held.groups)


async def test_a_copy_of_the_directory_is_checked_and_let_in(training: Training, tmp_path: Path) -> None:
    await training.publish()
    async with await opened(training, tmp_path / "a", state_dir=tmp_path / "state") as replica:
        await replica.catch_up()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert enters(tmp_path / "b") == 1
    assert verify_dir(tmp_path / "b").good
    edit(weight_files(tmp_path / "b")[0])
    with pytest.raises(NotWhole, match="expected"):
        enters(tmp_path / "b")
    assert not verify_dir(tmp_path / "b").good


@pytest.mark.parametrize("harm", [Path.unlink, lambda path: os.truncate(path, 10)], ids=["removed", "cut"])
async def test_a_file_that_is_not_there_or_cut_is_named(
    training: Training, tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    await training.publish()
    async with await opened(training, tmp_path) as replica:
        await replica.catch_up()
    path = weight_files(tmp_path)[1]
    harm(path)
    with pytest.raises(NotWhole, match=f"{path.name} is missing, cut"):
        enters(tmp_path)


@pytest.mark.parametrize("name", ["digests.json", "layouts"])
async def test_where_it_cannot_be_told_what_is_right_a_touched_file_is_not_loaded(
    training: Training, tmp_path: Path, name: str
) -> None:
    await training.publish()
    async with await opened(training, tmp_path) as replica:
        await replica.catch_up()
        path = tmp_path / ".weightcast" / name
        edit(next(path.iterdir()) if path.is_dir() else path)
        touch(weight_files(tmp_path)[0])
        with pytest.raises(NotWhole, match="do not say what version"):
            enters(tmp_path)
        # The agent knows, and says it anew to an engine that asks.
        async with following(replica):
            assert await asyncio.to_thread(enters, tmp_path, timeout_s=30) == 1


async def test_the_record_of_an_older_release_counts_for_nothing(training: Training, tmp_path: Path) -> None:
    await training.publish()
    async with await opened(training, tmp_path) as replica:
        await replica.catch_up()
    places = Places.of(tmp_path)
    whole = load(LocalDisk(), places.whole, Whole)
    assert whole is not None
    save(LocalDisk(), places.whole, whole.model_copy(update={"stamps": {}}))
    places.digests.unlink()
    with pytest.raises(NotWhole):
        enters(tmp_path)
    async with await opened(training, tmp_path) as replica:
        assert replica.position == training.position
        assert replica.fetched_bytes == 0
    assert enters(tmp_path) == 1


# ---- rot that no stamp tells of


async def test_silent_rot_is_found_by_verifying_and_repaired_on_request(
    training: Training, tmp_path: Path, read_dir: ReadDir
) -> None:
    await training.publish()
    disk = Blind()
    async with await opened(training, tmp_path, disk=disk) as replica:
        await replica.catch_up()
        disk.frozen = True
        edit(weight_files(tmp_path)[1])
        forge(tmp_path)
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
        disk.frozen = True
        edit(weight_files(tmp_path)[1])
        forge(tmp_path)
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


# ---- the cheapest route


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

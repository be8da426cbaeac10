"""What is wrong is named in a sentence, nothing is lost, and the next good chance is taken."""

# ruff: noqa: ASYNC240 - a test has its event loop to itself

from __future__ import annotations

import errno
import json
import logging
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from rollout_agent.disk import LocalDisk
from rollout_agent.errors import (
    AgentRunning,
    DamagedObject,
    DiskFailed,
    DiskFull,
    ForeignFiles,
    NotWhole,
    Rewind,
    WrongRun,
)
from rollout_agent.gate import shared
from rollout_agent.places import Places
from rollout_agent.replica import Replica
from rollout_agent.state import Owner, load
from tests.rollout_agent.training import OTHER_RUN_ID, Training
from weight_store.errors import DigestMismatch, FormatError, StoreError, StoreUnavailable
from weight_store.keys import layout_key, manifest_key
from weight_store.manifest import ReceiptRef
from weight_store.memory import MemoryStore
from weight_store.records import pack, sha256_hex

ReadDir = Callable[[Path], dict[str, bytes]]


async def opened(training: Training, path: Path, **options: object) -> Replica:
    name = str(options.pop("run", "tiny"))
    return await Replica.open(run=name, model_dir=path, store=training.store, **options)  # type: ignore[arg-type]


def shards(training: Training, version: int) -> list[str]:
    objects = training.store._objects  # type: ignore[attr-defined]
    return sorted(key for key in objects if f"{version:012d}" in key and key.endswith(".shard"))


def alter(training: Training, key: str, change: Callable[[bytearray], object]) -> bytes:
    objects = training.store._objects  # type: ignore[attr-defined]
    data, modified = objects[key]
    altered = bytearray(data)
    change(altered)
    objects[key] = (bytes(altered), modified)
    return bytes(data)


def put(training: Training, key: str, data: bytes) -> None:
    training.store._objects[key] = (data, 0.0)  # type: ignore[attr-defined]


async def test_a_directory_of_another_run_is_refused(training: Training, tmp_path: Path) -> None:
    await training.publish()
    async with await opened(training, tmp_path) as replica:
        await replica.catch_up()
    with pytest.raises(WrongRun, match="'tiny', not 'other'"):
        await opened(training, tmp_path, run="other")
    again = Training(MemoryStore(), run_id=OTHER_RUN_ID)
    await again.publish()
    async with await opened(again, tmp_path) as replica:
        with pytest.raises(WrongRun, match=OTHER_RUN_ID):
            await replica.catch_up()
        assert replica.position == training.position


async def test_directories_of_two_runs_of_one_name_are_refused_together(training: Training, tmp_path: Path) -> None:
    again = Training(MemoryStore(), run_id=OTHER_RUN_ID)
    for number, each in enumerate((training, again)):
        await each.publish()
        async with await opened(each, tmp_path / f"model{number}", state_dir=tmp_path / f"state{number}") as replica:
            await replica.catch_up()
    with pytest.raises(WrongRun, match="different runs named 'tiny'"):
        await opened(training, tmp_path / "model0", state_dir=tmp_path / "state1")


async def test_a_head_whose_run_id_was_altered_claims_no_directory(training: Training, tmp_path: Path) -> None:
    await training.publish()
    good = alter(training, "tiny/head.json", lambda d: d.__setitem__(d.index(b'"run_id":"') + 10, ord("f")))
    async with await opened(training, tmp_path) as replica:
        with pytest.raises(DamagedObject, match="one of them was altered"):
            await replica.catch_up()
        put(training, "tiny/head.json", good)
        assert await replica.catch_up() == training.position


async def test_a_directory_with_foreign_weights_is_refused(training: Training, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"mine")
    with pytest.raises(ForeignFiles, match=r"model\.safetensors"):
        await opened(training, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


async def test_a_directory_is_known_by_any_record_in_it_and_by_none_outside(training: Training, tmp_path: Path) -> None:
    await training.publish()
    for model, state in ((tmp_path / "a", None), (tmp_path / "b", tmp_path / "state")):
        async with await opened(training, model, state_dir=state) as replica:
            await replica.catch_up()
        for name in ("owner.json", "digests.json"):
            (model / ".weightcast" / name).write_bytes(b"rotten")
    async with await opened(training, tmp_path / "a") as replica:
        assert replica.position == training.position
    with pytest.raises(ForeignFiles):
        await opened(training, tmp_path / "b", state_dir=tmp_path / "state")


async def test_two_agents_on_one_directory(training: Training, tmp_path: Path) -> None:
    async with await opened(training, tmp_path):
        with pytest.raises(AgentRunning):
            await opened(training, tmp_path)


async def test_two_agents_on_one_directory_with_state_directories_of_their_own(
    training: Training, tmp_path: Path
) -> None:
    async with await opened(training, tmp_path / "model", state_dir=tmp_path / "one"):
        with pytest.raises(AgentRunning, match="keeps"):
            await opened(training, tmp_path / "model", state_dir=tmp_path / "two")
        with pytest.raises(AgentRunning, match="keeps"):
            await opened(training, tmp_path / "other", state_dir=tmp_path / "one")


async def test_a_directory_is_taken_over_with_another_state_directory(
    training: Training, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It says which one kept it and goes on, the directory whole all the while, though no store can be reached."""
    two = tmp_path / "two"
    await training.publish()
    async with await opened(training, tmp_path / "model", state_dir=tmp_path / "one") as replica:
        await replica.catch_up()
    async with await opened(training, tmp_path / "model", state_dir=two) as replica:
        assert replica.position == training.position
        assert not any(replica.faults.found_by_kind.values())
        await replica.checkpoint()
    (said,) = (record.message for record in caplog.records if record.levelno >= logging.WARNING)
    assert f"kept with --state-dir {tmp_path / 'one'} until now, and {two} leads to nothing" in said
    caplog.clear()
    async with await opened(training, tmp_path / "model", state_dir=two) as replica:
        assert replica.position == training.position
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_state_directory_whose_path_is_no_text(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is logged goes into a report, and from one test process to another no such text can be sent.
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)
    await training.publish()
    for _ in range(2):
        state_dir = tmp_path / os.fsdecode(b"no text: \xff")
        async with await opened(training, tmp_path / "model", state_dir=state_dir) as replica:
            assert await replica.catch_up() == training.position
    assert load(LocalDisk(), Places.of(tmp_path / "model", None).owner, Owner) is not None


async def test_one_that_could_not_start_lets_go_of_the_directory(training: Training, tmp_path: Path) -> None:
    class Failing(LocalDisk):
        def read(self, path: Path, *, max_bytes: int) -> bytes | None:
            if path.name == "whole.json":
                raise DiskFailed("not readable")
            return super().read(path, max_bytes=max_bytes)

    with pytest.raises(DiskFailed):
        await opened(training, tmp_path, disk=Failing())
    async with await opened(training, tmp_path):
        pass


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def replace(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-8] ^= 1
    path.with_suffix(".new").write_bytes(data)
    path.with_suffix(".new").rename(path)


@pytest.mark.parametrize("harm", [cut, replace, Path.unlink], ids=["cut", "replaced", "removed"])
@pytest.mark.parametrize("steps", [0, 1, 2])
async def test_a_working_file_that_is_no_longer_the_mapped_one_is_repaired(
    training: Training, tmp_path: Path, read_dir: ReadDir, steps: int, harm: Callable[[Path], object]
) -> None:
    await training.publish()
    async with await opened(training, tmp_path) as replica:
        await replica.catch_up()
        harm(next(tmp_path.glob("*.safetensors")))
        for _ in range(steps):
            training.step()
            await training.publish()
        assert await replica.catch_up() == training.position
        assert read_dir(tmp_path) == training.tensors(1 + steps)


async def test_a_head_that_goes_back_is_refused(training: Training, tmp_path: Path, read_dir: ReadDir) -> None:
    first = await training.publish()
    training.step()
    second = await training.publish()
    async with await opened(training, tmp_path) as replica:
        await replica.catch_up()
        await training.move_head(first)
        with pytest.raises(Rewind, match="never goes back"):
            await replica.catch_up()
        await training.move_head(second.model_copy(update={"sha256": "f" * 64}))
        with pytest.raises(Rewind):
            await replica.catch_up()
        await training.move_head(second)
        assert await replica.catch_up() == second
    assert read_dir(tmp_path) == training.tensors(2)


CHANGES: list[tuple[str, Callable[[bytearray], object]]] = [
    ("truncated", lambda data: data.__delitem__(slice(len(data) // 2, None))),
    ("bit flip", lambda data: data.__setitem__(len(data) // 2, data[len(data) // 2] ^ 0x10)),
    ("zeroed", lambda data: data.__setitem__(slice(8, None), bytes(len(data) - 8))),
]


@pytest.mark.parametrize("change", [c for _, c in CHANGES], ids=[n for n, _ in CHANGES])
@pytest.mark.parametrize("version", [1, 3])
async def test_an_altered_shard_is_refused_and_the_good_one_taken_later(
    training: Training, tmp_path: Path, read_dir: ReadDir, version: int, change: Callable[[bytearray], object]
) -> None:
    await training.publish()
    training.step()
    await training.publish()
    async with await opened(training, tmp_path) as replica:
        if version == 3:
            await replica.catch_up()
            training.step()
            await training.publish()
        key = shards(training, version)[0]
        good = alter(training, key, change)
        with pytest.raises((FormatError, DamagedObject, StoreError)) as caught:
            await replica.catch_up()
        assert key in str(caught.value)
        if version == 3:
            with shared(tmp_path, timeout_s=1) as whole:
                assert whole.position.version == 2
                assert read_dir(tmp_path) == training.tensors(2)
        else:
            assert replica.position is None
        put(training, key, good)
        assert await replica.catch_up() == training.position
    assert read_dir(tmp_path) == training.tensors(training.position.version)


@pytest.mark.parametrize("kind", ["manifest.json", "00000.json", "layouts"])
async def test_an_altered_record_is_refused(training: Training, tmp_path: Path, kind: str) -> None:
    await training.publish()
    objects = training.store._objects  # type: ignore[attr-defined]
    key = next(key for key in objects if kind in key)
    alter(training, key, lambda data: data.__setitem__(len(data) // 2, data[len(data) // 2] ^ 1))
    async with await opened(training, tmp_path) as replica:
        with pytest.raises((DigestMismatch, FormatError)):
            await replica.catch_up()


@pytest.mark.parametrize("ranks", [1, 3])
async def test_a_full_of_another_number_of_ranks_is_refused(training: Training, tmp_path: Path, ranks: int) -> None:
    """The manifest that lists an extra full is not the one that says how many ranks it has."""
    await training.publish()
    training.step(0.9)
    await training.publish()
    await training.extra_full(1)
    refs = training.fulls[1]
    training.step(0.9)
    await training.publish()
    manifest = training.manifests[3]
    first = ReceiptRef(sha256=refs[0].sha256, size=refs[0].size, shard_bytes=refs[0].shard_bytes)
    lying = manifest.model_copy(update={"full_version": 1, "full_bytes": 1, "extra_full": (first,) * ranks})
    data = lying.to_bytes()
    put(training, manifest_key("tiny", 3), data)
    await training.move_head(lying.position(data))
    async with await opened(training, tmp_path) as replica:
        with pytest.raises(FormatError, match=f"listed with {ranks} receipts, but the version has 2 ranks"):
            await replica.catch_up()


async def test_a_layout_whose_dtypes_lie_is_refused(training: Training, tmp_path: Path) -> None:
    await training.publish()
    async with await opened(training, tmp_path) as replica:
        head = await replica._source.head()
        manifest = await replica._source.manifest(head.position)
        layout = await replica._source.layout(manifest.layout)
        lying = layout.model_copy(update={"itemsizes": tuple(4 for _ in layout.itemsizes)})
        raw = lying.to_bytes()
        put(training, layout_key("tiny", sha256_hex(raw)), pack(raw))
        with pytest.raises((DamagedObject, FormatError)):
            await replica._source.layout(sha256_hex(raw))


async def test_hand_edits_are_found_at_the_start_and_only_those_groups_fetched(
    training: Training, tmp_path: Path, read_dir: ReadDir, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        await training.publish()
        training.step()
    async with await opened(training, tmp_path) as replica:
        await replica.catch_up()
    path = next(tmp_path.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x40
    path.write_bytes(data)
    config = tmp_path / "config.json"
    config.write_text("{}")
    async with await opened(training, tmp_path) as replica:
        assert len(replica.damage) == 1
        assert "expected" in caplog.text
        assert replica.position is None
        with pytest.raises(NotWhole), shared(tmp_path, timeout_s=0.05):
            pass
        assert await replica.catch_up() == training.position
        assert 0 < replica.fetched_bytes < training.manifests[1].payload_bytes
    assert read_dir(tmp_path) == training.tensors(3)
    assert json.loads(config.read_text()) == {"model_type": "tiny"}


async def test_a_base_altered_while_the_agent_runs_is_found_before_a_version_is_built_on_it(
    training: Training, tmp_path: Path, read_dir: ReadDir
) -> None:
    await training.publish()
    async with await opened(training, tmp_path) as replica:
        await replica.catch_up()
        path = next(tmp_path.glob("*.safetensors"))
        with path.open("r+b") as file:
            file.seek(-2, 2)
            file.write(b"\xff\xff")
        training.step(0.2)
        await training.publish()
        assert await replica.catch_up() == training.position
    assert read_dir(tmp_path) == training.tensors(2)


@pytest.mark.parametrize("victim", ["state.json", "owner.json", "model-00001-of-00001.safetensors", "layouts"])
@pytest.mark.parametrize("gone", [True, False])
async def test_lost_or_rotten_files_are_made_good(
    training: Training, tmp_path: Path, read_dir: ReadDir, victim: str, gone: bool
) -> None:
    await training.publish()
    async with await opened(training, tmp_path) as replica:
        await replica.catch_up()
        training.step()
        await training.publish()
        await replica.catch_up()
        await replica.checkpoint(force=True)
    path = next(path for path in tmp_path.rglob("*") if path.is_file() and victim in str(path))
    if gone:
        path.unlink()
    else:
        data = bytearray(path.read_bytes())
        data[len(data) // 3] ^= 4
        path.write_bytes(data)
    async with await opened(training, tmp_path) as replica:
        assert await replica.catch_up() == training.position
    assert read_dir(tmp_path) == training.tensors(2)


@pytest.mark.parametrize("when", ["first", "delta"])
async def test_a_full_disk_leaves_nothing_half_applied(
    training: Training, tmp_path: Path, read_dir: ReadDir, when: str
) -> None:
    await training.publish()
    async with await opened(training, tmp_path) as replica:
        if when == "delta":
            await replica.catch_up()
            training.step(0.05)
            await training.publish()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (400, hard))
        try:
            with pytest.raises(DiskFull, match="free space"):
                await replica.catch_up()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        if when == "delta":
            with shared(tmp_path, timeout_s=1) as whole:
                assert whole.position.version == 1
                assert read_dir(tmp_path) == training.tensors(1)
        assert await replica.catch_up() == training.position
    assert read_dir(tmp_path) == training.tensors(training.position.version)


class Failing(LocalDisk):
    """A disk whose next sync of a weight file fails once."""

    fails = False

    def map(self, path: Path, *, writable: bool):  # type: ignore[no-untyped-def]
        mapped = super().map(path, writable=writable)
        sync = mapped.sync

        def failing() -> None:
            if self.fails:
                self.fails = False
                raise DiskFailed(f"sync of {path}: {errno.EIO}")
            sync()

        mapped.sync = failing  # type: ignore[method-assign]
        return mapped


class FailingLog(LocalDisk):
    """A disk on which the next sync of a log fails, though everything written can be read back."""

    fails = True

    def append(self, path: Path):  # type: ignore[no-untyped-def]
        file = super().append(path)
        sync = file.sync

        def failing() -> None:
            if self.fails and path.suffix == ".log":
                self.fails = False
                raise DiskFailed(f"sync of {path}: {errno.EIO}")
            sync()

        file.sync = failing  # type: ignore[method-assign]
        return file


async def test_a_commit_that_could_not_be_synced_does_not_count(
    training: Training, tmp_path: Path, read_dir: ReadDir
) -> None:
    await training.publish()
    async with await opened(training, tmp_path, disk=FailingLog()) as replica:
        await replica.catch_up()
        training.step(0.01)
        await training.publish()
        with pytest.raises(DiskFailed):
            await replica.catch_up()
        assert read_dir(tmp_path) == training.tensors(1)
        assert not list(tmp_path.rglob("*.log"))
        assert await replica.catch_up() == training.position
    assert read_dir(tmp_path) == training.tensors(2)


async def test_after_a_failed_sync_the_files_are_written_anew(
    training: Training, tmp_path: Path, read_dir: ReadDir
) -> None:
    await training.publish()
    disk = Failing()
    async with await opened(training, tmp_path, disk=disk) as replica:
        await replica.catch_up()
        training.step()
        await training.publish()
        await replica.catch_up()
        before = next(tmp_path.glob("*.safetensors")).stat().st_ino
        fetched = replica.fetched_bytes
        disk.fails = True
        with pytest.raises(DiskFailed):
            await replica.checkpoint(force=True)
        assert replica.position == training.position
        await replica.catch_up()
        assert next(tmp_path.glob("*.safetensors")).stat().st_ino != before
        assert replica.fetched_bytes == fetched
    assert read_dir(tmp_path) == training.tensors(2)


async def test_a_store_that_is_down_costs_nothing_but_time(
    training: Training, tmp_path: Path, read_dir: ReadDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    await training.publish()
    async with await opened(training, tmp_path) as replica:
        await replica.catch_up()
        training.step()
        await training.publish()

        async def down(self: MemoryStore, key: str, *args: object, **kwargs: object) -> None:
            raise StoreUnavailable(f"{key}: down", key=key)

        for method in ("read_into", "get"):
            with monkeypatch.context() as patch:
                patch.setattr(MemoryStore, method, down)
                with pytest.raises(StoreUnavailable):
                    await replica.catch_up()
            assert replica.position == training.positions[1]
            assert read_dir(tmp_path) == training.tensors(1)
        assert await replica.catch_up() == training.position
    assert read_dir(tmp_path) == training.tensors(2)

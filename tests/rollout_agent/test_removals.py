"""What somebody removes or replaces under a running agent comes back by itself, or it says what is in the way."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rollout_agent.errors import AgentRunning, DamagedFiles, DiskFailed, NotWhole
from rollout_agent.filetable import FILE_BYTES
from rollout_agent.replica import Replica
from rollout_agent.verifying import verify_dir
from tests.rollout_agent.following import enters
from tests.rollout_agent.harming import edit
from tests.rollout_agent.training import Training

ReadDir = Callable[[Path], dict[str, bytes]]


async def opened(training: Training, path: Path, state: Path | None = None, *, file_bytes: int = FILE_BYTES) -> Replica:
    return await Replica.open(run="tiny", model_dir=path, state_dir=state, store=training.store, file_bytes=file_bytes)


@pytest.mark.parametrize("inside", [True, False], ids=["state inside", "state elsewhere"])
@pytest.mark.parametrize(
    "removed", [".weightcast", ".weightcast/hidden", ".weightcast/new", ".weightcast/agent.lock", "."]
)
async def test_what_is_removed_under_a_running_agent_is_made_again(
    training: Training, tmp_path: Path, read_dir: ReadDir, removed: str, *, inside: bool
) -> None:
    model, state = tmp_path / "model", None if inside else tmp_path / "state"
    await training.publish()
    async with await opened(training, model, state) as replica:
        await replica.catch_up()
        fetched = replica.fetched_bytes
        path = model / removed
        await asyncio.to_thread(path.unlink if path.is_file() else lambda: shutil.rmtree(path))
        await replica.check()
        assert await replica.catch_up() == training.position
        assert removed == "." or replica.fetched_bytes == fetched, "the weights were there all the time"
        assert enters(model) == 1
        assert verify_dir(model).good
        assert (model / ".weightcast" / "owner.json").is_file()
        with pytest.raises(AgentRunning):
            await opened(training, model, state)
        training.step(0.01)
        await training.publish()
        assert await replica.catch_up() == training.position
        await replica.checkpoint(force=True)
    assert read_dir(model) == training.tensors(2)
    async with await opened(training, model, state) as replica:
        assert replica.position == training.position
        assert replica.fetched_bytes == 0


async def test_what_is_removed_between_two_looks_does_not_stop_the_next_version(
    training: Training, tmp_path: Path, read_dir: ReadDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    await training.publish()
    async with await opened(training, tmp_path / "model", tmp_path / "state") as replica:
        await replica.catch_up()
        training.step(0.01)
        await training.publish()
        finish = replica._holding.finish_log

        def remove_before(*args: object) -> None:
            monkeypatch.undo()
            shutil.rmtree(tmp_path / "model" / ".weightcast")
            finish(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(replica._holding, "finish_log", remove_before)
        with pytest.raises(DiskFailed, match=r"gate\.turn"):
            await replica.catch_up()
        assert await replica.catch_up() == training.position
        assert enters(tmp_path / "model") == 2
    assert read_dir(tmp_path / "model") == training.tensors(2)


@pytest.mark.parametrize("removed", [".weightcast", ".weightcast/new", "one of the new files"])
@pytest.mark.parametrize("moment", ["sync_dir", "save"], ids=["before the commit", "after it"])
async def test_new_files_that_are_removed_before_they_are_in_place_are_not_taken_for_moved(
    training: Training, tmp_path: Path, read_dir: ReadDir, monkeypatch: pytest.MonkeyPatch, removed: str, moment: str
) -> None:
    """The old files have the same names and sizes."""
    model = tmp_path / "model"
    await training.publish()
    async with await opened(training, model, tmp_path / "state", file_bytes=1500) as replica:
        await replica.catch_up()
        training.step(0.9)
        await training.publish()

        def remove() -> None:
            monkeypatch.undo()
            if removed in (".weightcast", ".weightcast/new"):
                shutil.rmtree(model / removed)
            else:
                sorted((model / ".weightcast" / "new").iterdir())[1].unlink()

        holding = replica._holding
        if moment == "save":
            forget = holding._forget
            monkeypatch.setattr(holding, "_forget", lambda: (remove(), forget()))
        else:
            install = holding.install
            monkeypatch.setattr(holding, "install", lambda *args: (remove(), install(*args)))
        with pytest.raises(DiskFailed):
            await replica.catch_up()
        with contextlib.suppress(NotWhole):
            version = enters(model)
            assert read_dir(model) == training.tensors(version)
        assert await replica.catch_up() == training.position
        assert enters(model, verify=True) == 2
        assert read_dir(model) == training.tensors(2)


async def test_new_files_that_are_edited_before_they_are_in_place_are_not_put_there(
    training: Training, tmp_path: Path, read_dir: ReadDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    await training.publish()
    async with await opened(training, tmp_path) as replica:
        run = replica._updater._run

        async def edited(*args: object) -> None:
            monkeypatch.undo()
            await run(*args)  # type: ignore[arg-type]
            edit(next((tmp_path / ".weightcast" / "new").iterdir()))

        monkeypatch.setattr(replica._updater, "_run", edited)
        with pytest.raises(DamagedFiles, match="after it was written"):
            await replica.catch_up()
        with pytest.raises(NotWhole):
            enters(tmp_path)
        assert await replica.catch_up() == training.position
    assert read_dir(tmp_path) == training.tensors(1)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors.index.json"])
async def test_a_directory_in_the_place_of_a_file_is_named_and_its_removal_enough(
    training: Training, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    await training.publish()
    async with await opened(training, tmp_path / "model", tmp_path / "state") as replica:
        await replica.catch_up()
        caplog.clear()
        path = tmp_path / "model" / name
        path.unlink()
        path.mkdir()
        for look in (replica.check, replica.check, replica.catch_up):
            with pytest.raises(
                DiskFailed, match=f"{name} is a directory, where a file of that name belongs: remove it"
            ):
                await look()
            assert not list((tmp_path / "model").rglob("*.tmp"))
        assert "refetching" not in caplog.text
        with pytest.raises(NotWhole):
            enters(tmp_path / "model")
        path.rmdir()
        await replica.check()
        assert enters(tmp_path / "model") == 1
        assert replica.position == training.position


async def test_a_damaged_mark_is_said_once_and_written_anew(
    training: Training, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await training.publish()
    async with await opened(training, tmp_path) as replica:
        await replica.catch_up()
        edit(tmp_path / ".weightcast" / "whole.json")
        with pytest.raises(NotWhole):
            enters(tmp_path)
        assert caplog.text.count("whole.json is damaged") == 1, "an engine that waits says it once"
        caplog.clear()
        for look in (replica.check, replica.check, replica.catch_up):
            await look()
        assert caplog.text.count("whole.json is damaged") == 1
        assert replica.faults.found_by_kind["record"] == 1
        assert enters(tmp_path) == 1


@pytest.mark.parametrize("moment", ["keep_layout", "begin_log", "finish_log"])
async def test_records_that_are_removed_while_a_version_is_fetched_are_written_with_it(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The layout is in memory, but a reboot finds only what is on the disk."""
    await training.publish()
    async with await opened(training, tmp_path) as replica:
        await replica.catch_up()
        training.step(0.01)
        await training.publish()
        holding = replica._holding
        of = holding.records if moment == "keep_layout" else holding
        act = getattr(of, moment)

        def remove_before(*args: object) -> object:
            monkeypatch.undo()
            shutil.rmtree(tmp_path / ".weightcast")
            return act(*args)

        monkeypatch.setattr(of, moment, remove_before)
        for _ in range(3):
            with contextlib.suppress(DiskFailed):
                await replica.check()
                await replica.catch_up()
        assert replica.position == training.position
        await replica.checkpoint(force=True)
    for shown in ("whole.json", "digests.json"):  # a reboot may take what engines are shown
        (tmp_path / ".weightcast" / shown).unlink()
    shutil.rmtree(tmp_path / ".weightcast" / "layouts")
    async with await opened(training, tmp_path) as replica:
        assert replica.position == training.position

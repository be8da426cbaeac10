"""While no agent runs, what somebody touched is found by the gate; whoever waits there hears what becomes of it."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rollout_agent.disk import LocalDisk
from rollout_agent.errors import NotWhole
from rollout_agent.gate import Visitor
from rollout_agent.places import Places
from rollout_agent.state import Whole, load, save
from rollout_agent.verifying import verify_dir
from tests.rollout_agent.editing import EDITS, HARMLESS, following, note_hashed, opened, touch
from tests.rollout_agent.following import enters
from tests.rollout_agent.harming import edit, weight_files
from tests.rollout_agent.training import Down, Training


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


def edit_shown(directory: Path, name: str) -> None:
    """Edit what says what the files should be."""
    path = directory / ".weightcast" / name
    edit(next(path.iterdir()) if path.is_dir() else path)


@pytest.mark.parametrize("name", ["digests.json", "layouts"])
async def test_where_it_cannot_be_told_what_is_right_a_touched_file_is_not_loaded(
    training: Training, tmp_path: Path, name: str
) -> None:
    await training.publish()
    async with await opened(training, tmp_path) as replica:
        await replica.catch_up()
        edit_shown(tmp_path, name)
        touch(weight_files(tmp_path)[0])
        with pytest.raises(NotWhole, match="do not say what version"):
            enters(tmp_path)
        # The agent knows, and says it anew to an engine that asks.
        async with following(replica):
            assert await asyncio.to_thread(enters, tmp_path, timeout_s=30) == 1


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("name", ["digests.json", "layouts"])
async def test_what_says_what_is_right_is_written_anew_by_the_next_agent(
    training: Training, tmp_path: Path, name: str, hidden: bool
) -> None:
    await training.publish()
    async with await opened(training, tmp_path) as replica:
        await replica.catch_up()
    edit_shown(tmp_path, name)
    with pytest.raises(NotWhole, match="restart the agent"):
        verify_dir(tmp_path)
    if hidden:
        (tmp_path / ".weightcast" / "whole.json").unlink()
    training.store = Down()
    async with await opened(training, tmp_path):
        assert verify_dir(tmp_path).good


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

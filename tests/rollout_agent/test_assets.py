"""No asset of an earlier version lies beside weights that have none of that name, whatever else was lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout_agent.owning import Ownership
from rollout_agent.replica import Replica
from tests.rollout_agent.harming import edit
from tests.rollout_agent.training import Training


async def opened(training: Training, path: Path) -> Replica:
    return await Replica.open(run="tiny", model_dir=path, store=training.store)


async def at_a_version_with_a_tokenizer(training: Training, path: Path) -> None:
    await training.publish()
    async with await opened(training, path) as replica:
        await replica.catch_up()
    assert (path / "tokenizer.json").exists()


async def goes_on_without_it(training: Training, path: Path) -> None:
    training.assets = {"config.json": training.assets["config.json"]}
    training.step(0.9)
    await training.publish(full=lambda group: True)
    async with await opened(training, path) as replica:
        assert await replica.catch_up() == training.position


async def loses_every_record_but_the_owner(training: Training, path: Path) -> None:
    await at_a_version_with_a_tokenizer(training, path)
    private = path / ".weightcast"
    edit(private / "state" / "state.json")
    for name in ("digests.json", "whole.json"):
        (private / name).unlink()
    (path / "notes.txt").write_text("of somebody else")
    await goes_on_without_it(training, path)
    assert (path / "notes.txt").exists()


async def test_where_no_record_of_that_version_is_left(training: Training, tmp_path: Path) -> None:
    await loses_every_record_but_the_owner(training, tmp_path)
    assert not (tmp_path / "tokenizer.json").exists()


async def test_has_teeth(training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ownership, "note_assets", lambda self, names: None)
    await loses_every_record_but_the_owner(training, tmp_path)
    assert (tmp_path / "tokenizer.json").exists()


async def test_where_the_owner_s_record_is_lost_too_soon(training: Training, tmp_path: Path) -> None:
    """Also of releases that did not note it there: the next start does."""
    await at_a_version_with_a_tokenizer(training, tmp_path)
    (tmp_path / ".weightcast" / "owner.json").unlink()
    async with await opened(training, tmp_path):
        pass
    edit(tmp_path / ".weightcast" / "state" / "state.json")
    (tmp_path / ".weightcast" / "digests.json").unlink()
    await goes_on_without_it(training, tmp_path)
    assert not (tmp_path / "tokenizer.json").exists()

"""A watcher of checkpoints that is stopped and started at any point publishes each of them once."""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter
from pathlib import Path

import pytest

from trainer_agent.notes import Newest, Notes
from trainer_agent.watching import Found, scan
from weightcast.commands import trainer
from weightcast.commands.trainer import Stopping, Watch

RUN_ID = "00000000-0000-4000-8000-00000000000a"
WALKS, EVENTS = 30, 25


class Job:
    """A trainer that writes checkpoints, a watcher that dies anywhere, and the run's versions as they were sealed."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory = directory
        self.chance = random.Random(seed)
        self.step = 0
        self.stamps = itertools.count(1)
        self.versions: list[Found] = []
        self.undecided: Found | None = None
        self.watch: Watch | None = None
        self.by_hand: set[int] = set()
        """Steps that somebody published. Not written again: a watcher learns no more of those than the step."""

    async def newest(self, store_url: str, run: str, notes: Notes | None) -> Newest:
        """Stands for the bucket."""
        after = max(0, len(self.versions) - 1) if notes is None else notes.version
        return Newest(RUN_ID, len(self.versions), tuple(item.step for item in self.versions[after:][::-1]))

    def writes(self) -> None:
        """The next checkpoint; perhaps after it has resumed from an older one, or removed one."""
        if self.step and self.chance.random() < 0.2:
            self.step = self.chance.randrange(self.step)
        self.step += 1
        while self.step in self.by_hand:
            self.step += 1
        marker = self.directory / f"step_{self.step}" / "STABLE"
        marker.parent.mkdir(exist_ok=True)
        marker.touch()
        os.utime(marker, ns=(0, next(self.stamps)))

    def starts(self) -> Watch:
        """The watcher; what the one before left undecided is decided by the time that it has taken the run over."""
        # What is there before the first watcher, and has at most the head's step, counts as published.
        if self.chance.random() < 0.3 and trainer.notes_path(self.directory, "r").exists():
            self.decides()
            by_hand = [item for item in scan(self.directory, "STABLE") if item not in self.versions][:1]
            self.by_hand |= {item.step for item in by_hand}
            self.versions += by_hand
        self.watch = watch = Watch(self.directory, "STABLE", "r", "memory://", 0.0, Stopping())
        watch.look_back()
        self.decides()
        watch.look_back()
        return watch

    def decides(self) -> None:
        """Whoever takes the run over ends what was left undecided."""
        if self.undecided is not None and self.chance.random() < 0.5:
            self.versions.append(self.undecided)
        self.undecided = None

    def goes_on(self, *, dies: bool) -> bool:
        """One publication, in the middle of which the watcher may die. False if there is nothing to publish."""
        watch = self.watch or self.starts()
        found = min((item for item in scan(self.directory, "STABLE") if item not in watch.done), default=None)
        if found is None:
            return False
        ends = self.chance.choice(("before", "undecided", "sealed")) if dies else ""
        watch.begin(found)
        if ends == "undecided":
            self.undecided = found
        elif ends != "before":
            self.versions.append(found)
        if ends:
            self.watch = None
        else:
            watch.finish(found, len(self.versions))
        return True


@pytest.mark.parametrize("noted", [True, False])
def test_each_checkpoint_is_published_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noted: bool) -> None:
    """Without what watchers note it is not so: a head's step does not tell what a resumed trainer has written."""
    wrong: Counter[str] = Counter()
    monkeypatch.setattr(os, "fsync", lambda file: None)
    if not noted:
        monkeypatch.setattr(trainer, "read_notes", lambda path: None)
    for seed in range(WALKS):
        directory = tmp_path / str(seed)
        directory.mkdir()
        job = Job(directory, seed)
        monkeypatch.setattr(trainer, "_look_at_newest", job.newest)
        for _ in range(EVENTS):
            if job.chance.random() < 0.1:
                job.watch = None  # told to stop, with nothing to do
            elif job.chance.random() < 0.5:
                job.writes()
            else:
                job.goes_on(dies=job.chance.random() < 0.3)
        while job.goes_on(dies=False):
            pass
        times = Counter(job.versions)
        wrong["twice"] += max(times.values(), default=0) > 1
        wrong["left out"] += any(item not in times for item in scan(directory, "STABLE"))
    assert any(wrong.values()) != noted, wrong


def test_notes_of_another_run_or_that_cannot_be_read_count_for_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = {Found(1, "step_1", 5), Found(2, "step_2", 6), Found(3, "step_3", 7)}
    newest = Newest(RUN_ID, 9, (2,))
    other = Notes(run_id=RUN_ID.replace("a", "b"), version=4, done=((3, "step_3", 7),))
    assert {item.step for item in trainer.done_before(found, other, newest)} == {1, 2}
    assert trainer.done_before(found, other, None) == set()
    path = trainer.notes_path(tmp_path, "r")
    assert trainer.read_notes(path) is None
    assert not caplog.records, "the first watcher finds none, and nothing is wrong with that"
    assert trainer.read_notes(tmp_path) is None
    for content in (b"", b"{", b"[]", other.to_bytes()[:-1], other.to_bytes().replace(b'"step_3"', b'"\\ud800"')):
        path.write_bytes(content)
        assert trainer.read_notes(path) is None
    trainer.write_notes(path, other)
    assert trainer.read_notes(path) == other
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    trainer.write_notes(tmp_path / "nowhere" / "x.json", other)  # a directory that takes no files stops nothing


def test_a_power_cut_leaves_notes_that_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = trainer.notes_path(tmp_path, "r")
    before, after = (Notes(run_id=RUN_ID, version=version) for version in (1, 2))
    trainer.write_notes(path, before)
    synced: list[bytes] = []

    def noted(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").read_bytes())
        assert trainer.read_notes(path) == before, "they are replaced by what a power cut may still take away"

    monkeypatch.setattr(os, "fsync", noted)
    trainer.write_notes(path, after)
    assert synced == [after.to_bytes()]
    assert trainer.read_notes(path) == after

"""Mechanisms to switch off, one at a time: with any of them off the crash tests and the walks must find a violation."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest

from rollout_agent import installing, presence, rebuilding, syncing
from rollout_agent.disk import sync_file
from rollout_agent.guarding import Guarded
from rollout_agent.holding import Holding
from rollout_agent.owning import Ownership
from rollout_agent.places import log_version
from rollout_agent.replica import Replica
from rollout_agent.state import State, Told, load
from rollout_agent.statedir import StateDir
from rollout_agent.telling import Telling
from rollout_agent.updating import Updater
from tests.rollout_agent import simdisk
from tests.rollout_agent.simdisk import SimDisk


def no_log_sync(patch: pytest.MonkeyPatch) -> None:
    sync = simdisk.SimAppender.sync
    patch.setattr(simdisk.SimAppender, "sync", lambda self: self.path.suffix == ".log" or sync(self))


def no_weight_sync(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(simdisk.SimMap, "sync", lambda self: None)


def no_hiding(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(presence, "hide", lambda disk, places: None)


def no_gate(patch: pytest.MonkeyPatch) -> None:
    """The agent does not wait for engines that load."""
    patch.setattr(Guarded, "exclusive", lambda self, what="": nullcontext())


def no_leap(patch: pytest.MonkeyPatch) -> None:
    """A damaged object is waited for, also where a later full leads past it."""

    async def stays(self: Replica, head: object) -> bool:
        return False

    patch.setattr(Replica, "_may_leap", stays)


def no_look_at_patterns(patch: pytest.MonkeyPatch) -> None:
    """Files that were made for other patterns are built on."""
    trusted = Updater._trusted

    def whatever_they_are_of(self: Updater) -> object:
        if self._holding.files is not None:
            self._include = self._holding.files.include
        return trusted(self)

    patch.setattr(Updater, "_trusted", whatever_they_are_of)


def no_restoring(patch: pytest.MonkeyPatch) -> None:
    """What somebody removed under a running agent is not made again."""
    patch.setattr(Ownership, "restore", lambda self: False)


def any_run(patch: pytest.MonkeyPatch) -> None:
    """A directory is taken whosever it is."""

    def claim(self: Ownership, run_id: str) -> None:
        self.run_id = run_id

    patch.setattr(Ownership, "claim", claim)


def no_later_logs(patch: pytest.MonkeyPatch) -> None:
    drop = StateDir.drop_older

    def drop_all(self: StateDir, keep: State, later: object = ()) -> None:
        drop(self, keep)
        for log in self._disk.names(self._places.state):
            if log_version(log) is not None:
                self._disk.remove(self._places.state / log)

    patch.setattr(StateDir, "drop_older", drop_all)


def no_boot_id(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimDisk, "boot_id", lambda self: "always the same")


def no_removed_assets(patch: pytest.MonkeyPatch) -> None:
    """Nobody knows which there are."""
    patch.setattr(StateDir, "asset_names", lambda self: frozenset())
    patch.setattr(Ownership, "note_assets", lambda self, names: None)


def no_note_of_syncs(patch: pytest.MonkeyPatch) -> None:
    """An agent forgets, when it ends, that a sync failed."""
    patch.setattr(syncing, "is_in_doubt", lambda disk, note: False)


def logs_synced_again(patch: pytest.MonkeyPatch) -> None:
    """A log whose sync may have failed is synced by a start, not written anew."""

    def settle(self: StateDir, paths: Sequence[Path]) -> None:
        for path in paths:
            sync_file(self._disk, path)
        self._disk.sync_dir(self._places.state)

    patch.setattr(StateDir, "settle", settle)


def whatever_is_new(patch: pytest.MonkeyPatch) -> None:
    """A start moves into place what lies in ``new/``, of whatever version."""
    patch.setattr(
        Holding,
        "_finish_install",
        lambda self, pending, table: installing.finish(self.disk, self.places, table, self.exclusive),
    )


def only_what_is_wrong(patch: pytest.MonkeyPatch) -> None:
    """A repair through another layout does not rebuild what it stores over."""
    patch.setattr(rebuilding, "needed_groups", rebuilding._leading_to)
    patch.setattr("rollout_agent.updating.needed_groups", rebuilding._leading_to)


def no_telling_check(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Telling, "check", lambda self: None)


def no_telling_recall(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Telling, "recall", lambda self, run_id: None)


def told_in_any_boot(patch: pytest.MonkeyPatch) -> None:
    def recall(self: Telling, run_id: str | None) -> None:
        found = load(self._disk, self._places.told, Told)
        self.position = found and found.position

    patch.setattr(Telling, "recall", recall)


def told_half_written(patch: pytest.MonkeyPatch) -> None:
    put = presence.put

    def plainly(disk: SimDisk, path: Path, data: bytes) -> None:
        if path.name != "told.json":
            put(disk, path, data)
            return
        disk.remove(path)
        disk.append(path).write(data)

    patch.setattr(presence, "put", plainly)

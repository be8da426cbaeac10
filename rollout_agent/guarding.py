"""The weights at hand and whether they are right: hashed, hidden while they are not, mended, shown.

What was found right is recorded with the stamp of each file, so that whoever touches one is noticed without reading it.
Calls block and come from one thread at a time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping
from concurrent.futures import Executor, wait
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from rollout_agent import checking, gate, presence, syncing
from rollout_agent.disk import Disk, Stamp
from rollout_agent.errors import DamagedFiles
from rollout_agent.faults import Faults
from rollout_agent.filetable import FileTable
from rollout_agent.owning import Ownership
from rollout_agent.places import HIDDEN, Places
from rollout_agent.replaying import stores_of
from rollout_agent.state import State, Version, Whole, kept_names, table_of
from rollout_agent.statedir import Held, KeptLog, StateDir
from rollout_agent.telling import Telling
from rollout_agent.weights import Damage, Weights, misfits
from weight_store.layout import Layout
from weight_store.receipt import Asset

_LOG = logging.getLogger(__name__)


class Guarded:
    """One model directory and its state directory, and what they hold for the run named ``run``."""

    def __init__(self, disk: Disk, places: Places, pool: Executor, run: str) -> None:
        self.disk = disk
        self.places = places
        self.pool = pool
        self.run = run
        self.copies = disk.is_volatile(places.model) and not disk.is_volatile(places.state)
        """Whether what survives a reboot is a copy of the weights, not the weights themselves."""
        self.held: Held | None = None
        self.weights: Weights | None = None
        self.damage: tuple[Damage, ...] = ()
        self.unsettled = True
        """Set while a step that cannot be left half-way is under way: recovery comes before anything else."""
        self.unsaved = False
        """Set when what is held is not what the state directory leads to: a checkpoint is due."""
        self.suspect = False
        """Set when a sync failed: the files are written anew before anything else is built on them."""
        self.logs: list[KeptLog] = []
        self.files: State | None = None
        """The record of the files that the logs lead on from."""
        self.upsets = 0
        """How often weights were found wrong, or were lost, that engines may have loaded."""
        self.waits = ""
        """For whom a version or a repair waits that is ready to be stored, once that takes long."""
        self.telling = Telling(disk, places)
        self.faults = Faults()
        self.records = StateDir(disk, places, self.faults)
        self.cancelled = threading.Event()
        self._owner = Ownership(disk, places, run)
        self._mark: Whole | None = None
        """What was recorded last of the files that engines see."""

    @property
    def run_id(self) -> str | None:
        """The run's id, once known."""
        return self._owner.run_id

    def exclusive(self, what: str = "a repair") -> AbstractContextManager[None]:
        """Wait for engines to finish loading and keep them out; ``what`` is said to wait for them."""
        return gate.exclusive(self.disk, self.places, self.cancelled, partial(self._note_wait, what))

    def _note_wait(self, what: str, whom: str) -> None:
        self.waits = f"{what} waits for {whom}" if whom else ""
        if whom:
            _LOG.warning("%s", self.waits)

    @property
    def whole(self) -> bool:
        """Whether engines can see the version held."""
        mark = gate.holds(self.disk, self.places)
        return mark is not None and self.held is not None and mark.position == self.held.position

    @property
    def touched(self) -> frozenset[str]:
        """Files that somebody wrote to, replaced, cut, removed or perhaps only handled since they were known right."""
        return checking.touched(self.disk, self.places, self._stamps)

    @property
    def doubted(self) -> bool:
        """Whether an engine waits at the gate because it found the files wrong."""
        lock = self.disk.try_lock(self.places.gate_doubt, shared=False)
        if lock is not None:
            lock.release()
        return lock is None

    @property
    def _displaced(self) -> bool:
        """Whether somebody replaced, removed or cut a weight file: stores would go where no engine looks."""
        return self.weights is not None and not self.weights.in_place()

    @property
    def _stamps(self) -> Mapping[str, Stamp]:
        return self._mark.stamps if self._mark is not None else {}

    def verify(self, names: Collection[str] | None = None, *, afresh: bool = False) -> None:
        """Hash every kept group; hide the directory while one differs, show it otherwise. Heads are put right at once.

        ``names``: only the groups with bytes in these files. ``afresh``: record it anew even if nothing was touched.
        """
        held, weights = self._both()
        if weights.edited_heads(names):
            with self.exclusive():
                presence.hide(self.disk, self.places)
                self._write_heads(weights, names)
        stamps = self._stamps_before(names, afresh=afresh)
        wanted = checking.groups_in(held.groups, weights.table, names)
        known, self.damage = self.damage, checking.damaged(weights, held, wanted, self.pool)
        if self._displaced:
            # What was hashed is not what the stamps are of.
            raise DamagedFiles(f"a weight file of {self.places.model} was replaced or cut by something else")
        seen = {(item.group.index, item.found) for item in known}
        new = [item for item in self.damage if (item.group.index, item.found) not in seen]
        for item in new[:20]:
            _LOG.error("%s is damaged: %s", self.places.model, item)
        self.faults.found("working", len(new))
        missing = presence.missing_assets(self.disk, self.places, held.version.assets)
        for asset in missing:
            _LOG.error("%s, the copy of %s, is missing or damaged", self.places.asset(asset.sha256), asset.name)
        self.faults.found("asset", len(missing))
        if self.damage:
            self.unconfirm(again=not new)
        if self.damage or missing:
            self._distrust_saving()
            self._stay_hidden()
        else:
            self._settle(held, weights, stamps, afresh=afresh)
        self.unsettled = False

    def _check_unchanged(self, touched: Collection[str]) -> None:
        """Raise ``DamagedFiles`` if somebody changed weights since they were known to be right."""
        held, weights = self._both()
        self.faults.touched_files += len(touched)
        wanted = checking.groups_in(held.groups, weights.table, touched)
        found = checking.damaged(weights, held, wanted, self.pool)
        if found:
            raise DamagedFiles(f"{self.places.model} was edited while a version was fetched: {found[0]}")

    def _write_heads(self, weights: Weights, names: Collection[str] | None = None) -> None:
        """Write the heads of weight files (of those in ``names``) anew where they differ: no group covers them.

        Under :meth:`exclusive` and hidden.
        """
        edited = weights.edited_heads(names)
        if not edited:
            return
        for name in edited:
            _LOG.error("%s is damaged: its first bytes, which say where each tensor lies", self.places.model / name)
        self.faults.found("working", len(edited))
        self.unconfirm()
        self._distrust_saving()
        weights.write_heads(edited)
        self.faults.repaired("layout", len(edited))

    def unconfirm(self, *, again: bool = False) -> None:
        """Note that it is not known what the engine serves: it may have loaded weights that were wrong.

        Noted where weights are found wrong, before they are repaired, so that an agent which ends in between leaves
        the note. ``again``: this was found before.
        """
        self.disk.remove(self.places.serving)
        self.upsets += not again

    def _distrust_saving(self) -> None:
        """A checkpoint that is being made of damaged files must not count."""
        self.files = self._record().model_copy()

    def _settle(self, held: Held, weights: Weights, stamps: dict[str, Stamp], *, afresh: bool) -> None:
        """Let engines see what was found right."""
        edited = presence.misplaced(self.disk, self.places, held.version, weights.table.index)
        if not self.whole or edited:
            if self.whole:
                _LOG.error("%s: %s absent or edited", self.places.model, ", ".join(edited))
                self.faults.found("asset", len(edited))
            with self.exclusive():
                presence.hide(self.disk, self.places)
                self._show(stamps, afresh=afresh)
        elif stamps != self._stamps or afresh:
            self._say_whole(stamps, afresh=afresh)

    def _stamps_before(self, names: Collection[str] | None, *, afresh: bool) -> dict[str, Stamp]:
        """Stamps of all files, those in ``names`` (None: all) as they are now, before they are hashed.

        A file that is not as recorded is marked; one that is stays as it is, so that no engine takes it for touched.
        """
        held, weights = self._both()
        known = {} if afresh else self._stamps
        wanted = checking.loaded_files(held, weights.table) if names is None else names
        changed = {
            n for n, found in checking.stamps_of(self.disk, self.places, wanted).items() if found != known.get(n)
        }
        kept = {name: stamp for name, stamp in self._stamps.items() if name not in changed}
        return kept | presence.mark(self.disk, self.places, changed)

    def mend(self) -> None:
        """Repair damaged groups from the checkpoint's copy and the logs since, if there is one; then verify."""
        _, weights = self._both()
        state = self._record()
        source = self.places.state / state.checkpoint
        if not self.damage or not self.copies or not state.checkpoint:
            return
        if any(self.records.scan(log.path) is None for log in self.logs):
            _LOG.error("a log in %s is damaged: repairing from the bucket", self.places.state)
            self.faults.found("log")
            self.files = state.model_copy(update={"checkpoint": ""})
            return
        if not misfits(self.disk, source, weights.table):
            self.hide()
            before = len(self.damage)
            copy = Weights(self.disk, source, weights.table, writable=False)
            try:
                for item in self.damage:
                    weights.copy_group(copy, item.group)
            finally:
                copy.close()
            for log in self.logs:
                self._scatter(log.path, weights)
            self.verify()
            self.faults.repaired("checkpoint", before - len(self.damage))
        if self.damage:
            self._distrust_checkpoint()

    def _distrust_checkpoint(self) -> None:
        """The copy does not lead to what it should: another one is made once the weights are right."""
        _LOG.error("%s is damaged: the groups above are wrong in it too", self.places.state / self._record().checkpoint)
        self.faults.found("checkpoint", len(self.damage))
        self.files = self._record().model_copy(update={"checkpoint": ""})

    def hide(self) -> None:
        """Keep engines away until :meth:`verify` has found nothing wrong, while groups are changed in place."""
        self.unsettled = True
        with self.exclusive():
            presence.hide(self.disk, self.places)

    def sync_weights(self) -> None:
        """Make repaired files durable, and their names. If that fails they are suspect."""
        _, weights = self._both()
        try:
            with syncing.noted(self.disk, self.places.syncing):
                weights.sync()
                self.disk.sync_dir(self.places.model)
        finally:
            self._doubt_files()

    def _doubt_files(self) -> None:
        self.suspect |= not self.copies and syncing.is_in_doubt(self.disk, self.places.syncing)

    def _drop_assets(self, version: Version, names: Collection[str] = ()) -> None:
        """Remove assets that only other versions have (also those in ``names``), and note which there will be now."""
        presence.remove_assets(self.disk, self.places, self._owner.assets.union(names), version)
        self._owner.note_assets(asset.name for asset in version.assets)

    def _show(self, stamps: Mapping[str, Stamp], before: tuple[Asset, ...] = (), *, afresh: bool = False) -> None:
        """Let engines see the version held, under :meth:`exclusive`. ``stamps``: of files that are known to be right.

        Assets in place ``before`` are known no better than before: they keep the stamps that they had.
        """
        held, weights = self._both()
        placed = presence.place(self.disk, self.places, held.version, weights.table.index, before=before)
        self._say_whole({**self._stamps, **stamps, **placed}, afresh=afresh)

    def _say_whole(self, stamps: Mapping[str, Stamp], *, afresh: bool = False) -> None:
        held, weights = self._both()
        version = held.version
        whole = Whole(
            run=self.run,
            run_id=str(self.run_id),
            position=version.position,
            step=version.step,
            boot_id=self.disk.boot_id(),
            stamps={name: stamps[name] for name in checking.loaded_files(held, weights.table) if name in stamps},
        )
        presence.record(self.disk, self.places, whole, self._as_shown(held), held.layout, afresh=afresh)
        self._mark = whole

    def _as_shown(self, held: Held) -> State:
        """The record of what each group should be, for whoever checks the files."""
        digests = b"".join(held.digests).hex()
        return self._record().model_copy(update={"version": held.version, "digests": digests, "checkpoint": ""})

    def _stay_hidden(self) -> None:
        if any(
            self.disk.size(path) is not None
            for path in (self.places.whole, *(self.places.model / name for name in HIDDEN))
        ):
            with self.exclusive():
                presence.hide(self.disk, self.places)

    def _scatter(self, path: Path, weights: Weights) -> None:
        with stores_of(self.disk, self.records, path, weights) as stores:
            jobs = [self.pool.submit(store) for store in stores]
            wait(jobs)
        for job in jobs:
            job.result()

    def _table(self, state: State, layout: Layout) -> FileTable:
        return table_of(layout, kept_names(state, layout), state.file_bytes)

    def _let_go(self) -> None:
        if self.weights is not None:
            self.weights.close()
        self.weights = self.held = self.files = None

    def _record(self) -> State:
        if self.files is None:
            raise DamagedFiles(f"{self.places.state} has no record of what {self.places.model} holds")
        return self.files

    def _both(self) -> tuple[Held, Weights]:
        if self.held is None or self.weights is None:
            raise DamagedFiles(f"{self.places.model} holds no version")
        return self.held, self.weights

"""The weights at hand: one model directory, always at a whole version, at the next one, or known to be at none.

Owns every local effect and its order; knows nothing of the network. Calls block and come from one thread at a time.

========================================  =====================================================================
found at start                            done
========================================  =====================================================================
a log without a valid commit              dropped: the old version
committed logs, weights in any mixture    all logs since the checkpoint replayed in order, then verified
files complete but not in place           put in place
weights gone with a reboot                copied from the checkpoint, then as above
a digest still wrong                      named in :attr:`Holding.damage`; hidden from engines until repaired
========================================  =====================================================================
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from concurrent.futures import Executor, wait
from contextlib import AbstractContextManager
from pathlib import Path

from rollout_agent import gate, installing, presence
from rollout_agent.changelog import LogHead, LogWriter
from rollout_agent.disk import Disk, Lock
from rollout_agent.errors import AgentRunning, DamagedFiles, DiskError, DiskFailed, ForeignFiles, WrongRun
from rollout_agent.filetable import FileTable
from rollout_agent.places import HIDDEN, Places
from rollout_agent.replaying import stores_of
from rollout_agent.saving import Saving
from rollout_agent.state import Owner, State, Version, kept_names, load, save, table_of
from rollout_agent.statedir import Held, KeptLog, StateDir, held_after, held_by
from rollout_agent.weights import Damage, Weights, find_damage, misfits
from weight_store.layout import Layout
from weight_store.receipt import Asset

_LOG = logging.getLogger(__name__)


class Holding:
    """One model directory and its state directory, kept by this process alone, for the run named ``run``."""

    def __init__(self, disk: Disk, places: Places, pool: Executor, run: str) -> None:
        self.disk = disk
        self.places = places
        self.pool = pool
        self.run = run
        self.run_id: str | None = None
        self.copies = disk.is_volatile(places.model) and not disk.is_volatile(places.state)
        """Whether what survives a reboot is a copy of the weights, not the weights themselves."""
        self.held: Held | None = None
        self.weights: Weights | None = None
        self.damage: tuple[Damage, ...] = ()
        self.suspect = False
        """Set when a sync failed: the files are written anew before anything else is built on them."""
        self.unsettled = True
        """Set while a step that cannot be left half-way is under way: :meth:`recover` comes before anything else."""
        self.logs: list[KeptLog] = []
        self.files: State | None = None
        """The record of the files that the logs lead on from."""
        self.records = StateDir(disk, places)
        self.cancelled = threading.Event()
        self._owned = False
        self._locks: list[Lock] = []

    # ---- opening

    def open(self) -> None:
        """Take the directory. Raises ``AgentRunning``, ``WrongRun`` or ``ForeignFiles``, having changed nothing."""
        known: list[tuple[Path, Owner | State]] = []
        owner = load(self.disk, self.places.owner, Owner)
        if owner is not None:
            known.append((self.places.owner, owner))
        for path in (self.places.pending, self.places.checkpoint):
            state = load(self.disk, path, State)
            if state is not None:
                known.append((path, state))
        for path, record in known:
            if record.run != self.run:
                raise WrongRun(
                    f"{path.parent} belongs to run {record.run!r}, not {self.run!r}; give each run its own directory"
                )
        ids = {record.run_id for _, record in known}
        if len(ids) > 1:
            raise WrongRun(
                f"{self.places.model} and {self.places.state} belong to different runs named {self.run!r}; "
                "remove the state directory of the older one"
            )
        ours = owner is not None or (len(known) > 0 and self.places.state.is_relative_to(self.places.model))
        if not ours:
            self._refuse_foreign()
        for directory in (self.places.hidden, self.places.new, self.places.state):
            self.disk.make_dir(directory)
        for path in (self.places.layout("x"), self.places.asset("x")):
            self.disk.make_dir(path.parent)
        for path in self.places.agent_locks:
            lock = self.disk.try_lock(path, shared=False)
            if lock is None:
                raise AgentRunning(
                    f"another agent keeps {self.places.model} or {self.places.state} (it locks {path}); "
                    "stop it first or use other directories"
                )
            self._locks.append(lock)
        self.run_id = next(iter(ids), None)
        if self.run_id is not None:
            self.claim(self.run_id)

    def claim(self, run_id: str) -> None:
        """Make the directory belong to this run for good; ``WrongRun`` if it belongs to another of the same name."""
        if self.run_id is not None and self.run_id != run_id:
            raise WrongRun(
                f"{self.places.model} holds run {self.run!r} with id {self.run_id}, the bucket now has {run_id} "
                "under that name; use an empty directory for the new one"
            )
        if not self._owned:
            save(self.disk, self.places.owner, Owner(run=self.run, run_id=run_id))
            self._owned = True
        self.run_id = run_id

    def _refuse_foreign(self) -> None:
        names = self.disk.names(self.places.model)
        found = [name for name in names if name in HIDDEN or name.endswith((".safetensors", ".bin", ".pt"))]
        if found:
            raise ForeignFiles(
                f"{self.places.model} holds {found[0]}, which no agent wrote; choose an empty directory for --model-dir"
            )

    def close(self) -> None:
        """Release everything. Calling it twice is allowed."""
        self.cancelled.set()
        self._forget()
        while self._locks:
            self._locks.pop().release()

    def exclusive(self) -> AbstractContextManager[None]:
        """Wait for engines to finish loading and keep them out."""
        return gate.exclusive(self.disk, self.places, self.cancelled)

    # ---- recovery

    def recover(self) -> None:
        """Bring the directory to the newest version that was decided here, by the table above."""
        self._recover()
        self.unsettled = False

    @property
    def displaced(self) -> bool:
        """Whether somebody replaced, removed or cut a weight file: stores would go where no engine looks."""
        return self.weights is not None and not self.weights.in_place()

    def _recover(self) -> None:
        self._forget()
        state = self._newest_files()
        layout = self.records.layout(state.version.layout) if state else None
        if state is None or layout is None:
            self._stay_hidden()
            return
        self.files = state
        table = self._table(state, layout)
        held, logs = self.records.replayable(state, layout)
        self._restore(state, table)
        if misfits(self.disk, self.places.model, table):
            self._stay_hidden()
            return
        self.held, self.logs = held, logs
        self.weights = Weights(self.disk, self.places.model, table)
        if not self.whole:
            self.records.settle([log.path for log in logs])
            with self.exclusive():
                presence.hide(self.disk, self.places)
                for log in logs:
                    self._scatter(log.path, self.weights)
        self.verify()

    def verify(self) -> None:
        """Hash every kept group; hide the directory while one differs, show it otherwise."""
        held, weights = self._both()
        self.damage = find_damage(weights, held.groups, held.digests, self.pool)
        for item in self.damage[:20]:
            _LOG.error("%s is damaged: %s", self.places.model, item)
        if self.damage or presence.missing_assets(self.disk, self.places, held.version.assets):
            self._stay_hidden()
        elif not self.whole or presence.misplaced(self.disk, self.places, held.version, weights.table.index):
            with self.exclusive():
                presence.hide(self.disk, self.places)
                self._show()
        self.unsettled = False

    def hide(self) -> None:
        """Keep engines away until :meth:`verify` has found nothing wrong, while groups are changed in place."""
        self.unsettled = True
        with self.exclusive():
            presence.hide(self.disk, self.places)

    def _show(self, before: tuple[Asset, ...] = ()) -> None:
        """Let engines see the version held, under :meth:`exclusive`; see :func:`presence.show`."""
        held, weights = self._both()
        index, run_id = weights.table.index, str(self.run_id)
        presence.show(self.disk, self.places, held.version, index, run=self.run, run_id=run_id, before=before)

    @property
    def log_bytes(self) -> int:
        """Size of the logs since the checkpoint."""
        return sum(log.nbytes for log in self.logs)

    @property
    def whole(self) -> bool:
        """Whether engines can see the version held."""
        mark = gate.holds(self.disk, self.places)
        return mark is not None and self.held is not None and mark.position == self.held.position

    def _newest_files(self) -> State | None:
        """The record of the newest complete files, put in place if they were not."""
        pending = load(self.disk, self.places.pending, State)
        layout = self.records.layout(pending.version.layout) if pending else None
        if pending is not None:
            self.disk.sync_dir(self.places.state)
            if layout is not None and self._finish_install(self._table(pending, layout)):
                return pending
            # A reboot took them before they were copied.
            self.disk.remove(self.places.pending)
            self.disk.sync_dir(self.places.state)
        return load(self.disk, self.places.checkpoint, State)

    def _restore(self, state: State, table: FileTable) -> None:
        """Copy the checkpoint into a model directory that lost its files; the logs are replayed over it."""
        source = self.places.state / state.checkpoint
        if not state.checkpoint or not misfits(self.disk, self.places.model, table):
            return
        if not misfits(self.disk, source, table):
            _LOG.info("restoring the weights of version %d from %s", state.version.position.version, source)
            with self.exclusive():
                installing.copy_in(self.disk, self.places, source, table)

    def _stay_hidden(self) -> None:
        if any(
            self.disk.size(path) is not None
            for path in (self.places.whole, *(self.places.model / name for name in HIDDEN))
        ):
            with self.exclusive():
                presence.hide(self.disk, self.places)

    def _forget(self) -> None:
        if self.weights is not None:
            self.weights.close()
        self.weights = self.held = self.files = None
        self.damage, self.logs = (), []

    # ---- one step by a log

    def begin_log(self, to: Version) -> LogWriter:
        """Start the log of the step from the version held to ``to``; its layout and assets must be kept already."""
        held, _ = self._both()
        head = LogHead(run_id=str(self.run_id), base=held.position, to=to)
        return LogWriter(self.disk, self.places.log(to.position.version), head)

    def finish_log(self, writer: LogWriter, to: Version, layout: Layout, table: Mapping[int, bytes]) -> None:
        """Commit a complete log, then carry it out: from the commit on the version is ``to``, crash or not.

        ``table``: digest of each kept group. After an error :attr:`unsettled` is set.
        """
        held, weights = self._both()
        after = held_after(self._record(), to, layout, table)
        if after is None:
            raise DamagedFiles(f"the log to version {to.position.version} lacks a group that is kept")
        self.unsettled = True
        try:
            writer.commit()
        except DiskError:
            # Readable now is not durable: a commit that could not be synced is taken back, not trusted.
            writer.discard()
            raise
        path = self.places.log(to.position.version)
        with self.exclusive():
            presence.hide(self.disk, self.places)
            if self.displaced:
                raise DamagedFiles(f"a weight file of {self.places.model} was replaced or cut by something else")
            self._scatter(path, weights)
            presence.remove_assets(self.disk, self.places, held.version, to)
            self.held = after
            self._show(held.version.assets)
        self.logs.append(KeptLog(path, writer.nbytes, to))
        self.unsettled = False

    def _scatter(self, path: Path, weights: Weights) -> None:
        with stores_of(self.disk, self.records, path, weights) as stores:
            jobs = [self.pool.submit(store) for store in stores]
            wait(jobs)
        for job in jobs:
            job.result()

    # ---- new files

    def install(self, state: State, layout: Layout) -> None:
        """Commit the synced files in ``new/`` and put them in place of the ones held.

        After an error :attr:`unsettled` is set.
        """
        before = self.held
        self.unsettled = True
        self.disk.sync_dir(self.places.new)
        save(self.disk, self.places.pending, state)
        self._forget()
        table = self._table(state, layout)
        if not self._finish_install(table):
            raise DiskFailed(f"the new files in {self.places.new} vanished while they were put in place")
        self.files, self.held = state, held_by(state, layout)
        self.weights = Weights(self.disk, self.places.model, table)
        with self.exclusive():
            presence.hide(self.disk, self.places)
            if before is not None:
                presence.remove_assets(self.disk, self.places, before.version, state.version)
            self._show()
        self.suspect = False
        if not self.copies:
            self.disk.rename(self.places.pending, self.places.checkpoint)
            self.disk.sync_dir(self.places.state)
            self.records.drop_older(state)
        self.unsettled = False

    def _finish_install(self, table: FileTable) -> bool:
        """Move what is still in ``new/`` into place; False, and nothing is moved, unless every file is there."""
        if not installing.all_there(self.disk, self.places, table):
            return False
        if installing.unfinished(self.disk, self.places, table):
            with self.exclusive():
                installing.move_in(self.disk, self.places, table)
        # Also when there was nothing left to move: whoever moved it may have ended before this.
        self.disk.sync_dir(self.places.model)
        self.disk.sync_dir(self.places.new)
        return True

    # ---- checkpoint

    def begin_checkpoint(self) -> Saving | None:
        """Start to make the version held the one that survives without logs; None if it does or is not to be trusted.

        Between this and :meth:`end_checkpoint` versions may be applied.
        """
        held, weights = self._both()
        unsaved = self.logs or self.disk.size(self.places.pending) is not None
        if not unsaved or self.damage or self.suspect or self.unsettled or not self.whole:
            return None
        return Saving(
            self.disk,
            self.places,
            self.records,
            held=held,
            files=self._record(),
            logs=self.logs,
            weights=weights,
            copies=self.copies,
        )

    def end_checkpoint(self, saving: Saving) -> bool:
        """Record a checkpoint whose steps are all done, then remove the logs before it; False if it came too late."""
        if self.files is not saving.files or self.unsettled:
            saving.drop()
            return False
        save(self.disk, self.places.checkpoint, saving.state)
        self.files = saving.state
        self.logs = self.logs[len(saving.logs) :]
        self.records.drop_older(saving.state, self.logs)
        return True

    def fail_checkpoint(self, saving: Saving) -> None:
        """Note that a step failed. Checkpoint and logs are as they were; files that failed to sync are suspect."""
        saving.drop()
        if self.files is saving.files:
            if self.copies:
                self.files = saving.files.model_copy(update={"checkpoint": ""})  # make another copy next time
            else:
                self.suspect = True

    def _table(self, state: State, layout: Layout) -> FileTable:
        return table_of(layout, kept_names(state, layout), state.file_bytes)

    def _record(self) -> State:
        if self.files is None:
            raise DamagedFiles(f"{self.places.state} has no record of what {self.places.model} holds")
        return self.files

    def _both(self) -> tuple[Held, Weights]:
        if self.held is None or self.weights is None:
            raise DamagedFiles(f"{self.places.model} holds no version")
        return self.held, self.weights

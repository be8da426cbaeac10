"""The weights at hand: one model directory, always at a whole version, at the next one, or known to be at none.

Owns every local effect and its order; knows nothing of the network. Calls block and come from one thread at a time.

========================================  =====================================================================
found at start                            done
========================================  =====================================================================
a log without a valid commit              dropped: the old version
committed logs, weights in any mixture    all logs since the checkpoint replayed in order, then verified
a log rotten that was replayed before     the version in place verified and kept; a checkpoint is due
no readable record of the state           what was shown to engines last, verified; a checkpoint is due
files complete but not in place           put in place
files in place that may not have been     in the same boot: written anew with the next look at the head, no checkpoint
synced                                    before that
weights gone with a reboot                copied from the checkpoint, then as above; that is older than what was shown
                                          if this came as new files and their copy was not made yet
some weight files gone or cut             those copied from the checkpoint, else made anew group by group
assets that only versions before it had   removed
the head of a weight file edited          written anew: the layout says what it is
a digest still wrong                      named in :attr:`Holding.damage`; hidden from engines until repaired
========================================  =====================================================================
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Executor
from pathlib import Path

from rollout_agent import checking, gate, installing, presence
from rollout_agent.changelog import LogHead, LogWriter
from rollout_agent.checking import Content
from rollout_agent.disk import Disk
from rollout_agent.errors import DamagedFiles, DiskError, DiskFailed
from rollout_agent.filetable import FileTable
from rollout_agent.guarding import Guarded
from rollout_agent.places import Places
from rollout_agent.saving import Saving
from rollout_agent.state import State, Version, Whole, load, save
from rollout_agent.statedir import Held, KeptLog, held_after, held_by
from rollout_agent.weights import Weights, lost, misfits
from weight_store.layout import Layout

_LOG = logging.getLogger(__name__)


class Holding(Guarded):
    """One model directory and its state directory, kept by this process alone, for the run named ``run``."""

    def __init__(self, disk: Disk, places: Places, pool: Executor, run: str) -> None:
        super().__init__(disk, places, pool, run)
        self._gone = 0
        """Groups that were lost with all of their files, until those are there again."""

    # ---- opening

    def open(self) -> None:
        """Take the directory; see :meth:`Ownership.take`."""
        self._owner.take()
        self.telling.recall(self.run_id)
        self._doubt_files()

    def claim(self, run_id: str) -> None:
        """Make the directory belong to this run; see :meth:`Ownership.claim`."""
        self._owner.claim(run_id)

    def close(self) -> None:
        """Release everything, whatever can be read of the disk by now. Calling it twice is allowed."""
        self._let_go()
        self.telling.leave()
        self._owner.release()

    # ---- recovery

    def recover(self) -> None:
        """Bring the directory to the newest version that was decided here, by the table above."""
        self._rehome()
        self._recover()
        self.unsettled = False

    def _rehome(self) -> bool:
        """Make again what somebody removed of the private directory; whether that was enough to look at everything."""
        if not self._owner.restore():
            return False
        _LOG.error("%s: somebody removed locks of this agent; checking everything", self.places.private)
        self.unsettled = True
        if self.held is not None and self.files is not None:
            # Where the state directory went too, this is all that says what the files should be.
            presence.record_digests(self.disk, self.places, self._as_shown(self.held), self.held.layout)
        return True

    def check(self, *, everything: bool = False, asked: bool = False) -> None:
        """Hash what was touched since it was known to be right (or everything): see :meth:`verify`.

        ``asked``: everything also if nothing was touched, but an engine at the gate found the files wrong.
        """
        if self._rehome():
            self.recover()
            return
        if self.held is None or self.weights is None or self.damage:
            return
        if not everything and not self.whole:
            if load(self.disk, self.places.whole, Whole) is None:
                self.faults.lost("record", self.disk, self.places.whole)
            return  # it is hidden, and verified before it is shown
        names = None if everything else self.touched
        if names is not None and not names:
            if not asked or not self.doubted:
                return
            names = None
        if names:
            _LOG.warning("%s: somebody touched %s; checking", self.places.model, ", ".join(sorted(names)[:5]))
            self.faults.touched_files += len(names)
        if self._displaced:
            if lost(self.disk, self.places.model, self.weights.table):
                self.recover()
                return
            self.weights.close()
            self.weights = Weights(self.disk, self.places.model, self.weights.table)
        self.verify(names, afresh=names is None)

    def _recover(self) -> None:
        shown = self._mark is not None
        self._forget()
        for path, kind in ((self.places.whole, Whole), (self.places.digests, State)):
            if load(self.disk, path, kind) is None:
                self.faults.lost("record", self.disk, path)
        found = self._newest()
        if found is None:
            self._stay_hidden()
            return
        state, layout, held = found
        table = self._table(state, layout)
        gone = checking.groups_in(held.groups, table, lost(self.disk, self.places.model, table))
        if gone:
            self.unconfirm()
        # After a reboot nothing else can be expected of files in memory.
        gone = gone if shown or self._mark is not None else frozenset()
        restored = self._restore(state, table)
        wrong = lost(self.disk, self.places.model, table)
        if len(wrong) == len(table.files):
            self._gone = len(gone)
            self.faults.found("working", self._gone)
            self._forget()
            self._stay_hidden()
            return
        if wrong:
            _LOG.error("%s is missing or cut: it is made anew", self.places.model / wrong[0])
            with self.exclusive():
                installing.make_blank(self.disk, self.places, table, wrong)
        self.weights = Weights(self.disk, self.places.model, table)
        if not self.whole:
            self.records.settle([log.path for log in self.logs])
            with self.exclusive():
                presence.hide(self.disk, self.places)
                for log in self.logs:
                    self._scatter(log.path, self.weights)
                self._drop_assets(held.version, self.records.asset_names())
        self._owner.note_assets(self._owner.assets.union(asset.name for asset in held.version.assets))
        self.verify(afresh=not checking.is_recorded(self.disk, self.places))
        if restored:
            good = len(gone - {item.group.index for item in self.damage})
            self.faults.found("working", good)
            self.faults.repaired("checkpoint", good)
            if self.damage:
                self._distrust_checkpoint()

    def _newest(self) -> tuple[State, Layout, Held] | None:
        """The files to go on from, their layout, and what is held after their logs, which is noted too.

        That is what the state directory leads to. But if engines were shown a later version (a log that was carried
        out is rotten now), or the state directory says nothing, it is that: digests tell how much of it is there.
        """
        state, layout = self._newest_files()
        if state is not None and layout is not None:
            self.held, self.logs = self.records.replayable(state, layout)
        shown = self._shown_later()
        if shown is not None:
            state, layout, self.held, self.logs, self.unsaved = shown.state, shown.held.layout, shown.held, [], True
        self.files = state
        if state is None or layout is None or self.held is None:
            return None
        return state, layout, self.held

    def _shown_later(self) -> Content | None:
        held = self.held
        state = load(self.disk, self.places.digests, State)
        if state is None or state.run_id != self.run_id:
            return None
        if held is not None and state.version.position.version <= held.position.version:
            return None
        self._owner.say_behind(held.position if held is not None else None, state.version.position)
        if self._owner.other_state:
            presence.adopt_assets(self.disk, self.places, state.version.assets)
        return checking.recorded(self.disk, self.places)

    def scrub(self, number: int) -> int:
        """Hash the ``number``-th group (modulo their count) and hide the directory if it differs; its bytes."""
        if self.held is None or self.weights is None or not self.whole or not self.held.groups or self._displaced:
            return 0
        group = self.held.groups[number % len(self.held.groups)]
        found = checking.damaged(self.weights, self.held, (group.index,), self.pool)
        self.faults.scrubbed_bytes += group.nbytes
        if found or self.weights.edited_heads(self.weights.files_of(group)):
            _LOG.error("the scrub found damage in %s", self.places.model)
            self.verify()
        return group.nbytes

    @property
    def log_bytes(self) -> int:
        """Size of the logs since the checkpoint."""
        return sum(log.nbytes for log in self.logs)

    def _newest_files(self) -> tuple[State | None, Layout | None]:
        """The record of the newest complete files, put in place if they were not, and their layout."""
        pending = self._load(self.places.pending)
        layout = self.records.layout(pending.version.layout) if pending else None
        # Also where it has become the checkpoint: whoever renamed it may have ended before that was durable, and with
        # a power loss it would come back, and take for its own what lies in new/ by then.
        self.disk.sync_dir(self.places.state)
        if pending is not None:
            if layout is not None and self._finish_install(pending, self._table(pending, layout)):
                if not self.copies:
                    with self.exclusive():
                        self._drop_assets(pending.version, self.records.asset_names())
                    self._supersede()
                return pending, layout
            # A reboot took them before they were copied.
            self.disk.remove(self.places.pending)
            self.disk.sync_dir(self.places.state)
        state = self._load(self.places.checkpoint)
        layout = self.records.layout(state.version.layout) if state else None
        return state, layout

    def _load(self, path: Path) -> State | None:
        state = load(self.disk, path, State)
        if state is None:
            self.faults.lost("record", self.disk, path)
        return state

    def _restore(self, state: State, table: FileTable) -> bool:
        """Copy files that are lost from the checkpoint, if it has them; the logs are replayed over them."""
        source = self.places.state / state.checkpoint
        wrong = lost(self.disk, self.places.model, table)
        if not state.checkpoint or not wrong or misfits(self.disk, source, table):
            return False
        _LOG.info("restoring %d files of version %d from %s", len(wrong), state.version.position.version, source)
        with self.exclusive():
            installing.copy_in(self.disk, self.places, source, table, wrong)
        return True

    def _forget(self) -> None:
        self._let_go()
        self.damage, self.logs, self.unsaved = (), [], False
        self._mark = gate.holds(self.disk, self.places)

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
        with self.exclusive(f"version {to.position.version}"):
            touched = self.touched
            presence.hide(self.disk, self.places)
            if self._displaced:
                raise DamagedFiles(f"a weight file of {self.places.model} was replaced or cut by something else")
            self._scatter(path, weights)
            self._write_heads(weights, touched)
            self._drop_assets(to)
            self.held = after
            stamps = presence.mark(self.disk, self.places, [file.name for file in weights.table.files])
            if touched:
                self._check_unchanged(touched)
            self._show(stamps, held.version.assets)
        self.logs.append(KeptLog(path, writer.nbytes, to))
        self.unsettled = False

    # ---- new files

    def install(self, state: State, layout: Layout) -> None:
        """Commit the synced files in ``new/`` and put them in place of the ones held.

        After an error :attr:`unsettled` is set.
        """
        table = self._table(state, layout)
        self.unsettled = True
        self.disk.sync_dir(self.places.new)
        if not installing.all_new(self.disk, self.places, table):
            raise DiskFailed(f"the new files in {self.places.new} vanished before they were put in place")
        save(self.disk, self.places.pending, state)
        self._forget()
        with self.exclusive(f"version {state.version.position.version}"):
            # Each of them: in its place lies a file of the same name, perhaps of the same size, and of another version.
            installing.move_in(self.disk, self.places, table, [file.name for file in table.files])
        installing.sync_moved(self.disk, self.places)
        self.files, self.held = state, held_by(state, layout)
        self.unsaved = False
        self.weights = Weights(self.disk, self.places.model, table)
        with self.exclusive():
            presence.hide(self.disk, self.places)
            self._write_heads(self.weights)
            self._drop_assets(state.version, self.records.asset_names())
            self._show(presence.mark(self.disk, self.places, [file.name for file in table.files]))
        self.suspect = False
        self.disk.remove(self.places.syncing)
        self.faults.repaired("store", self._gone)
        self._gone = 0
        if not self.copies:
            self._supersede()
            self.records.drop_older(state)
        self.unsettled = False

    def _finish_install(self, pending: State, table: FileTable) -> bool:
        """Move what is still in ``new/`` into place; False, and nothing is moved, unless every file is there."""
        # Not the mark, which goes whenever the directory is hidden; a reboot that takes the files takes this as well.
        shown = load(self.disk, self.places.digests, State, quiet=True)
        installed = (
            shown is not None
            and shown.run_id == pending.run_id
            and shown.version.position.version >= pending.version.position.version
        )
        if self.copies and installed and not lost(self.disk, self.places.model, table):
            # Until the copy is made the record stays; what is in new/ by now is the beginning of a later version.
            return True
        return installing.finish(self.disk, self.places, table, self.exclusive)

    def _supersede(self) -> None:
        """Make installed files, which survive a reboot, the checkpoint: before the next ones are begun in ``new/``."""
        self.disk.rename(self.places.pending, self.places.checkpoint)
        self.disk.sync_dir(self.places.state)

    # ---- checkpoint

    def begin_checkpoint(self) -> Saving | None:
        """Start to make the version held the one that survives without logs; None if it does or is not to be trusted.

        Between this and :meth:`end_checkpoint` versions may be applied.
        """
        held, weights = self._both()
        unsaved = self.unsaved or self.logs or self.disk.size(self.places.pending) is not None
        unsaved = unsaved or (self.copies and not self._record().checkpoint)  # it has none that leads to what is held
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
        self.records.keep_layout(saving.state.version.layout, saving.layout)
        save(self.disk, self.places.checkpoint, saving.state)
        self.files, self.unsaved = saving.state, False
        self.logs = self.logs[len(saving.logs) :]
        self.records.drop_older(saving.state, self.logs)
        return True

    def fail_checkpoint(self, saving: Saving) -> bool:
        """Note that a step failed; checkpoint and logs stay. False if it was too late anyway: its files may be gone."""
        saving.drop()
        in_time = self.files is saving.files
        if self.copies and in_time:
            self.files = saving.files.model_copy(update={"checkpoint": ""})  # make another copy next time
        self._doubt_files()
        return in_time

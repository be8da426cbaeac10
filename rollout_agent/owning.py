"""Whose a model directory is: one run's for good, one agent's at a time."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable
from pathlib import Path

from rollout_agent.disk import Disk, Lock
from rollout_agent.errors import AgentRunning, ForeignFiles, WrongRun
from rollout_agent.places import HIDDEN, Places
from rollout_agent.state import Owner, State, load, save
from weight_store.position import Position

_LOG = logging.getLogger(__name__)

_TRIES = 3
_PAUSE_S = 0.05


class Ownership:
    """The claim of the run named ``run`` to one model directory and its state directory."""

    def __init__(self, disk: Disk, places: Places, run: str) -> None:
        self.run = run
        self.run_id: str | None = None
        self.assets: frozenset[str] = frozenset()
        """Names of the files in the model directory that are or may be assets of a version."""
        self.other_state = ""
        """The state directory that the model directory was kept with before, where that is another one."""
        self._disk = disk
        self._places = places
        self._owned = False
        self._locks: dict[Path, Lock] = {}

    def take(self) -> None:
        """Take the directory. Raises ``AgentRunning``, ``WrongRun`` or ``ForeignFiles``, having changed nothing."""
        places = self._places
        known: list[tuple[Path, Owner | State]] = []
        owner = load(self._disk, places.owner, Owner)
        if owner is not None:
            known.append((places.owner, owner))
            self.assets = frozenset(owner.assets)
            self.other_state = owner.state if owner.state != self._state_dir else ""
        for path in (places.pending, places.checkpoint, places.digests):
            state = load(self._disk, path, State)
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
                f"{places.model} and {places.state} belong to different runs named {self.run!r}; "
                "remove the state directory of the older one"
            )
        inside = (places.digests, *((places.checkpoint, places.pending) if self._state_is_inside else ()))
        if owner is None and not any(path in inside for path, _ in known):
            self._refuse_foreign()
        self._make_dirs()
        self._lock()
        self.run_id = next(iter(ids), None)
        if self.run_id is not None:
            self.claim(self.run_id)

    @property
    def _state_is_inside(self) -> bool:
        return self._places.state.is_relative_to(self._places.model)

    @property
    def _state_dir(self) -> str:
        # A path need not be text, and a record is nothing else.
        return os.fsencode(self._places.state).decode(errors="replace")

    def restore(self) -> bool:
        """Make and take again what somebody removed under the running agent; whether a lock was among it.

        Raises ``AgentRunning`` if another agent was quicker.
        """
        self._make_dirs()
        displaced = [path for path, lock in self._locks.items() if not lock.in_place()]
        for path in displaced:
            self._locks.pop(path).release()
        if displaced:
            self._lock()
            self._owned = False
            if self.run_id is not None:
                self.claim(self.run_id)
        return bool(displaced)

    def _make_dirs(self) -> None:
        places = self._places
        for directory in (places.hidden, places.new, places.state, places.layouts, places.assets):
            self._disk.make_dir(directory)

    def _lock(self) -> None:
        for path in self._places.agent_locks:
            if path in self._locks:
                continue
            lock = self._try_lock(path)
            if lock is None:
                raise AgentRunning(
                    f"another agent keeps {self._places.model} or {self._places.state} (it locks {path}); "
                    "stop it first or use other directories"
                )
            self._locks[path] = lock
        # An engine that may only read the directory cannot make this file, but lock it.
        doubt = self._disk.try_lock(self._places.gate_doubt, shared=True)
        if doubt is not None:
            doubt.release()

    def _try_lock(self, path: Path) -> Lock | None:
        # An engine that gives up at the gate looks, within microseconds, whether there is an agent.
        pause = threading.Event()
        for _ in range(_TRIES):
            lock = self._disk.try_lock(path, shared=False)
            if lock is not None:
                return lock
            pause.wait(_PAUSE_S)
        return None

    def claim(self, run_id: str) -> None:
        """Make the directory belong to this run for good; ``WrongRun`` if it belongs to another of the same name."""
        if self.run_id is not None and self.run_id != run_id:
            raise WrongRun(
                f"{self._places.model} holds run {self.run!r} with id {self.run_id}, the bucket now has {run_id} "
                "under that name; use an empty directory for the new one"
            )
        if not self._owned:
            self._save(run_id, self.assets)
            self._owned = True
        self.run_id = run_id

    def note_assets(self, names: Iterable[str]) -> None:
        """Note which files are assets; durable when this returns: before one of another name is placed."""
        assets = frozenset(names)
        if assets != self.assets:
            self._save(str(self.run_id), assets)
            self.assets = assets

    def _save(self, run_id: str, assets: frozenset[str]) -> None:
        owner = Owner(run=self.run, run_id=run_id, assets=tuple(sorted(assets)), state=self._state_dir)
        save(self._disk, self._places.owner, owner)

    def say_behind(self, found: Position | None, shown: Position) -> None:
        """Say that the state directory leads to ``found``, and engines were shown the later version ``shown``."""
        leads = f"{self._places.state} leads to {f'version {found}' if found is not None else 'nothing'}"
        if self.other_state:
            _LOG.warning(
                "%s was kept with --state-dir %s until now, and %s: going on from version %s as it lies there, checked "
                "first; if that is not meant, stop this and start it with the former directory",
                *(self._places.model, self.other_state, leads, shown),
            )
        else:
            _LOG.error("%s, but version %s was shown to engines: checking that", leads, shown)

    def _refuse_foreign(self) -> None:
        names = self._disk.names(self._places.model)
        found = [name for name in names if name in HIDDEN or name.endswith((".safetensors", ".bin", ".pt"))]
        if found:
            raise ForeignFiles(
                f"{self._places.model} holds {found[0]}, which no agent wrote; "
                "choose an empty directory for --model-dir"
            )

    def release(self) -> None:
        """Let go of the directory. Calling it twice is allowed."""
        while self._locks:
            self._locks.popitem()[1].release()

"""The gate between engines that load a model directory and the agent that changes it.

An engine loads inside :func:`shared`: it waits until the directory is whole, then holds a shared lock. The agent
changes weights only under the exclusive lock, with ``whole.json``, the index and ``config.json`` out of the way, so
that a directory which an agent left in between (killed, power lost) is never taken for whole, lock or no lock.

Files that somebody touched since they were found right are hashed before the engine gets in: by the engine itself,
under its lock, so that it needs no agent for that. If they are wrong it stays out and asks the agent to look.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from rollout_agent import checking
from rollout_agent.disk import Disk, LocalDisk, Lock, Stamp
from rollout_agent.errors import DamagedFiles, DiskError, NotWhole
from rollout_agent.places import Places
from rollout_agent.state import Whole, load

_LOG = logging.getLogger(__name__)

_POLL_S = 0.02
_PATIENCE_S = 5.0
"""How long an agent waits for engines, and an engine for a whole version, before it says so."""
_MAX_REFUSALS = 3
"""How often files may be found wrong, each time in another record of a version: the agent writes one when it looked."""


@contextmanager
def shared(model_dir: str | Path, *, timeout_s: float | None = None, verify: bool = False) -> Iterator[Whole]:
    """Hold the directory still: inside the block it is exactly the version that the yielded record names.

    Waits for an agent to bring it there, ``timeout_s`` seconds at most (None: for ever), then ``NotWhole``. Files that
    were touched are hashed first; ``verify``: all are, which also finds what rotted by itself. ``DamagedFiles`` if they
    are wrong still after the agent has found them right: that is this machine's memory or disk.
    """
    with held(model_dir, timeout_s=timeout_s, verify=verify) as (whole, _):
        yield whole


@contextmanager
def held(
    model_dir: str | Path, *, timeout_s: float | None = None, verify: bool = False
) -> Iterator[tuple[Whole, Lock]]:
    """The same with the lock, whose descriptor a process that loads may inherit: it then outlives this one."""
    visitor = Visitor(LocalDisk(), Places.of(Path(model_dir)), verify=verify)
    try:
        lock, whole = _in_time(visitor.enter, visitor, timeout_s)
    finally:
        visitor.stop_asking()
    try:
        yield whole, lock
    finally:
        lock.release()


@contextmanager
def still(model_dir: Path, *, timeout_s: float) -> Iterator[Whole]:
    """The same for who wants to look at the files, right or wrong."""
    visitor = Visitor(LocalDisk(), Places.of(model_dir))
    lock, whole = _in_time(visitor.enter_unchecked, visitor, timeout_s)
    try:
        yield whole
    finally:
        lock.release()


Entered = tuple[Lock, Whole]


def _in_time(attempt: Callable[[], Entered | None], visitor: Visitor, timeout_s: float | None) -> Entered:
    said, start_s = False, time.monotonic()
    while (entered := attempt()) is None:
        waited_s = time.monotonic() - start_s
        if timeout_s is not None and waited_s > timeout_s:
            raise NotWhole(visitor.why_not(timeout_s))
        if not said and waited_s >= _PATIENCE_S:
            said = True
            # Of files that are wrong it was said when they were found so.
            if not visitor.fault:
                model = visitor.places.model
                _LOG.warning(
                    "%s holds no whole version; waiting for `weightcast rollout`: start it if none runs", model
                )
        time.sleep(_POLL_S)
    return entered


class Visitor:
    """One engine that wants to load; it remembers what it found, so that nothing is hashed twice."""

    def __init__(self, disk: Disk, places: Places, *, verify: bool = False) -> None:
        self.places = places
        self._disk = disk
        self._verify = verify
        self._refused: tuple[Whole, dict[str, Stamp | None]] | None = None
        self._refusals = 0
        self._said_unreadable = False
        self._doubt: Lock | None = None
        self.fault = ""
        """Why it did not get in, if the files are wrong."""

    def enter(self) -> Entered | None:
        """Try once: the lock and what the directory holds, if that is right. Raises ``DamagedFiles``."""
        entered = self.enter_unchecked()
        if entered is None:
            return None
        lock, whole = entered
        good = False
        try:
            good = self._is_right(whole)
        finally:
            if not good:
                lock.release()
        return entered if good else None

    def enter_unchecked(self) -> Entered | None:
        """Try once to take the shared lock on a whole directory, right or wrong."""
        disk, places = self._disk, self.places
        if not disk.names(places.private):
            return None
        turn = disk.try_lock(places.gate_turn, shared=True)
        if turn is None:
            return None
        try:
            lock = disk.try_lock(places.gate_lock, shared=True)
        finally:
            turn.release()
        if lock is None:
            return None
        whole = holds(disk, places, quiet=self._said_unreadable)
        if whole is None:
            self._said_unreadable = disk.size(places.whole) is not None
            lock.release()
            return None
        return lock, whole

    def why_not(self, waited_s: float) -> str:
        """A sentence for who waited in vain."""
        model, runs = self.places.model, _agent_runs(self._disk, self.places)
        if self.fault:
            said = f"{model}: {self.fault}, and the damage is not repaired after {waited_s:g} s"
        else:
            said = f"{model} holds no whole version after {waited_s:g} s"
        if runs:
            return f"{said}; `weightcast rollout` runs for this directory: its log says what it waits for"
        return f"{said}; is `weightcast rollout` running for this directory?"

    def stop_asking(self) -> None:
        """No longer ask the agent to look. Calling it twice is allowed."""
        if self._doubt is not None:
            self._doubt.release()
            self._doubt = None

    def _is_right(self, whole: Whole) -> bool:
        found = checking.stamps_of(self._disk, self.places, whole.stamps)
        touched = {name for name, stamp in found.items() if stamp != whole.stamps[name]}
        if not touched and not self._verify:
            return True
        if (whole, found) == self._refused:
            self._ask()
            return False
        with ThreadPoolExecutor(thread_name_prefix="weightcast-gate") as pool:
            faults = checking.faults(self._disk, self.places, whole, pool, None if self._verify else touched)
        if not faults:
            return True
        self._refuse(whole, found, faults)
        return False

    def _refuse(self, whole: Whole, found: dict[str, Stamp | None], faults: list[str]) -> None:
        # Files that were only touched again say nothing about an agent, and a later version that it has not looked yet.
        before = None if self._refused is None else self._refused[0]
        looked = before is None or (before != whole and before.position == whole.position)
        self._refused = whole, found
        self._refusals += looked
        more = f" and {len(faults) - 1} more" if len(faults) > 1 else ""
        known, self.fault = self.fault, f"version {whole.position.version} is not what it should be: {faults[0]}{more}"
        if self._refusals >= _MAX_REFUSALS:
            raise DamagedFiles(
                f"{self.places.model}: {self.fault}; the agent has looked at it since and this is found again: "
                "check memory and disk of this machine"
            )
        if looked or self.fault != known:
            _LOG.warning(
                "%s: %s; waiting for `weightcast rollout` to repair it: start it if it does not run",
                self.places.model,
                self.fault,
            )
        self._ask()

    def _ask(self) -> None:
        # A lock, not a file: it works where an engine may only read, and nothing of it outlives the engine.
        if self._doubt is None:
            self._doubt = self._disk.try_lock(self.places.gate_doubt, shared=True)


def _agent_runs(disk: Disk, places: Places) -> bool:
    """Whether an agent keeps the directory. Where none does this takes its lock for a moment: not for a loop."""
    path = places.agent_locks[0]
    if disk.size(path) is None:
        return False
    try:
        lock = disk.try_lock(path, shared=True)
    except DiskError:
        return False
    if lock is not None:
        lock.release()
    return lock is None


def holds(disk: Disk, places: Places, *, quiet: bool = True) -> Whole | None:
    """Which version the directory holds, if it is whole and was made so in this boot.

    ``quiet``: a record that is damaged is not said in the log, for who asks often.
    """
    whole = load(disk, places.whole, Whole, quiet=quiet)
    return whole if whole is not None and whole.stamps and whole.boot_id == disk.boot_id() else None


@contextmanager
def exclusive(
    disk: Disk, places: Places, cancelled: threading.Event, waits: Callable[[str], None] = lambda _: None
) -> Iterator[None]:
    """Wait until no engine loads, keep others out. Raises ``NotWhole`` if ``cancelled`` is set before that.

    ``waits`` is told for whom if that takes long, and then, with an empty sentence, that it is over.
    """
    turn = _wait(disk, places.gate_turn, cancelled, waits)
    try:
        lock = _wait(disk, places.gate_lock, cancelled, waits)
    finally:
        turn.release()
    try:
        yield
    finally:
        lock.release()


def _wait(disk: Disk, path: Path, cancelled: threading.Event, waits: Callable[[str], None]) -> Lock:
    said, patient_until_s = False, time.monotonic() + _PATIENCE_S
    try:
        while (lock := disk.try_lock(path, shared=False)) is None:
            if not said and time.monotonic() >= patient_until_s:
                said = True
                waits(f"an engine that holds {path}: it is loading, or `weightcast gate` runs it without --ready-file")
            if cancelled.wait(_POLL_S):
                raise NotWhole("the agent is stopping: it no longer waits for engines to finish loading")
    finally:
        if said:
            waits("")
    return lock

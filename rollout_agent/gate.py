"""The gate between engines that load a model directory and the agent that changes it.

An engine loads inside :func:`shared`: it waits until the directory is whole, then holds a shared lock. The agent
changes weights only under the exclusive lock, with ``whole.json``, the index and ``config.json`` out of the way, so
that a directory which an agent left in between (killed, power lost) is never taken for whole, lock or no lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollout_agent.disk import Disk, LocalDisk, Lock
from rollout_agent.errors import NotWhole
from rollout_agent.places import Places
from rollout_agent.state import Whole, load

_POLL_S = 0.02


@contextmanager
def shared(model_dir: str | Path, *, timeout_s: float | None = None) -> Iterator[Whole]:
    """Hold the directory still: inside the block it is exactly the version that the yielded record names.

    Waits for an agent to bring it there, ``timeout_s`` seconds at most (None: for ever), then ``NotWhole``.
    """
    places = Places.of(Path(model_dir))
    disk = LocalDisk()
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        lock, whole = enter(disk, places)
        if lock is not None and whole is not None:
            break
        if deadline is not None and time.monotonic() > deadline:
            raise NotWhole(
                f"{places.model} holds no whole version after {timeout_s:g} s; "
                "is `weightcast rollout` running for this directory?"
            )
        time.sleep(_POLL_S)
    try:
        yield whole
    finally:
        lock.release()


def enter(disk: Disk, places: Places) -> tuple[Lock | None, Whole | None]:
    """Try once to take the shared lock on a whole directory: the lock and what it holds, or nothing."""
    if not disk.names(places.private):
        return None, None
    turn = disk.try_lock(places.gate_turn, shared=True)
    if turn is None:
        return None, None
    try:
        lock = disk.try_lock(places.gate_lock, shared=True)
    finally:
        turn.release()
    if lock is None:
        return None, None
    whole = holds(disk, places)
    if whole is None or any(disk.size(places.model / name) != size for name, size in whole.files.items()):
        lock.release()  # a file that was cut or removed by hand; the agent brings it back
        return None, None
    return lock, whole


def holds(disk: Disk, places: Places) -> Whole | None:
    """Which version the directory holds, if it is whole and was made so in this boot."""
    whole = load(disk, places.whole, Whole)
    return whole if whole is not None and whole.boot_id == disk.boot_id() else None


@contextmanager
def exclusive(disk: Disk, places: Places, cancelled: threading.Event) -> Iterator[None]:
    """Wait until no engine loads, keep others out. Raises ``NotWhole`` if ``cancelled`` is set before that."""
    turn = _wait(disk, places.gate_turn, cancelled)
    try:
        lock = _wait(disk, places.gate_lock, cancelled)
    finally:
        turn.release()
    try:
        yield
    finally:
        lock.release()


def _wait(disk: Disk, path: Path, cancelled: threading.Event) -> Lock:
    while True:
        lock = disk.try_lock(path, shared=False)
        if lock is not None:
            return lock
        if cancelled.wait(_POLL_S):
            raise NotWhole("the agent is stopping: it no longer waits for engines to finish loading")

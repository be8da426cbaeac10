"""What the state directory says: which logs lead on from the checkpoint, and the layouts to read them by."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from rollout_agent.changelog import ScannedLog, ends_committed, head_of, scan
from rollout_agent.disk import Disk, write_file
from rollout_agent.errors import Rewind
from rollout_agent.faults import Faults
from rollout_agent.places import Places, is_checkpoint_name, log_version
from rollout_agent.state import State, Version, kept_groups, load
from weight_store.errors import DigestMismatch, WeightStoreError
from weight_store.head import Head
from weight_store.layout import Group, Layout
from weight_store.position import Position
from weight_store.receipt import DIGEST_BYTES
from weight_store.records import MAX_COLUMNS_BYTES, pack, sha256_hex, unpack

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Held:
    """A version, the kept groups it is cut into, and the digest of each."""

    version: Version
    layout: Layout
    groups: tuple[Group, ...]
    digests: tuple[bytes, ...]

    @property
    def position(self) -> Position:
        """The version's position."""
        return self.version.position


@dataclass(frozen=True, slots=True)
class KeptLog:
    """A committed log that leads on from the checkpoint: where it is, its size, and the version it leads to."""

    path: Path
    nbytes: int
    version: Version


def check_not_back(held: Held | None, head: Head) -> None:
    """Raise ``Rewind`` if the head leads to an older version than the one held, or to another one of that number."""
    if held is None or held.position == head.position:
        return
    if head.position.version <= held.position.version:
        raise Rewind(
            f"the head of the run names version {head.position}, but this replica holds {held.position}; a replica "
            "never goes back: if the bucket was restored from an older copy, follow it with an empty directory"
        )


def held_by(state: State, layout: Layout) -> Held:
    """What the files of ``state`` hold."""
    raw = bytes.fromhex(state.digests)
    table = tuple(raw[i : i + DIGEST_BYTES] for i in range(0, len(raw), DIGEST_BYTES))
    return Held(state.version, layout, kept_groups(state, layout), table)


def held_after(state: State, to: Version, layout: Layout, table: Mapping[int, bytes]) -> Held | None:
    """What is held at ``to``, given each group's digest; None if a kept group has none."""
    groups = kept_groups(state, layout)
    if any(group.index not in table for group in groups):
        return None
    return Held(to, layout, groups, tuple(table[group.index] for group in groups))


def read_layout(disk: Disk, path: Path, sha256: str) -> Layout | None:
    """The layout of this digest at ``path``; None if it is not there or (said in the log) damaged."""
    try:
        raw = _raw_layout(disk, path, sha256)
        return Layout.parse(raw, key=str(path)) if raw is not None else None
    except WeightStoreError as error:
        _LOG.warning("%s; going on without it", error)
        return None


def has_layout(disk: Disk, path: Path, sha256: str) -> bool:
    """Whether :func:`read_layout` would find one; costs no more memory than its bytes."""
    try:
        return _raw_layout(disk, path, sha256) is not None
    except WeightStoreError as error:
        _LOG.warning("%s; going on without it", error)
        return False


def _raw_layout(disk: Disk, path: Path, sha256: str) -> bytes | None:
    data = disk.read(path, max_bytes=MAX_COLUMNS_BYTES)
    if data is None:
        return None
    raw = unpack(data, key=str(path))
    found = sha256_hex(raw)
    if found != sha256:
        raise DigestMismatch(f"{path} has SHA-256 {found}, expected {sha256}")
    return raw


class StateDir:
    """Reads and tidies the state directory."""

    def __init__(self, disk: Disk, places: Places, faults: Faults | None = None) -> None:
        self._disk = disk
        self._places = places
        self.faults = faults if faults is not None else Faults()
        self._layouts: dict[str, Layout] = {}
        self._reading = threading.RLock()

    def layout(self, sha256: str) -> Layout | None:
        """The layout of this digest; None if it is not kept or damaged. Any thread may call this."""
        with self._reading:
            found = self._layout(sha256)
        if found is None:
            self.faults.lost("layout", self._disk, self._places.layout(sha256))
        return found

    def _layout(self, sha256: str) -> Layout | None:
        if sha256 not in self._layouts:
            path = self._places.layout(sha256)
            layout = read_layout(self._disk, path, sha256)
            if layout is None:
                return None
            self._remember(sha256, layout)
        return self._layouts[sha256]

    def keep_layout(self, sha256: str, layout: Layout) -> None:
        """Keep a layout for replay; durable when this returns."""
        with self._reading:
            kept = self._layout(sha256) is not None
        # What is remembered may have been removed from the disk since.
        if not kept or self._disk.size(self._places.layout(sha256)) is None:
            write_file(self._disk, self._places.layout(sha256), pack(layout.to_bytes()))
            with self._reading:
                self._remember(sha256, layout)
        # Also when it was there: whoever put it there may have ended before this.
        self._disk.sync_dir(self._places.layouts)

    def settle(self, paths: Sequence[Path]) -> None:
        """Make logs durable, in order, that were found committed: the last one's writer may have ended before it was.

        It is written anew. Its sync may have failed for that writer, and would not fail again.
        """
        for path in paths[-1:]:
            mapped = self._disk.map(path, writable=False)
            try:
                write_file(self._disk, path, mapped.data.data)
            finally:
                mapped.close()
        self._disk.sync_dir(self._places.state)

    def _remember(self, sha256: str, layout: Layout) -> None:
        # Two: a layout of a million pieces takes hundreds of megabytes, and a step involves no more.
        for stale in list(self._layouts)[:-1]:
            del self._layouts[stale]
        self._layouts[sha256] = layout

    def scan(self, path: Path) -> ScannedLog | None:
        """A log if it was committed and is undamaged."""
        return self._mapped(path, scan)

    def replayable(self, state: State, layout: Layout) -> tuple[Held, list[KeptLog]]:
        """What is held after the committed logs that lead on from ``state``, and those logs in order.

        Logs that were never committed are removed.
        """
        logs = self._committed(state)
        held = held_by(state, layout)
        kept: list[KeptLog] = []
        while (found := logs.pop(held.position, None)) is not None:
            path, log = found
            next_layout = self.layout(log.head.to.layout)
            table = {item.group: item.digest for item in log.groups}
            after = held_after(state, log.head.to, next_layout, table) if next_layout else None
            if after is None:
                break
            kept.append(KeptLog(path, self._disk.size(path) or 0, log.head.to))
            held = after
        return held, kept

    def asset_names(self) -> frozenset[str]:
        """Names of the assets of every version that something here tells of: files of these names may be in place."""
        places = self._places
        records = [load(self._disk, p, State, quiet=True) for p in (places.checkpoint, places.pending, places.digests)]
        logs = [places.state / name for name in self._disk.names(places.state) if log_version(name) is not None]
        heads = [self._mapped(path, head_of) for path in logs]
        versions = [state.version for state in records if state is not None]
        versions += [head.to for head in heads if head is not None]
        return frozenset(asset.name for version in versions for asset in version.assets)

    def _committed(self, state: State) -> dict[Position, tuple[Path, ScannedLog]]:
        """Committed logs of the run by the position they start from; the others are removed."""
        found: dict[Position, tuple[Path, ScannedLog]] = {}
        for name in self._disk.names(self._places.state):
            if log_version(name) is None:
                continue
            path = self._places.state / name
            log = self.scan(path)
            if log is not None and log.head.run_id == state.run_id:
                found[log.head.base] = path, log
            else:
                self._drop(path, log)
        return found

    def _drop(self, path: Path, log: ScannedLog | None) -> None:
        """Remove a log that says nothing; one that was committed and is rotten is named and counted."""
        if log is None and self._mapped(path, ends_committed):
            _LOG.error("%s is damaged: it ends with a commit, but a checksum in it is wrong; going on without it", path)
            self.faults.found("log")
        else:
            _LOG.info("dropping %s: it was never committed", path)
        self._disk.remove(path)

    def _mapped(self, path: Path, look: Callable[[NDArray[np.uint8]], _T]) -> _T | None:
        """What ``look`` finds in the bytes of a file; None if it is absent or empty."""
        if not self._disk.size(path):
            return None
        mapped = self._disk.map(path, writable=False)
        try:
            return look(mapped.data)
        finally:
            mapped.close()

    def drop_older(self, keep: State, later: Sequence[KeptLog] = ()) -> None:
        """Remove what the checkpoint ``keep`` has made unnecessary; whatever stays after a crash is harmless.

        ``later``: the logs that lead on from it, which stay with all that they need.
        """
        disk, state = self._disk, self._places.state
        disk.remove(self._places.pending)
        for name in disk.names(state):
            version = log_version(name.removesuffix(".tmp"))
            if version is not None and version <= keep.version.position.version:
                disk.remove(state / name)
        self.drop_copies(keep.checkpoint)
        needed = [keep.version, *(log.version for log in later)]
        layouts = {version.layout for version in needed}
        for name in disk.names(self._places.layouts):
            if name not in layouts:
                with self._reading:
                    self._layouts.pop(name, None)
                disk.remove(self._places.layout(name))
        kept = {asset.sha256 for version in needed for asset in version.assets}
        for name in disk.names(self._places.assets):
            if name not in kept:
                disk.remove(self._places.asset(name))

    def drop_copies(self, keep: str) -> None:
        """Remove every copy of the weights except ``keep``, among them those that were never finished."""
        for name in self._disk.names(self._places.state):
            if is_checkpoint_name(name) and name != keep:
                self._disk.remove_dir(self._places.state / name)

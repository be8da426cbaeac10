"""The log of one step from a version to the next: what changes in every kept group, and the commit.

Nothing but this file decides whether a version is applied: with a valid commit record it is, else it never was. Values
are absolute, so replaying a log over any mixture of before and after gives after.

File, little-endian, every part padded with zeros to 8 bytes::

    magic "WCLOG\\0\\0\\1" | u64 length | LogHead (canonical JSON) | u64 XXH3-64 of all that
    record*   "WCGR" u32 group | u32 kind u32 itemsize | u64 count | 16 digest of the result | u64 XXH3-64 of header
              (without this field) and body | body: sparse (kind 1) u32 index[count], bits[count]; whole (2) bits[count]
    commit    "WCOK" u32 0 | u64 records | 16 XXH3-128 of the checksums above in order | u64 XXH3-64 of the commit
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import ValidationError

from codec import Change
from codec.dtypes import BITS_OF_SIZE
from rollout_agent.disk import Disk
from rollout_agent.state import Version
from weight_store.errors import FormatError
from weight_store.position import Position
from weight_store.records import MAX_RECORD_BYTES, Record, Uuid

_MAGIC = b"WCLOG\x00\x00\x01"
_RECORD = struct.Struct("<4sIIIQ16s")
_COMMIT = struct.Struct("<4sIQ16s")
_U64 = struct.Struct("<Q")
_GROUP, _DONE = b"WCGR", b"WCOK"
_SPARSE, _WHOLE = 1, 2


class LogHead(Record):
    """What a log leads from and to."""

    FORMAT: ClassVar[str] = "weightcast.replica-log"

    run_id: Uuid
    base: Position
    to: Version


@dataclass(frozen=True, slots=True)
class LoggedGroup:
    """One group in a log: where its values lie (bytes from the start of the file)."""

    group: int
    whole: bool
    itemsize: int
    count: int
    digest: bytes
    body: int


@dataclass(frozen=True, slots=True)
class ScannedLog:
    """A committed log, checked from its first byte to its last."""

    head: LogHead
    groups: tuple[LoggedGroup, ...]


class LogWriter:
    """Writes one log, from any thread. Without :meth:`commit` it never counts; :meth:`discard` removes it."""

    def __init__(self, disk: Disk, path: Path, head: LogHead) -> None:
        self._disk = disk
        self._path = path
        self._file = disk.append(path)
        self._chain = xxhash.xxh3_128()
        self._lock = threading.Lock()
        self._records = 0
        self.nbytes = 0
        try:
            # The name must last as long as the content, or a committed log would be lost.
            disk.sync_dir(path.parent)
            body = head.to_bytes()
            start = _padded(_MAGIC + _U64.pack(len(body)) + body)
            self._write(start, _checksum(start))
        except BaseException:
            self._file.close()
            raise

    def add(self, group: int, change: Change) -> None:
        """Append what happens to a group."""
        whole = change.whole
        values = change.bits if whole is None else whole
        kind = _SPARSE if whole is None else _WHOLE
        header = _RECORD.pack(_GROUP, group, kind, values.itemsize, values.size, change.digest)
        parts = [values] if whole is not None else [change.index, change.bits]
        body = b"".join(_padded(part.tobytes()) for part in parts)
        check = _checksum(header, body)
        with self._lock:
            self._write(header, check, body)
            self._records += 1

    def commit(self) -> None:
        """Make the version decided: it is applied once this returns, and perhaps if it fails half-way."""
        record = _COMMIT.pack(_DONE, 0, self._records, self._chain.digest())
        self._write(record, _checksum(record))
        self._file.sync()
        self._file.close()

    def discard(self) -> None:
        """Give up: close and remove the file."""
        self._file.close()
        self._disk.remove(self._path)

    def _write(self, first: bytes, check: bytes, body: bytes = b"") -> None:
        self._chain.update(check)
        for part in (first, check, body):
            if part:
                self._file.write(part)
                self.nbytes += len(part)


def scan(data: NDArray[np.uint8]) -> ScannedLog | None:
    """Check a log completely; None unless every byte up to and including a commit is right."""
    try:
        return _scan(data.data)
    except (struct.error, FormatError, ValidationError):
        return None


def head_of(data: NDArray[np.uint8]) -> LogHead | None:
    """What a log leads from and to, committed or not; None if that part of it is not whole."""
    try:
        found = _head(data.data, xxhash.xxh3_128())
    except (struct.error, FormatError, ValidationError):
        return None
    return None if found is None else found[0]


def ends_committed(data: NDArray[np.uint8]) -> bool:
    """Whether there is a commit at the end: with :func:`scan` None, rot (or a power loss before it was durable)."""
    size = _COMMIT.size + _U64.size
    return data.size >= size and bytes(data[-size:][: len(_DONE)]) == _DONE


def _scan(view: memoryview) -> ScannedLog | None:
    chain = xxhash.xxh3_128()
    start = _head(view, chain)
    if start is None:
        return None
    head, at = start
    groups: list[LoggedGroup] = []
    while bytes(view[at : at + 4]) == _GROUP:
        _, group, kind, itemsize, count, digest = _RECORD.unpack_from(view, at)
        body = at + _RECORD.size + 8
        end = body + _body_bytes(kind, itemsize, count)
        if kind not in (_SPARSE, _WHOLE) or itemsize not in BITS_OF_SIZE or end > len(view):
            return None
        if not _checks(chain, view, at + _RECORD.size, view[at : at + _RECORD.size], view[body:end]):
            return None
        groups.append(LoggedGroup(group, kind == _WHOLE, itemsize, count, digest, body))
        at = end
    mark, _, records, found = _COMMIT.unpack_from(view, at)
    expected = chain.digest()
    if mark != _DONE or records != len(groups) or found != expected:
        return None
    if not _checks(chain, view, at + _COMMIT.size, view[at : at + _COMMIT.size]):
        return None
    return ScannedLog(head, tuple(groups))


def _head(view: memoryview, chain: xxhash.xxh3_128) -> tuple[LogHead, int] | None:
    """The head and where the records begin."""
    (length,) = _U64.unpack_from(view, len(_MAGIC))
    if bytes(view[: len(_MAGIC)]) != _MAGIC or length > MAX_RECORD_BYTES:
        return None
    at = _round_up(len(_MAGIC) + 8 + length)
    if not _checks(chain, view, at, view[:at]):
        return None
    return LogHead.parse(bytes(view[16 : 16 + length])), at + 8


def changes(data: NDArray[np.uint8], log: ScannedLog) -> Iterator[tuple[int, Change]]:
    """The changes of a scanned log, group index first; arrays are views of ``data``."""
    for item in log.groups:
        dtype = BITS_OF_SIZE[item.itemsize]
        if item.whole:
            whole = data[item.body : item.body + item.count * item.itemsize].view(dtype)
            yield item.group, Change(np.empty(0, np.uint32), np.empty(0, dtype), whole, item.digest)
            continue
        index = data[item.body : item.body + 4 * item.count].view(np.uint32)
        at = item.body + _round_up(4 * item.count)
        bits = data[at : at + item.count * item.itemsize].view(dtype)
        yield item.group, Change(index, bits, None, item.digest)


def _body_bytes(kind: int, itemsize: int, count: int) -> int:
    values = _round_up(count * itemsize)
    return values if kind == _WHOLE else _round_up(4 * count) + values


def _round_up(size: int) -> int:
    return size + -size % 8


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 8)


def _checksum(*parts: bytes | memoryview) -> bytes:
    hasher = xxhash.xxh3_64()
    for part in parts:
        hasher.update(part)
    return _U64.pack(hasher.intdigest())


def _checks(chain: xxhash.xxh3_128, view: memoryview, at: int, *parts: memoryview) -> bool:
    found = bytes(view[at : at + 8])
    chain.update(found)
    return found == _checksum(*parts)

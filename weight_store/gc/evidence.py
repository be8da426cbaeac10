"""Reads what the bucket says about a run, and how it is known. Nothing unreadable is ever taken for dead.

Nor is anything because of a single reading: what no digest names is read until two readings agree.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from weight_store.control import Control
from weight_store.errors import FormatError, ObjectNotFound, StoreRefused, StoreUnavailable
from weight_store.gc.plan import Facts, Fate
from weight_store.head import Head
from weight_store.keys import ParsedKey, control_key, manifest_key, open_key, parse_key, receipt_key
from weight_store.manifest import Manifest
from weight_store.position import GENESIS, Position
from weight_store.reading import check_head, read_agreed, read_head, read_manifest
from weight_store.receipt import Receipt
from weight_store.records import record_format
from weight_store.store import Entry, MultipartStore, Store, UnfinishedUpload
from weight_store.version import Abort, Open

T = TypeVar("T")
R = TypeVar("R")

_PARALLEL = 16
_CONTROL_READS = 5


@dataclass(frozen=True, slots=True)
class ControlSeen:
    """The control object with the time of its last write by the store's clock (Unix seconds)."""

    control: Control | None
    etag: str = ""
    modified_s: float = 0.0


@dataclass
class Line:
    """Sealed versions back from the head by parent links: every number from ``known_from`` on that is not among them
    was given up.
    """

    sealed: dict[int, Position] = field(default_factory=dict)
    known_from: int = 1
    broken: str = ""

    def fate(self, version: int) -> Fate:
        """What became of a number up to the head's."""
        if version in self.sealed:
            return Fate("sealed", "the head leads back to it")
        if version >= self.known_from:
            return Fate("dead", "the head passed over it")
        return Fate("unknown", self.broken or "the parent links were not followed that far")


async def parallel(function: Callable[[T], Awaitable[R]], items: Iterable[T]) -> list[R]:
    """Await ``function`` of every item, a few at a time; the results in order. The first error ends the others."""
    slots = asyncio.Semaphore(_PARALLEL)

    async def one(item: T) -> R:
        async with slots:
            return await function(item)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(item)) for item in items]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def read_control(store: Store, run: str) -> ControlSeen:
    """Return the control object and when it was written; ``StoreUnavailable`` if it keeps changing meanwhile."""
    key = control_key(run)
    for _ in range(_CONTROL_READS):
        before = await _entry(store, key)
        try:
            blob, _ = await read_agreed(store, key)
        except ObjectNotFound:
            if before is None:
                return ControlSeen(None)
            continue
        after = await _entry(store, key)
        # Servers quote ETags in one answer and not in the other.
        if before and after and before.etag.strip('"') == after.etag.strip('"') == blob.etag.strip('"'):
            modified_s = max(before.modified_s, after.modified_s)  # the later one errs on the side of keeping
            return ControlSeen(Control.parse(blob.data, key=key), blob.etag, modified_s)
    raise StoreUnavailable(f"{key} keeps changing: try again", key=key)


async def _entry(store: Store, key: str) -> Entry | None:
    return next((entry for entry in [entry async for entry in store.list(key)] if entry.key == key), None)


async def read_run(store: Store, run: str) -> tuple[Head, Manifest | None]:
    """Return the head and its manifest (None before the first version), both as two readings or a digest have them."""
    head, _ = await read_head(store, run, agreed=True)
    manifest = None if head.position == GENESIS else await read_manifest(store, run, head.position)
    check_head(head, manifest)
    return head, manifest


async def follow_links(store: Store, run: str, head: Head, manifest: Manifest | None, *, down_to: int) -> Line:
    """Walk back from the head, by the links that each manifest carries, until ``down_to`` is covered or it ends."""
    line = Line()
    if manifest is None:
        return line
    line.sealed[head.position.version] = head.position
    while True:
        for link in manifest.chain:
            line.sealed[link.version] = link.position
        oldest = manifest.chain[0].position if manifest.chain else manifest.parent
        if oldest == GENESIS:
            line.known_from = 1
            return line
        line.sealed[oldest.version] = oldest
        line.known_from = oldest.version
        if oldest.version <= down_to:
            return line
        try:
            manifest = await read_manifest(store, run, oldest)
        except (ObjectNotFound, FormatError) as error:
            line.broken = f"the parent links end at version {oldest.version}: {error}"
            return line


async def read_pending(store: Store, run: str, head: Head, version: int) -> Fate:
    """What became of a number above the head's."""
    try:
        opened = Open.parse((await read_agreed(store, open_key(run, version)))[0].data)
    except ObjectNotFound:
        return Fate("unknown", "it has no open.json")
    except FormatError as error:
        return Fate("unknown", f"its open.json cannot be read: {error}")
    if opened.run_id != head.run_id:
        return Fate("unknown", f"it belongs to an earlier run of this name, {opened.run_id}")
    try:
        data = (await read_agreed(store, manifest_key(run, version)))[0].data
        if record_format(data) == Abort.FORMAT:
            abort = Abort.parse(data)
            return Fate("dead", f"aborted, {abort.reason}")
        manifest = Manifest.parse(data)
    except ObjectNotFound:
        if opened.term < head.term:
            return Fate("dead", f"opened in term {opened.term}, which is over")
        return Fate("undecided", "its ranks may still be publishing it")
    except FormatError as error:
        return Fate("unknown", f"its manifest.json cannot be read: {error}")
    if manifest.term < head.term:
        return Fate("dead", f"stranded: term {manifest.term} ended before the head came to it")
    return Fate("undecided", "sealed, and the head is about to come to it")


@dataclass(frozen=True, slots=True)
class Listing:
    """All objects and unfinished uploads of a run, listed before anything else is read."""

    entries: tuple[Entry, ...]
    uploads: tuple[UnfinishedUpload, ...]
    parsed: tuple[ParsedKey, ...]

    @property
    def versions(self) -> set[int]:
        """Every version number that has an object or an upload."""
        return {found.version for found in self.parsed if found.version is not None}


async def read_listing(store: Store, run: str) -> Listing:
    """List a run."""
    entries = tuple([entry async for entry in store.list(f"{run}/")])
    uploads: tuple[UnfinishedUpload, ...] = ()
    if isinstance(store, MultipartStore):
        uploads = tuple([upload async for upload in store.list_uploads(f"{run}/")])
    keys = [*(entry.key for entry in entries), *(upload.key for upload in uploads)]
    parsed = []
    for key in keys:
        try:
            parsed.append(parse_key(key))
        except FormatError:
            continue
    return Listing(entries, uploads, tuple(parsed))


class Witness:
    """Gathers the facts about one run from a listing and the head that was read after it."""

    def __init__(self, store: Store, run: str, listing: Listing, head: Head, manifest: Manifest | None) -> None:
        self._store = store
        self._run = run
        self._listing = listing
        self._head = head
        self._manifest = manifest

    async def facts(self, line: Line, *, floor: int, now_s: float, min_age_s: float) -> Facts:
        """Return what the plan is made from; ``line`` reaches down to the floor where it could be followed."""
        fates = await self._fates(line, floor)
        return Facts(
            head=self._head,
            manifest=self._manifest,
            floor=floor,
            now_s=now_s,
            min_age_s=min_age_s,
            entries=self._listing.entries,
            uploads=self._listing.uploads,
            fates=fates,
            nonces=await self._nonces(fates),
        )

    async def _fates(self, line: Line, floor: int) -> dict[int, Fate]:
        kept = {version for version in self._listing.versions if version >= floor}
        at = self._head.position.version
        fates = {version: line.fate(version) for version in kept if version <= at}
        above = sorted(version for version in kept if version > at)

        async def pending(version: int) -> Fate:
            return await read_pending(self._store, self._run, self._head, version)

        return fates | dict(zip(above, await parallel(pending, above), strict=True))

    async def _nonces(self, fates: dict[int, Fate]) -> dict[tuple[int, int, bool], str]:
        """The shard that the receipt names, for ranks of sealed versions that have several."""
        shards: defaultdict[tuple[int, int, bool], int] = defaultdict(int)
        for found in self._listing.parsed:
            if found.kind == "shard" and found.version is not None and found.rank is not None:
                shards[found.version, found.rank, found.extra_full] += 1
        several = [where for where, count in shards.items() if count > 1 and _state(fates, where[0]) == "sealed"]
        receipts = await parallel(self._receipt, several)
        return {where: found.nonce for where, found in zip(several, receipts, strict=True) if found is not None}

    async def _receipt(self, where: tuple[int, int, bool]) -> Receipt | None:
        version, rank, extra_full = where
        key = receipt_key(self._run, version, rank, extra_full=extra_full)
        try:
            return Receipt.parse((await read_agreed(self._store, key))[0].data, key=key)
        except (ObjectNotFound, FormatError):
            return None


async def read_targets(
    store: Store, run: str, control: Control | None, line: Line, head: Head
) -> list[tuple[str, Manifest]]:
    """Return the manifests of the versions that regions are told to run, as far as those still lie ahead or are kept.

    ``StoreRefused`` if one cannot be read: then nobody can say what its region needs.
    """
    found = []
    for region, version in sorted((control.targets if control is not None else {}).items()):
        if control is None or version < control.floor or version > head.position.version:
            continue  # gone already; or not sealed yet, and then it needs no more than the head
        position = line.sealed.get(version)
        if position is None and line.fate(version).state == "dead":
            continue
        try:
            if position is None:
                raise FormatError(line.fate(version).why)
            found.append((region, await read_manifest(store, run, position)))
        except (ObjectNotFound, FormatError) as error:
            raise StoreRefused(
                f"region {region} is told to run version {version}, and what that needs cannot be told ({error}): "
                "correct the target in control.json before the floor is raised"
            ) from None
    return found


def _state(fates: dict[int, Fate], version: int) -> str:
    return fates[version].state if version in fates else "unknown"

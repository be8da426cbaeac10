"""One run's objects in the bucket: reads them into views and writes the steps that decisions ask for.

Only what can never change is cached. Nothing is listed: every key follows from the head. What is read here becomes
durable: it is written back, sealed, or remembered for ever. So a record counts only once two readings of it agree, or
one agrees with a digest that names it, with what was read last time, or with what this coordinator wrote.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

from coordinator.ambient import Ambient
from coordinator.cache import Recent
from coordinator.decisions import (
    CreateHead,
    CreateOpen,
    CreateRegister,
    ReplaceHead,
    Sealing,
    Slot,
    Step,
    Unreadable,
    View,
    is_dead,
)
from weight_store.control import Control
from weight_store.errors import DigestMismatch, FormatError, ObjectNotFound, ObjectTooLarge, PreconditionFailed
from weight_store.head import Head
from weight_store.keys import (
    control_key,
    head_key,
    layout_key,
    manifest_key,
    offer_key,
    open_key,
    parse_key,
    receipt_key,
    run_marker_key,
    sign_key,
)
from weight_store.layout import Layout
from weight_store.manifest import Manifest
from weight_store.offer import Offer
from weight_store.position import GENESIS, Position
from weight_store.reading import check_head, read_agreed
from weight_store.receipt import Receipt
from weight_store.records import (
    MAX_COLUMNS_BYTES,
    MAX_RECORD_BYTES,
    pack,
    record_format,
    sha256_hex,
    unpack,
    unpacked_bytes,
)
from weight_store.store import Blob, Store
from weight_store.version import Abort, Open

T = TypeVar("T")

_LARGE_BYTES = 16 << 20
"""Offers larger than this, packed or not, are read one at a time: many at once would take all memory there is. An
honest one has some 60 bytes a piece, so this is a quarter of a million pieces of one rank."""
_SMALL_BYTES = 64 << 10
"""Objects larger than this, packed or not, are parsed off the event loop."""
_FEW_RANKS = 128
"""Manifests of larger worlds are written out off the event loop: with 4096 ranks and a full beside, 40 ms."""


class RunBucket:
    """Reads and writes of one run. Raises ``StoreError`` and ``FormatError`` as the store and the records do."""

    def __init__(self, store: Store, run: str, ambient: Ambient) -> None:
        self._store = store
        self._run = run
        self._ambient = ambient
        self._manifests: Recent[Position, Manifest] = Recent(4)
        self._layouts: Recent[str, Layout] = Recent(2)
        self._opens: Recent[tuple[str, int], Open] = Recent(64)
        self._aborts: Recent[tuple[str, int], Abort] = Recent(4096)
        self._known: Recent[str, str] = Recent(256)  # SHA-256 by key

    async def view(self) -> tuple[View, str] | None:
        """Return what the bucket says and the head's ETag, or None if the run does not exist."""
        key = head_key(self._run)
        try:
            blob = await self._read(key)
        except ObjectNotFound:
            return None
        head = Head.parse(blob.data, key=key)
        current = None if head.position == GENESIS else await self.manifest(head.position)
        check_head(head, current)
        version, given_up = head.position.version + 1, None
        while is_dead(head, slot := await self.slot(head.run_id, version)):
            if slot.opened is not None and slot.opened.term == head.term:
                given_up = slot.opened
            version += 1
        return View(head, current, slot, given_up), blob.etag

    async def slot(self, run_id: str, version: int) -> Slot:
        """Read one version's opening and register; both may be absent."""
        key = (run_id, version)
        opened = self._opens.get(key) or await self._read_open(version)
        if opened is None:
            return Slot(version)
        if opened.run_id == run_id:
            self._opens.put(key, opened)
        abort = self._aborts.get(key)
        if abort is not None:
            return Slot(version, opened, abort)
        decision = await self._read_register(version)
        if isinstance(decision, Abort) and decision.run_id == run_id:
            self._aborts.put(key, decision)
        elif isinstance(decision, Sealing):
            self._manifests.put(decision.position, decision.manifest)  # the head is about to come there
        return Slot(version, opened, decision)

    async def _read_open(self, version: int) -> Open | None:
        key = open_key(self._run, version)
        try:
            data = (await self._read(key)).data
        except ObjectNotFound:
            return None
        opened = Open.parse(data, key=key)
        if opened.version != version:
            raise FormatError(f"{key} opens version {opened.version}")
        return opened

    async def _read_register(self, version: int) -> Sealing | Abort | None:
        key = manifest_key(self._run, version)
        try:
            data = (await self._read(key)).data
        except ObjectNotFound:
            return None
        found = await self._parsed(_parse_register, data, key)
        held = found.manifest if isinstance(found, Sealing) else found
        if held.version != version:
            raise FormatError(f"{key} decides version {held.version}")
        return found

    async def manifest_bytes(self, position: Position) -> bytes:
        """Return the manifest of a position as stored, verified."""
        key = manifest_key(self._run, position.version)
        data = (await self._read(key, position.sha256)).data
        if sha256_hex(data) != position.sha256:
            raise DigestMismatch(f"{key} is not the manifest of {position}: it was altered or damaged")
        return data

    async def manifest(self, position: Position) -> Manifest:
        """Return the manifest of a position, verified."""
        known = self._manifests.get(position)
        if known is not None:
            return known
        key = manifest_key(self._run, position.version)
        found = await self._parsed(_parse_manifest, await self.manifest_bytes(position), key)
        return self._manifests.put(position, found)

    async def layout(self, sha256: str) -> Layout:
        """Return a layout, verified. Not coalesced: callers ask under a lock or seldom."""
        found = self._layouts.get(sha256)
        if found is None:
            key = layout_key(self._run, sha256)
            data = (await self._read(key, max_bytes=MAX_COLUMNS_BYTES)).data
            found = self._layouts.put(sha256, await self._parsed(_parse_layout, data, key, unpacked_bytes(data)))
        return found

    def forget_layouts(self) -> None:
        """Let go of the layouts, which may have a million pieces; they are read again when they are needed."""
        self._layouts = Recent(2)

    async def find_layout(self, sha256: str) -> Layout | None:
        """Return a layout, or None if the bucket does not hold it."""
        try:
            return await self.layout(sha256)
        except ObjectNotFound:
            return None

    async def offer(self, term: int, rank: int) -> Offer | None:
        """Return what a rank offers in a term, or None if it is not there."""
        key = offer_key(self._run, term, rank)
        try:
            data = (await self._read(key, max_bytes=_LARGE_BYTES)).data
        except ObjectNotFound:
            return None
        except ObjectTooLarge:
            data = None
        if data is not None and unpacked_bytes(data) <= _LARGE_BYTES:
            return await self._parsed(_parse_offer, data, key, unpacked_bytes(data))
        async with self._ambient.large:
            if data is None:
                data = (await self._read(key, max_bytes=MAX_COLUMNS_BYTES)).data
            return await self._parsed(_parse_offer, data, key, unpacked_bytes(data))

    async def write_layout(self, layout: Layout) -> str:
        """Store a layout under the SHA-256 of its JSON and return that. One that is there already is the same."""
        raw = await self._ambient.offload(layout.to_bytes)
        sha256 = sha256_hex(raw)
        packed = await self._ambient.offload(pack, raw)
        with contextlib.suppress(PreconditionFailed):
            await self._store.create(layout_key(self._run, sha256), packed)
        self._layouts.put(sha256, layout)
        return sha256

    async def receipt(self, version: int, rank: int, reported: str = "") -> tuple[Receipt, bytes] | Unreadable | None:
        """Return a rank's receipt and its bytes, why it cannot be read, or None if it is not there.

        ``reported``: the SHA-256 that the rank says its receipt has, which makes a second reading needless.
        """
        key = receipt_key(self._run, version, rank)
        try:
            data = (await self._read(key, reported)).data
        except ObjectNotFound:
            return None
        except FormatError as error:  # larger than any receipt may be
            return Unreadable(f"the receipt of rank {rank} cannot be used: {error}")
        try:
            return await self._parsed(_parse_receipt, data, key), data
        except FormatError as error:
            return Unreadable(f"the receipt of rank {rank} cannot be used: {error}")

    async def write_sign(self, version: int, number: int) -> None:
        """Leave a sign of life for other coordinators. One that is there already says the same."""
        with contextlib.suppress(PreconditionFailed):
            await self._store.create(sign_key(self._run, version, number), b"")

    async def has_sign(self, version: int, number: int) -> bool:
        """Whether somebody left that sign of life."""
        try:
            await self._store.get(sign_key(self._run, version, number), max_bytes=0)
        except ObjectNotFound:
            return False
        except ObjectTooLarge:
            return True
        return True

    async def control(self) -> Control | None:
        """Return the control object if there is one."""
        key = control_key(self._run)
        try:
            return Control.parse((await self._store.get(key, max_bytes=MAX_RECORD_BYTES)).data, key=key)
        except ObjectNotFound:
            return None

    async def write(self, step: Step, etag: str) -> tuple[str, Position | None]:
        """Carry out one step on the head of ``etag``; return the head's ETag from then on, and a manifest's position.

        ``PreconditionFailed``: somebody was first. ``StoreUnavailable``: nobody knows.
        """
        run, store = self._run, self._store
        match step:
            case CreateHead(head):
                # The marker first: a head without one would never be found by people.
                with contextlib.suppress(PreconditionFailed):
                    await store.create(run_marker_key(run), b"")
                etag = await self._create(head_key(run), head.to_bytes())
            case ReplaceHead(head):
                data = head.to_bytes()
                self._known.put(head_key(run), sha256_hex(data))
                etag = await store.replace(head_key(run), data, etag=etag)
            case CreateOpen(opened):
                await self._create(open_key(run, opened.version), opened.to_bytes())
                self._opens.put((opened.run_id, opened.version), opened)
            case CreateRegister(Abort() as abort):
                await self._create(manifest_key(run, abort.version), abort.to_bytes())
                self._aborts.put((abort.run_id, abort.version), abort)
            case CreateRegister(Manifest() as manifest):
                data, position = await self._stored(manifest)
                await self._create(manifest_key(run, manifest.version), data)
                self._manifests.put(position, manifest)  # the head is about to come there
                return etag, position
        return etag, None

    async def _stored(self, manifest: Manifest) -> tuple[bytes, Position]:
        if manifest.world_size <= _FEW_RANKS:
            return _stored(manifest)
        found: tuple[bytes, Position] = await self._ambient.offload(_stored, manifest)
        return found

    async def _create(self, key: str, data: bytes) -> str:
        self._known.put(key, sha256_hex(data))
        return await self._store.create(key, data)

    async def _read(self, key: str, sha256: str = "", *, max_bytes: int = MAX_RECORD_BYTES) -> Blob:
        """Read what may be acted upon; ``sha256``: of what should be there. See the module."""
        known = (sha256, self._known.get(key) or "")
        blob, found = await read_agreed(self._store, key, known, max_bytes=max_bytes)
        self._known.put(key, found)
        return blob

    async def _parsed(self, parse: Callable[[bytes, str], T], data: bytes, key: str, inside_bytes: int = 0) -> T:
        if max(len(data), inside_bytes) <= _SMALL_BYTES:
            return parse(data, key)
        parsed: T = await self._ambient.offload(parse, data, key)
        return parsed


def _stored(manifest: Manifest) -> tuple[bytes, Position]:
    data = manifest.to_bytes()
    return data, manifest.position(data)


def _parse_register(data: bytes, key: str) -> Sealing | Abort:
    if record_format(data, key=key) == Abort.FORMAT:
        return Abort.parse(data, key=key)
    manifest = Manifest.parse(data, key=key)
    return Sealing(manifest, manifest.position(data))


def _parse_manifest(data: bytes, key: str) -> Manifest:
    manifest = Manifest.parse(data, key=key)
    if parse_key(key).version != manifest.version:
        raise FormatError(f"{key} describes version {manifest.version}")
    return manifest


def _parse_receipt(data: bytes, key: str) -> Receipt:
    return Receipt.parse(data, key=key)


def _parse_layout(data: bytes, key: str) -> Layout:
    """As reading.read_layout, which would unpack and parse a large one on the event loop."""
    raw = unpack(data, key=key)
    found = sha256_hex(raw)
    if parse_key(key).sha256 != found:
        raise DigestMismatch(f"{key} has SHA-256 {found}: it was altered or damaged")
    return Layout.parse(raw, key=key)


def _parse_offer(data: bytes, key: str) -> Offer:
    return Offer.parse(unpack(data, key=key), key=key)

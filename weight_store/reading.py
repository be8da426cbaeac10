"""Reading the bucket the way every reader must: by digest, bounded, from the head downwards. Never by LIST."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weight_store.errors import DigestMismatch, FormatError, ObjectNotFound, StoreUnavailable
from weight_store.head import Head
from weight_store.keys import asset_key, head_key, layout_key, manifest_key, receipt_key, shard_key
from weight_store.layout import Layout
from weight_store.manifest import Manifest, ReceiptRef
from weight_store.position import Position
from weight_store.receipt import BLOCK_BYTES, SHARD_MAGIC, Asset, GroupRange, Receipt
from weight_store.records import MAX_COLUMNS_BYTES, MAX_RECORD_BYTES, sha256_hex, unpack
from weight_store.store import Blob, Store

if TYPE_CHECKING:
    from hashlib import _Hash as Hash

MAX_FETCH_BYTES = 32 << 20
"""Neighbouring groups are fetched in one request up to about this size."""
_READINGS = 4


async def read_head(store: Store, run: str, *, agreed: bool = False) -> tuple[Head, str]:
    """Return the head and the ETag under which it can be replaced; ``ObjectNotFound`` if the run does not exist.

    ``agreed``: as :func:`read_agreed` does.
    """
    key = head_key(run)
    try:
        blob = (await read_agreed(store, key))[0] if agreed else await store.get(key, max_bytes=MAX_RECORD_BYTES)
    except ObjectNotFound as error:
        raise ObjectNotFound(f"there is no run {run!r} in this store: {error}", key=key) from None
    return Head.parse(blob.data, key=key), blob.etag


async def read_agreed(
    store: Store, key: str, known: Iterable[str] = (), *, max_bytes: int = MAX_RECORD_BYTES
) -> tuple[Blob, str]:
    """Return an object and its SHA-256 once two readings agree, or one has a SHA-256 that is ``known``.

    For what is named by no digest, by whoever writes or deletes because of it: a bit that flips on the way once must
    not become what the bucket says from then on. ``StoreUnavailable`` if no two readings agree.
    """
    seen = set(known)
    for _ in range(_READINGS):
        blob = await store.get(key, max_bytes=max_bytes)
        found = sha256_hex(blob.data)
        if found in seen:
            return blob, found
        seen.add(found)
    raise StoreUnavailable(
        f"{key} reads otherwise each time: memory, a proxy or the network between here and the store alters it", key=key
    )


async def read_verified(store: Store, key: str, sha256: str, *, max_bytes: int = MAX_RECORD_BYTES) -> bytes:
    """Return an object's bytes if they have the SHA-256 by which they are named; ``DigestMismatch`` otherwise."""
    data = (await store.get(key, max_bytes=max_bytes)).data
    found = sha256_hex(data)
    if found != sha256:
        raise DigestMismatch(f"{key} has SHA-256 {found}, expected {sha256}: it was altered or damaged")
    return data


async def read_manifest(store: Store, run: str, position: Position) -> Manifest:
    """Return the manifest of exactly this position."""
    key = manifest_key(run, position.version)
    manifest = Manifest.parse(await read_verified(store, key, position.sha256), key=key)
    if manifest.version != position.version:
        raise FormatError(f"{key} describes version {manifest.version}")
    return manifest


def check_head(head: Head, manifest: Manifest | None) -> None:
    """``FormatError`` if the head is of another run than the manifest that it names, or of an earlier term."""
    if manifest is not None and (head.run_id != manifest.run_id or head.term < manifest.term):
        raise FormatError(
            f"the head is of run {head.run_id} in term {head.term}, but its version {manifest.version} was sealed for "
            f"run {manifest.run_id} in term {manifest.term}: something else wrote or damaged head.json"
        )


async def read_layout(store: Store, run: str, sha256: str) -> Layout:
    """Return a layout by the digest of its JSON."""
    key = layout_key(run, sha256)
    raw = unpack((await store.get(key, max_bytes=MAX_COLUMNS_BYTES)).data, key=key)
    found = sha256_hex(raw)
    if found != sha256:
        raise DigestMismatch(f"{key} has SHA-256 {found}: it was altered or damaged")
    return Layout.parse(raw, key=key)


async def read_receipt(
    store: Store, run: str, position: Position, rank: int, ref: ReceiptRef, *, extra_full: bool = False
) -> Receipt:
    """Return rank ``rank``'s receipt as a manifest refers to it."""
    key = receipt_key(run, position.version, rank, extra_full=extra_full)
    receipt = Receipt.parse(await read_verified(store, key, ref.sha256), key=key)
    if (receipt.version, receipt.rank, receipt.extra_full) != (position.version, rank, extra_full):
        raise FormatError(f"{key} is the receipt of rank {receipt.rank} at version {receipt.version}")
    if receipt.shard_bytes != ref.shard_bytes:
        raise FormatError(f"{key} and the manifest disagree on the size of the shard")
    return receipt


async def read_asset(store: Store, run: str, asset: Asset) -> bytes:
    """Return the content of an asset, verified."""
    key = asset_key(run, asset.sha256)
    return await read_verified(store, key, asset.sha256, max_bytes=asset.size)


@dataclass(frozen=True, slots=True)
class Fetched:
    """One group's payload, valid until the next item is taken from the iterator."""

    range: GroupRange
    payload: memoryview


@dataclass(frozen=True, slots=True)
class Request:
    """Neighbouring groups fetched in one ranged GET of ``size`` bytes at ``offset``."""

    offset: int
    size: int
    ranges: tuple[GroupRange, ...]


def coalesce(ranges: Iterable[GroupRange], max_bytes: int = MAX_FETCH_BYTES) -> list[Request]:
    """Join groups that touch into requests of about ``max_bytes``; a larger group is a request of its own."""
    requests: list[Request] = []
    pending: list[GroupRange] = []
    for item in sorted(ranges, key=lambda r: r.offset):
        end = pending[-1].offset + pending[-1].size if pending else item.offset
        if pending and (item.offset != end or item.offset + item.size - pending[0].offset > max_bytes):
            requests.append(_request(pending))
            pending = []
        pending.append(item)
    return [*requests, _request(pending)] if pending else requests


def _request(ranges: Sequence[GroupRange]) -> Request:
    first, last = ranges[0], ranges[-1]
    return Request(first.offset, last.offset + last.size - first.offset, tuple(ranges))


async def fetch_groups(
    store: Store, run: str, receipt: Receipt, ranges: Iterable[GroupRange], *, parallel: int = 4
) -> AsyncIterator[Fetched]:
    """Yield the payloads of ``ranges`` in order, ``parallel`` ranged GETs ahead. Memory: that many requests.

    Every 8 MiB block of the shard that the requests cover whole is checked against its SHA-256; group digests are the
    caller's to check after decoding. ``DigestMismatch`` names the shard and the block.
    """
    key = shard_key(run, receipt.version, receipt.rank, receipt.nonce, extra_full=receipt.extra_full)
    checker = _BlockChecker(key, receipt)
    waiting: list[tuple[Request, asyncio.Task[bytearray]]] = []
    todo = iter(coalesce(ranges))
    try:
        while True:
            while len(waiting) < parallel and (request := next(todo, None)) is not None:
                waiting.append((request, asyncio.ensure_future(_fetch(store, key, request))))
            if not waiting:
                return
            request, task = waiting.pop(0)
            data = await task
            await asyncio.to_thread(checker.feed, request.offset, data)
            view = memoryview(data)
            for item in request.ranges:
                start = item.offset - request.offset
                yield Fetched(item, view[start : start + item.size])
    finally:
        for _, task in waiting:
            task.cancel()
        await asyncio.gather(*(task for _, task in waiting), return_exceptions=True)


async def _fetch(store: Store, key: str, request: Request) -> bytearray:
    buffer = bytearray(request.size)
    if request.size:
        await store.read_into(key, request.offset, memoryview(buffer))
    return buffer


class _BlockChecker:
    """SHA-256 of blocks as their bytes pass in order; a gap leaves the blocks around it unchecked."""

    def __init__(self, key: str, receipt: Receipt) -> None:
        self._key = key
        self._receipt = receipt
        self._next = 0
        self._hash: Hash | None = hashlib.sha256()

    def feed(self, offset: int, data: bytearray) -> None:
        """Take ``data`` found at ``offset``; raises ``DigestMismatch`` for the first block that differs."""
        if self._next == 0 and offset == len(SHARD_MAGIC):
            self._take(memoryview(SHARD_MAGIC))
        if offset != self._next:
            self._next, self._hash = offset, None
        self._take(memoryview(data))

    def _take(self, view: memoryview) -> None:
        while view:
            if self._next % BLOCK_BYTES == 0:
                self._hash = hashlib.sha256()
            room = BLOCK_BYTES - self._next % BLOCK_BYTES
            part, view = view[:room], view[room:]
            if self._hash is not None:
                self._hash.update(part)
            self._next += len(part)
            if self._next % BLOCK_BYTES == 0 or self._next == self._receipt.shard_bytes:
                self._check((self._next - 1) // BLOCK_BYTES)

    def _check(self, block: int) -> None:
        if self._hash is not None and self._hash.hexdigest() != self._receipt.block_sha256(block):
            raise DigestMismatch(
                f"block {block} of {self._key} (8 MiB from byte {block * BLOCK_BYTES}) is damaged: it has SHA-256 "
                f"{self._hash.hexdigest()}, expected {self._receipt.block_sha256(block)}"
            )

"""One rank's shard and receipt: streamed into the bucket while later groups are still being encoded."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coordinator.wire import VersionAnswer
from trainer_agent.encoding import Damage, Encoder, Job
from weight_store.errors import DigestMismatch, FormatError
from weight_store.keys import receipt_key, shard_key
from weight_store.position import Position
from weight_store.reading import read_agreed
from weight_store.receipt import BLOCK_BYTES, SHARD_MAGIC, Asset, FullRef, Receipt
from weight_store.records import MAX_RECORD_BYTES, sha256_hex
from weight_store.register import Created, create_or_read
from weight_store.store import Store

if TYPE_CHECKING:
    from hashlib import _Hash as Hash


@dataclass(frozen=True, slots=True)
class Envelope:
    """What a receipt says beside its groups. ``digests``: what those of the groups must be, where that is known."""

    run: str
    run_id: str
    version: int
    rank: int
    parent: Position
    layout: str
    extra_full: bool = False
    fulls: tuple[FullRef, ...] = ()
    assets: tuple[Asset, ...] = ()
    digests: str = ""


def envelope_of(answer: VersionAnswer, rank: int, fulls: tuple[FullRef, ...], assets: tuple[Asset, ...]) -> Envelope:
    """The envelope of rank ``rank``'s part of an opened version."""
    return Envelope(
        run=answer.run,
        run_id=answer.run_id,
        version=answer.version,
        rank=rank,
        parent=answer.parent,
        layout=answer.layout,
        fulls=fulls,
        assets=assets,
    )


@dataclass(frozen=True, slots=True)
class SentShard:
    """The receipt that counts, as stored. ``ours``: this attempt's; otherwise one from before a restart.

    ``damaged``: groups sent whole because their base in the arena no longer had its digest.
    """

    receipt: Receipt
    stored: bytes
    ours: bool
    encode_s: float
    upload_s: float
    damaged: tuple[Damage, ...]

    def full_ref(self) -> FullRef:
        """How later receipts refer to it, if it is an extra full's."""
        return FullRef(
            version=self.receipt.version,
            sha256=sha256_hex(self.stored),
            size=len(self.stored),
            shard_bytes=self.receipt.shard_bytes,
        )


class BlockHasher:
    """SHA-256 of every ``BLOCK_BYTES`` of a stream; the last block may be shorter."""

    def __init__(self) -> None:
        self._done: list[str] = []
        self._hash: Hash = hashlib.sha256()
        self._filled = 0
        self.total = 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        view = memoryview(data)
        while view:
            part, view = view[: BLOCK_BYTES - self._filled], view[BLOCK_BYTES - self._filled :]
            self._hash.update(part)
            self._filled += len(part)
            self.total += len(part)
            if self._filled == BLOCK_BYTES:
                self._close()

    def finish(self) -> str:
        """All digests in order, as hex."""
        if self._filled:
            self._close()
        return "".join(self._done)

    def _close(self) -> None:
        self._done.append(self._hash.hexdigest())
        self._hash, self._filled = hashlib.sha256(), 0


async def send_shard(
    store: Store, encoder: Encoder, jobs: Iterable[Job], envelope: Envelope, *, nonce: str, clock: Callable[[], float]
) -> SentShard:
    """Upload the groups under a fresh ``nonce`` and report them. The receipt that was first in the bucket counts.

    ``DigestMismatch``, and nothing is stored, if the groups do not have the digests that the envelope asks for.
    """
    key = shard_key(envelope.run, envelope.version, envelope.rank, nonce, extra_full=envelope.extra_full)
    hasher = BlockHasher()
    sizes: list[int] = []
    changed: list[int] = []
    digests: list[str] = []
    full: list[int] = []
    damaged: list[Damage] = []
    encode_s = 0.0
    started_s = clock()
    async with store.upload(key) as upload:
        hasher.feed(SHARD_MAGIC)
        await upload.write(SHARD_MAGIC)
        async with contextlib.aclosing(encoder.encode(jobs)) as groups:
            async for group in groups:
                if group.full:
                    full.append(len(sizes))
                sizes.append(len(group.payload))
                changed.append(group.changed)
                digests.append(group.digest.hex())
                if group.damage is not None:
                    damaged.append(group.damage)
                encode_s += group.seconds
                await asyncio.to_thread(hasher.feed, group.payload)
                await upload.write(group.payload)
        if envelope.digests not in ("", "".join(digests)):
            raise DigestMismatch(
                f"the weights of version {envelope.version} in shared memory no longer have its digests: something "
                "wrote to them, or the memory is faulty"
            )
        await upload.commit()
    receipt = Receipt(
        run_id=envelope.run_id,
        version=envelope.version,
        rank=envelope.rank,
        parent=envelope.parent,
        layout=envelope.layout,
        extra_full=envelope.extra_full,
        nonce=nonce,
        shard_bytes=hasher.total,
        sizes=tuple(sizes),
        changed=tuple(changed),
        digests="".join(digests),
        full=tuple(full),
        blocks=hasher.finish(),
        fulls=envelope.fulls,
        assets=envelope.assets,
    )
    found = await _store_receipt(store, envelope, receipt)
    return SentShard(*found, encode_s=encode_s, upload_s=clock() - started_s, damaged=tuple(damaged))


async def _store_receipt(store: Store, envelope: Envelope, receipt: Receipt) -> tuple[Receipt, bytes, bool]:
    key = receipt_key(envelope.run, envelope.version, envelope.rank, extra_full=envelope.extra_full)
    data = receipt.to_bytes()
    result = await create_or_read(store, key, data, MAX_RECORD_BYTES)
    if isinstance(result, Created):
        return receipt, data, True
    found = Receipt.parse(result.data, key=key)
    if found.run_id != envelope.run_id:
        raise FormatError(
            f"{key} is of run {found.run_id}: it was left behind by, or written for, an earlier run of this name"
        )
    return found, result.data, False


async def find_receipt(store: Store, run: str, version: int, rank: int) -> tuple[Receipt, bytes]:
    """The receipt that this rank stored, perhaps before a restart; ``ObjectNotFound`` if it did not."""
    key = receipt_key(run, version, rank)
    blob, _ = await read_agreed(store, key)  # named by no digest, and reported by the one that is found here
    return Receipt.parse(blob.data, key=key), blob.data

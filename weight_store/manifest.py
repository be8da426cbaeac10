"""The manifest: the sealed description of a version, a pure function of open record, receipts and parent manifest.

No clock and no writer enter it, so that two coordinators which seal the same version write the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Self

from pydantic import Field, ValidationError, model_validator

from weight_store.errors import FormatError
from weight_store.head import Term
from weight_store.layout import Layout
from weight_store.position import GENESIS, Position
from weight_store.receipt import Asset, FullRef, Receipt, check_receipt
from weight_store.records import MAX_RANKS, Count, Part, Record, Sha256, Uuid, Version, sha256_hex
from weight_store.version import Open, WorldSize

MAX_CHAIN = 100_000
OLDER_LINKS = 64
"""Links kept before the newest full, so that a replica a few versions behind never needs that full."""


class ReceiptRef(Part):
    """One rank's receipt by digest. Ranks are implied by order."""

    sha256: Sha256
    size: Annotated[int, Field(ge=1, le=64 << 20)]
    shard_bytes: Count


class Link(Part):
    """An earlier version on the way from the newest full: its position and what it costs to fetch."""

    version: Version
    sha256: Sha256
    payload_bytes: Count

    @property
    def position(self) -> Position:
        """The link as a position."""
        return Position(version=self.version, sha256=self.sha256)


class Manifest(Record):
    """``v/<version>/manifest.json``.

    ``full_version`` is the newest version known to be obtainable without a base: this one, if every group of it is
    full; else one of ``chain``. ``extra_full`` then lists the receipts of its extra full, or is empty if its own shards
    are full. ``chain`` leads to the parent, from at most ``OLDER_LINKS`` versions before ``full_version``.
    """

    FORMAT: ClassVar[str] = "weightcast.manifest"

    run_id: Uuid
    version: Annotated[int, Field(ge=1, le=10**12 - 1)]
    term: Term
    step: Count
    ordinal: Count
    parent: Position
    layout: Sha256
    world_size: WorldSize
    receipts: tuple[ReceiptRef, ...]
    payload_bytes: Count
    changed: Count
    elements: Count
    weight_bytes: Count
    full_version: Version
    full_bytes: Count
    extra_full: Annotated[tuple[ReceiptRef, ...], Field(max_length=MAX_RANKS)] = ()
    chain: Annotated[tuple[Link, ...], Field(max_length=MAX_CHAIN)] = ()
    assets: tuple[Asset, ...] = Field(default=(), max_length=256)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.receipts) != self.world_size:
            raise ValueError("number of receipts differs from the world size")
        if self.parent.version >= self.version or (self.parent.version == 0 and self.parent != GENESIS):
            raise ValueError("the parent is not older than the version")
        versions = [link.version for link in self.chain]
        if versions != sorted(set(versions)):
            raise ValueError("the chain is out of order")
        if self.chain and self.chain[-1].position != self.parent:
            raise ValueError("the chain does not end at the parent")
        if self.full_version == self.version:
            if self.extra_full:
                raise ValueError("a version that is its own full has no extra full")
        elif self.full_version not in versions:
            raise ValueError("the full is not in the chain")
        return self

    def position(self, data: bytes) -> Position:
        """The position whose manifest was stored as ``data``."""
        return Position(version=self.version, sha256=sha256_hex(data))


def seal(
    opened: Open,
    layout: Layout,
    receipts: Sequence[tuple[Receipt, bytes]],
    parent: tuple[Manifest, Position] | None,
) -> Manifest:
    """Make the manifest of ``opened`` from all ranks' receipts (parsed, and as stored) and the parent's manifest.

    Raises ``FormatError`` naming rank and tensor if the receipts do not cover the layout or do not belong here.
    """
    if (parent[1] if parent else GENESIS) != opened.parent:
        raise FormatError(f"version {opened.version} starts from {opened.parent}, not from the manifest given")
    if len(receipts) != opened.world_size or layout.world_size != opened.world_size:
        raise FormatError(f"version {opened.version} has {len(receipts)} receipts of {opened.world_size}")
    for rank, (receipt, _) in enumerate(receipts):
        check_belongs(receipt, opened, rank)
        check_receipt(receipt, layout)
        if parent is None and len(receipt.full) != len(receipt.sizes):
            raise FormatError(f"rank {rank} reports a delta, but version {opened.version} has no parent")
    refs = tuple(
        ReceiptRef(sha256=sha256_hex(data), size=len(data), shard_bytes=receipt.shard_bytes)
        for receipt, data in receipts
    )
    payload_bytes = sum(ref.shard_bytes for ref in refs)
    full_version, full_bytes, extra_full, chain = _newest_full(opened, receipts, parent, payload_bytes)
    try:
        return Manifest(
            run_id=opened.run_id,
            version=opened.version,
            term=opened.term,
            step=opened.step,
            ordinal=opened.ordinal,
            parent=opened.parent,
            layout=opened.layout,
            world_size=opened.world_size,
            receipts=refs,
            payload_bytes=payload_bytes,
            changed=sum(sum(receipt.changed) for receipt, _ in receipts),
            elements=layout.elements,
            weight_bytes=layout.nbytes,
            full_version=full_version,
            full_bytes=full_bytes,
            extra_full=extra_full,
            chain=chain,
            assets=receipts[0][0].assets or (parent[0].assets if parent else ()),
        )
    except ValidationError as error:
        reason = error.errors(include_url=False, include_input=False)[0]["msg"]
        raise FormatError(f"version {opened.version} makes no valid manifest: {reason}") from None


def check_belongs(receipt: Receipt, opened: Open, rank: int) -> None:
    """``FormatError`` unless the receipt is rank ``rank``'s report of exactly this opening."""
    expected = (opened.run_id, opened.version, rank, opened.parent, opened.layout, False)
    found = (
        receipt.run_id,
        receipt.version,
        receipt.rank,
        receipt.parent,
        receipt.layout,
        receipt.extra_full,
    )
    if found != expected:
        raise FormatError(
            f"the receipt of rank {receipt.rank} names version {receipt.version}, parent {receipt.parent} and layout "
            f"{receipt.layout[:12]}; version {opened.version} was opened with rank {rank}, parent {opened.parent} "
            f"and layout {opened.layout[:12]}"
        )


def _newest_full(
    opened: Open,
    receipts: Sequence[tuple[Receipt, bytes]],
    parent: tuple[Manifest, Position] | None,
    payload_bytes: int,
) -> tuple[int, int, tuple[ReceiptRef, ...], tuple[Link, ...]]:
    if parent is None:
        return opened.version, payload_bytes, (), ()
    manifest, position = parent
    link = Link(version=position.version, sha256=position.sha256, payload_bytes=manifest.payload_bytes)
    chain = (*manifest.chain, link)
    if all(len(r.full) == len(r.sizes) for r, _ in receipts):
        return opened.version, payload_bytes, (), chain[-OLDER_LINKS:]
    version, full_bytes, extra = manifest.full_version, manifest.full_bytes, manifest.extra_full
    reachable = {entry.version for entry in chain}
    newer = [v for v in _complete_fulls([r for r, _ in receipts]) if v in reachable and v > version]
    if newer:
        version = max(newer)
        extra = tuple(_extra_ref(receipt, version) for receipt, _ in receipts)
        full_bytes = sum(ref.shard_bytes for ref in extra)
    start = next(i for i, entry in enumerate(chain) if entry.version == version)
    return version, full_bytes, extra, chain[max(0, start - OLDER_LINKS) :]


def _complete_fulls(receipts: Sequence[Receipt]) -> set[int]:
    """Versions whose extra full every rank has reported durable."""
    reported = [{ref.version for ref in receipt.fulls} for receipt in receipts]
    return set.intersection(*reported) if reported else set()


def _extra_ref(receipt: Receipt, version: int) -> ReceiptRef:
    ref: FullRef = next(ref for ref in receipt.fulls if ref.version == version)
    return ReceiptRef(sha256=ref.sha256, size=ref.size, shard_bytes=ref.shard_bytes)

"""A rank's base from the bucket: its own groups only, along the cheapest chain, verified by digest."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import codec
from trainer_agent.decisions import due_fulls
from trainer_agent.encoding import Bits
from trainer_agent.slots import Slots
from trainer_agent.state import Base
from weight_store.chain import Hop, plan_chain, receipts_of
from weight_store.errors import DigestMismatch, FormatError, ObjectNotFound
from weight_store.finishing import in_thread
from weight_store.keys import receipt_key
from weight_store.layout import Layout
from weight_store.manifest import Manifest
from weight_store.position import Position
from weight_store.reading import Fetched, fetch_groups, read_agreed, read_manifest, read_receipt
from weight_store.receipt import FullRef, Receipt, group_ranges
from weight_store.store import Store

_log = logging.getLogger(__name__)


async def rebuild_base(
    store: Store,
    run: str,
    position: Position,
    layout: tuple[str, Layout],
    rank: int,
    slots: Slots,
    slot: int,
    applied: Callable[[int, int], None] = lambda version, groups: None,
) -> Base | None:
    """Fill ``slot`` with this rank's weights at ``position``; None if a version on the way had another layout.

    ``applied(version, n)`` is called when ``n`` groups of a version on the way are applied.
    The slot's content is undefined until this returns. Raises what the store raises, and ``FormatError`` or
    ``CodecError`` if the bucket holds something else than was sealed.
    """
    target = await read_manifest(store, run, position)
    manifests: list[tuple[Hop, Manifest]] = []
    for hop in plan_chain(None, target, position):
        manifest = target if hop.position == position else await read_manifest(store, run, hop.position)
        if manifest.layout != layout[0]:
            _log.info("version %d has another layout; a full shard is sent instead", hop.position.version)
            return None
        manifests.append((hop, manifest))
    receipt: Receipt | None = None
    for hop, manifest in manifests:
        refs = receipts_of(hop, manifest, run)
        if rank >= len(refs):
            raise FormatError(
                f"version {hop.position} of {run!r} has {len(refs)} ranks, but its layout has "
                f"{layout[1].world_size}: its manifest was altered"
            )
        receipt = await read_receipt(store, run, hop.position, rank, refs[rank], extra_full=bool(hop.extra_full))
        await _apply(store, run, receipt, layout[1], slots, slot, applied)
    if receipt is None:
        return None
    return Base(slot=slot, position=position, digests=receipt.digests)


async def earlier_fulls(
    store: Store, run: str, position: Position, layout: str, rank: int, full_every: int
) -> tuple[FullRef, ...]:
    """This rank's parts of extra fulls that an earlier launch left, and that no version up to ``position`` lists.

    To be asked where the base was rebuilt: the versions in question are those on the way, all of this ``layout``.
    Raises what the store raises, and ``FormatError`` if the bucket holds something else than was sealed.
    """
    target = await read_manifest(store, run, position)
    found: list[FullRef] = []
    for version in due_fulls(target, full_every):
        key = receipt_key(run, version, rank, extra_full=True)
        try:
            blob, sha256 = await read_agreed(store, key)  # named by no digest yet
        except ObjectNotFound:
            continue
        receipt = Receipt.parse(blob.data, key=key)
        says = (receipt.run_id, receipt.version, receipt.rank, receipt.layout, receipt.extra_full)
        if says != (target.run_id, version, rank, layout, True):
            raise FormatError(f"{key} is not of this run, version, rank and layout")
        full = FullRef(version=version, sha256=sha256, size=len(blob.data), shard_bytes=receipt.shard_bytes)
        found.append(full)
    return tuple(found)


async def _apply(
    store: Store,
    run: str,
    receipt: Receipt,
    layout: Layout,
    slots: Slots,
    slot: int,
    applied: Callable[[int, int], None],
) -> None:
    ranges = group_ranges(receipt, layout)
    entries = {item.group.index: entry for entry, item in enumerate(ranges)}
    views: Sequence[Bits] = [slots.view(slot, entry) for entry in range(len(ranges))]
    done = 0
    async for fetched in fetch_groups(store, run, receipt, ranges):
        view = views[entries[fetched.range.group.index]]
        # Never left behind: once the version is given up, the trainer may copy into this slot.
        await in_thread(_apply_group, receipt, fetched, view)
        done += 1
        applied(receipt.version, done)


def _apply_group(receipt: Receipt, fetched: Fetched, view: Bits) -> None:
    group = fetched.range.group
    base = view if codec.needs_base(fetched.payload) else None
    change = codec.decode_group(base, fetched.payload, group.dtype, group.elements)
    if change.digest != fetched.range.digest:
        raise DigestMismatch(
            f"the group of {group.pieces[0].tensor.name} of rank {receipt.rank} at version {receipt.version} has "
            f"digest {change.digest.hex()}, expected {fetched.range.digest.hex()}"
        )
    codec.apply_change(view, change)

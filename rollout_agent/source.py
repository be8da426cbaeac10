"""What a replica reads from the bucket about versions: heads, manifests, receipts, layouts; by digest, bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from codec.dtypes import BY_NAME
from rollout_agent.errors import DamagedObject, WrongRun
from rollout_agent.state import Version
from weight_store.chain import Hop, receipts_of
from weight_store.head import Head
from weight_store.layout import Layout
from weight_store.manifest import Manifest
from weight_store.position import Position
from weight_store.reading import read_asset, read_head, read_layout, read_manifest, read_receipt
from weight_store.receipt import Asset, GroupRange, Receipt, group_ranges
from weight_store.store import Store

_PARALLEL_READS = 16
_CACHED_LAYOUTS = 2


@dataclass(frozen=True, slots=True)
class LoadedHop:
    """A hop with all that is needed to fetch any of its groups. ``ranges``: by group index of ``layout``."""

    hop: Hop
    version: Version
    layout: Layout
    receipts: tuple[Receipt, ...]
    ranges: Mapping[int, GroupRange]

    @property
    def table(self) -> dict[int, bytes]:
        """Digest of each group after this hop."""
        return {index: item.digest for index, item in self.ranges.items()}


class Source:
    """The run ``run`` in ``store``."""

    def __init__(self, store: Store, run: str) -> None:
        self.store = store
        self.run = run
        self.run_id: str | None = None
        """Once known, manifests and receipts of another run of this name are refused."""
        self._layouts: dict[str, Layout] = {}
        self._manifest: tuple[Position, Manifest] | None = None
        self._slots = asyncio.Semaphore(_PARALLEL_READS)

    async def head(self) -> Head:
        """The pointer, as it is now; ``ObjectNotFound`` if nobody has published to this run."""
        head, _ = await read_head(self.store, self.run)
        return head

    async def manifest(self, position: Position) -> Manifest:
        """The manifest of exactly this position; ``WrongRun`` if it is another run's."""
        manifest = await self._read_manifest(position)
        if self.run_id is not None and manifest.run_id != self.run_id:
            raise WrongRun(f"version {position} of {self.run!r} belongs to run id {manifest.run_id}, not {self.run_id}")
        return manifest

    async def _read_manifest(self, position: Position) -> Manifest:
        """The last one is kept: a step asks for its target's when it plans, and again for each hop that ends there."""
        if self._manifest is None or self._manifest[0] != position:
            self._manifest = position, await read_manifest(self.store, self.run, position)
        return self._manifest[1]

    async def check_owner(self, head: Head) -> None:
        """``DamagedObject`` unless the manifest that a head leads to is of the run that the head names.

        Nothing vouches for a head's own bytes; a directory must not be given to a run that a flipped bit made up.
        """
        manifest = await self._read_manifest(head.position)
        if manifest.run_id != head.run_id:
            raise DamagedObject(
                f"the head of {self.run!r} names run id {head.run_id}, the manifest of version {head.position} that it "
                f"leads to {manifest.run_id}: one of them was altered or damaged on the way"
            )

    async def layout(self, sha256: str) -> Layout:
        """The layout of this digest; the last two are kept."""
        if sha256 not in self._layouts:
            layout = await read_layout(self.store, self.run, sha256)
            _check_dtypes(self.run, sha256, layout)
            for stale in list(self._layouts)[: 1 - _CACHED_LAYOUTS]:
                del self._layouts[stale]
            self._layouts[sha256] = layout
        return self._layouts[sha256]

    async def asset(self, asset: Asset) -> bytes:
        """Content of an asset, verified."""
        return await read_asset(self.store, self.run, asset)

    async def load(self, hop: Hop) -> LoadedHop:
        """Read a hop's manifest, receipts and layout. ``FormatError`` or ``DamagedObject`` if they do not fit."""
        manifest = await self.manifest(hop.position)
        extra_full = bool(hop.extra_full)
        refs = receipts_of(hop, manifest, self.run)

        async def one(rank: int) -> Receipt:
            async with self._slots:
                return await read_receipt(self.store, self.run, hop.position, rank, refs[rank], extra_full=extra_full)

        receipts = tuple(await asyncio.gather(*(one(rank) for rank in range(len(refs)))))
        _check(self.run, hop, manifest, receipts)
        layout = await self.layout(receipts[0].layout)
        ranges = {item.group.index: item for receipt in receipts for item in group_ranges(receipt, layout)}
        if len(ranges) != len(layout.groups):
            raise DamagedObject(f"the receipts of version {hop.position} do not cover its layout")
        if hop.kind == "full" and not all(item.full for item in ranges.values()):
            raise DamagedObject(f"version {hop.position} is listed as a full but holds deltas")
        version = Version(
            position=hop.position,
            term=manifest.term,
            step=manifest.step,
            layout=receipts[0].layout,
            assets=manifest.assets,
        )
        return LoadedHop(hop, version, layout, receipts, ranges)


def _check_dtypes(run: str, sha256: str, layout: Layout) -> None:
    for tensor in layout.tensors:
        known = BY_NAME.get(tensor.dtype)
        if known is None or known.item_bytes != tensor.itemsize:
            raise DamagedObject(
                f"layout {sha256[:12]} of {run!r} has {tensor.name} as {tensor.dtype} of {tensor.itemsize} bytes, "
                "which this release does not know: upgrade weightcast"
            )


def _check(run: str, hop: Hop, manifest: Manifest, receipts: tuple[Receipt, ...]) -> None:
    for receipt in receipts:
        if receipt.run_id != manifest.run_id or receipt.layout != receipts[0].layout:
            raise DamagedObject(
                f"the receipt of rank {receipt.rank} at version {hop.position} of {run!r} is of another run or layout"
            )
        if hop.kind == "delta" and receipt.parent != manifest.parent:
            raise DamagedObject(
                f"rank {receipt.rank} encoded version {hop.position} against {receipt.parent}, "
                f"not against its parent {manifest.parent}"
            )

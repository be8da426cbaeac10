"""Builders of records that belong together; tests change what they are about."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import xxhash

from weight_store.boxes import Box, whole
from weight_store.layout import Layout
from weight_store.manifest import Manifest, seal
from weight_store.offer import Offer
from weight_store.position import GENESIS, Position
from weight_store.receipt import BLOCK_BYTES, SHARD_MAGIC, FullRef, Receipt
from weight_store.records import sha256_hex
from weight_store.version import Open

Row = tuple[str, tuple[int, ...], Box]


class Make:
    """Everything of one run, term 1 unless said otherwise."""

    run_id = "00000000-0000-4000-8000-000000000001"
    run = "demo"

    def offer(
        self,
        rank: int,
        world_size: int,
        rows: Iterable[Row],
        *,
        dtype: str | Sequence[str] = "BF16",
        itemsize: int = 2,
        **more: Any,
    ) -> Offer:
        rows = list(rows)
        dtypes = (dtype,) * len(rows) if isinstance(dtype, str) else tuple(dtype)
        fields = {
            "run_id": self.run_id,
            "term": 1,
            "rank": rank,
            "world_size": world_size,
            "names": tuple(name for name, _, _ in rows),
            "dtypes": dtypes,
            "itemsizes": (itemsize,) * len(rows),
            "shapes": tuple(shape for _, shape, _ in rows),
            "offsets": tuple(box.offsets for _, _, box in rows),
            "sizes": tuple(box.sizes for _, _, box in rows),
        }
        return Offer(**{**fields, **more})

    def offers(self, *ranks: Iterable[Row], **more: Any) -> list[Offer]:
        return [self.offer(rank, len(ranks), rows, **more) for rank, rows in enumerate(ranks)]

    def columns(self, pieces: Iterable[tuple[int, Box]], shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
        """Fields of a layout of one rank: one group of all ``pieces`` (tensor index, box)."""
        pieces = list(pieces)
        return {
            "world_size": 1,
            "names": tuple(shapes),
            "dtypes": ("BF16",) * len(shapes),
            "itemsizes": (2,) * len(shapes),
            "shapes": tuple(shapes.values()),
            "piece_tensor": tuple(tensor for tensor, _ in pieces),
            "piece_offsets": tuple(box.offsets for _, box in pieces),
            "piece_sizes": tuple(box.sizes for _, box in pieces),
            "group_owner": (0,) if pieces else (),
            "group_start": (0,) if pieces else (),
        }

    def layout(self, world_size: int = 2, layers: int = 2) -> Layout:
        """``layers`` layers of one tensor of 8 elements for each rank."""
        names = [f"layers.{layer}.w{rank}" for layer in range(layers) for rank in range(world_size)]
        return Layout(
            world_size=world_size,
            names=tuple(names),
            dtypes=("BF16",) * len(names),
            itemsizes=(2,) * len(names),
            shapes=((2, 4),) * len(names),
            piece_tensor=tuple(range(len(names))),
            piece_offsets=((0, 0),) * len(names),
            piece_sizes=((2, 4),) * len(names),
            group_owner=tuple(range(world_size)) * layers,
            group_start=tuple(range(len(names))),
        )

    def shard(self, layout: Layout, rank: int, fill: int = 0, size: int | None = None) -> list[bytes]:
        """Payloads of one rank: one a group; what is in them does not matter here."""
        return [
            bytes([fill + i]) * (group.nbytes if size is None else size) for i, group in enumerate(layout.owned(rank))
        ]

    def opened(self, layout: Layout, version: int = 1, parent: Position = GENESIS, **more: Any) -> Open:
        fields = {
            "run_id": self.run_id,
            "version": version,
            "term": 1,
            "step": 10 * version,
            "ordinal": version - 1,
            "parent": parent,
            "layout": sha256_hex(layout.to_bytes()),
            "world_size": layout.world_size,
            "write_id": "0" * 16,
        }
        return Open(**{**fields, **more})

    def receipt(self, opened: Open, layout: Layout, rank: int, payloads: Sequence[bytes], **more: Any) -> Receipt:
        shard = SHARD_MAGIC + b"".join(payloads)
        entries = range(len(payloads))
        fields = {
            "run_id": opened.run_id,
            "version": opened.version,
            "rank": rank,
            "parent": opened.parent,
            "layout": opened.layout,
            "nonce": f"{rank:016x}",
            "shard_bytes": len(shard),
            "sizes": tuple(len(payload) for payload in payloads),
            "changed": tuple(1 for _ in entries),
            "digests": "".join(xxhash.xxh3_128_hexdigest(payload) for payload in payloads),
            "full": tuple(entries) if opened.parent == GENESIS or more.get("extra_full") else (),
            "blocks": "".join(
                hashlib.sha256(shard[start : start + BLOCK_BYTES]).hexdigest()
                for start in range(0, len(shard), BLOCK_BYTES)
            ),
        }
        return Receipt(**{**fields, **more})

    def receipts(
        self, opened: Open, layout: Layout, *, size: int | None = None, **more: Any
    ) -> list[tuple[Receipt, bytes]]:
        made = [
            self.receipt(opened, layout, rank, self.shard(layout, rank, size=size), **more)
            for rank in range(layout.world_size)
        ]
        return [(receipt, receipt.to_bytes()) for receipt in made]

    def full_ref(self, version: int, size: int = 40) -> FullRef:
        return FullRef(version=version, sha256=f"{version:064x}", size=100, shard_bytes=size)

    def seal(
        self,
        layout: Layout,
        parent: tuple[Manifest, Position] | None = None,
        version: int | None = None,
        *,
        size: int | None = None,
        **more: Any,
    ) -> tuple[Manifest, Position]:
        """The next version after ``parent``; ``more`` goes into every receipt."""
        before = parent[1] if parent else GENESIS
        opened = self.opened(layout, before.version + 1 if version is None else version, before)
        manifest = seal(opened, layout, self.receipts(opened, layout, size=size, **more), parent)
        return manifest, manifest.position(manifest.to_bytes())

    def rows(self, name: str, shape: tuple[int, ...], *boxes: Box) -> list[Row]:
        return [(name, shape, box) for box in boxes or (whole(shape),)]


@pytest.fixture(scope="session")
def make() -> Make:
    return Make()

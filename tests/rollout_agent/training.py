"""A trainer in miniature: writes offers, shards, receipts, manifests and the head straight into a store."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from codec import encode_group
from weight_store.boxes import Box, whole
from weight_store.errors import PreconditionFailed, StoreUnavailable
from weight_store.grouping import resolve_layout
from weight_store.head import Head
from weight_store.keys import (
    asset_key,
    head_key,
    layout_key,
    manifest_key,
    open_key,
    receipt_key,
    shard_key,
)
from weight_store.layout import Group, Layout
from weight_store.manifest import Manifest, seal
from weight_store.memory import MemoryStore
from weight_store.offer import Offer
from weight_store.position import GENESIS, Position
from weight_store.receipt import BLOCK_BYTES, SHARD_MAGIC, Asset, FullRef, Receipt
from weight_store.records import MAX_RECORD_BYTES, pack, sha256_hex
from weight_store.store import Store
from weight_store.version import Open

RUN_ID = "00000000-0000-4000-8000-000000000001"
OTHER_RUN_ID = "00000000-0000-4000-8000-000000000002"
ITEMSIZE = {"BF16": 2, "F32": 4, "F16": 2, "I64": 8, "F8_E4M3": 1, "U8": 1}

Weights = dict[str, np.ndarray]
Spec = tuple[str, str, tuple[int, ...], str]
"""Name, dtype, shape, and how ranks share it: ``rows``, ``cols``, ``all`` (replicated) or a rank number."""

SMALL: tuple[Spec, ...] = (
    ("model.embed_tokens.weight", "BF16", (64, 16), "rows"),
    ("model.layers.0.mlp.down.weight", "BF16", (16, 32), "cols"),
    ("model.layers.0.mlp.experts", "BF16", (3, 8, 10), "cols"),
    ("model.layers.0.norm.weight", "F32", (16,), "all"),
    ("model.layers.1.mlp.down.weight", "BF16", (16, 32), "cols"),
    ("model.layers.1.mlp.scale", "F32", (), "0"),
    ("model.layers.1.mlp.packed", "F8_E4M3", (5, 7), "1"),
    ("model.layers.1.ids", "I64", (3,), "1"),
    ("model.layers.1.empty", "BF16", (0, 4), "0"),
    ("model.norm.weight", "BF16", (33,), "all"),
)
ASSETS = {"config.json": b'{"model_type": "tiny"}', "tokenizer.json": b"{}"}


@dataclass
class Training:
    """One run. ``weights`` is the truth: raw bits by tensor name, by version in ``history``."""

    store: Store
    name: str = "tiny"
    specs: tuple[Spec, ...] = SMALL
    world: int = 2
    run_id: str = RUN_ID
    aliases: dict[str, str] = field(default_factory=lambda: {"lm_head.weight": "model.embed_tokens.weight"})
    assets: dict[str, bytes] = field(default_factory=lambda: dict(ASSETS))
    seed: int = 0
    term: int = 1
    weights: Weights = field(default_factory=dict)
    history: dict[int, Weights] = field(default_factory=dict)
    positions: dict[int, Position] = field(default_factory=dict)
    manifests: dict[int, Manifest] = field(default_factory=dict)
    layouts: dict[int, str] = field(default_factory=dict)
    position: Position = GENESIS
    published: int = 0
    aborted: int = 0
    """How many numbers before the next version were given to versions that were aborted."""
    fulls: dict[int, tuple[FullRef, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        if not self.weights:
            for name, dtype, shape, _ in self.specs:
                self.weights[name] = self._values(dtype, shape)

    def _values(self, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        raw = self.random.standard_normal(shape).astype(np.float32)
        if dtype == "F32":
            return raw.view(np.uint32)
        if dtype == "BF16":
            return (np.atleast_1d(raw).view(np.uint32) >> 16).astype(np.uint16).reshape(shape)
        width = f"uint{8 * ITEMSIZE[dtype]}"
        return self.random.integers(0, 255, shape).astype(width)

    def layout(self, world: int | None = None) -> Layout:
        return resolve_layout([self._offer(rank, world or self.world) for rank in range(world or self.world)])

    def _offer(self, rank: int, world: int) -> Offer:
        rows = [
            (name, dtype, shape, box)
            for name, dtype, shape, how in self.specs
            for box in boxes(shape, how, rank, world)
        ]
        return Offer(
            run_id=self.run_id,
            term=self.term,
            rank=rank,
            world_size=world,
            names=tuple(r[0] for r in rows),
            dtypes=tuple(r[1] for r in rows),
            itemsizes=tuple(ITEMSIZE[r[1]] for r in rows),
            shapes=tuple(r[2] for r in rows),
            offsets=tuple(r[3].offsets for r in rows),
            sizes=tuple(r[3].sizes for r in rows),
            aliases=self.aliases if rank == 0 else {},
        )

    def step(self, share: float = 0.02, names: Iterable[str] | None = None) -> None:
        """Change about ``share`` of the weights by one unit in the last place."""
        chosen = set(names) if names is not None else set(self.weights)
        for name, bits in self.weights.items():
            if name in chosen:
                flips = (self.random.random(bits.shape) < share).astype(bits.dtype)
                self.weights[name] = np.asarray(bits ^ flips)

    async def publish(
        self, *, full: Callable[[Group], bool] = lambda group: False, world: int | None = None, step: int | None = None
    ) -> Position:
        """Seal the present weights as the next version and move the head."""
        if world is not None:
            self.world = world
        layout = self.layout()
        raw = layout.to_bytes()
        sha256 = sha256_hex(raw)
        await self._once(layout_key(self.name, sha256), pack(raw))
        version = self.position.version + 1 + self.aborted
        self.aborted = 0
        base = self.history.get(self.position.version)
        opened = Open(
            run_id=self.run_id,
            version=version,
            term=self.term,
            step=self.published if step is None else step,
            ordinal=self.published,
            parent=self.position,
            layout=sha256,
            world_size=self.world,
            write_id=f"{version:016x}",
        )
        await self.store.create(open_key(self.name, version), opened.to_bytes())
        receipts = []
        for rank in range(self.world):
            receipt = await self._rank(rank, layout, opened, base, full)
            receipts.append((receipt, receipt.to_bytes()))
            await self.store.create(receipt_key(self.name, version, rank), receipts[-1][1])
        parent = (self.manifests[self.position.version], self.position) if self.position != GENESIS else None
        manifest = seal(opened, layout, receipts, parent)
        data = manifest.to_bytes()
        try:
            await self.store.create(manifest_key(self.name, version), data)
        except PreconditionFailed:  # by a coordinator beside us, which had all receipts
            found = await self.store.get(manifest_key(self.name, version), max_bytes=MAX_RECORD_BYTES)
            manifest, data = Manifest.parse(found.data), found.data
        self.position = manifest.position(data)
        self.manifests[version] = manifest
        self.layouts[version] = sha256
        self.positions[version] = self.position
        self.history[version] = {name: bits.copy() for name, bits in self.weights.items()}
        self.published += 1
        await self.move_head(self.position)
        return self.position

    async def extra_full(self, version: int) -> None:
        """Upload a full of an older version; later manifests list it."""
        layout = self.layout()
        opened = Open.parse((await self.store.get(open_key(self.name, version), max_bytes=MAX_RECORD_BYTES)).data)
        refs = []
        for rank in range(self.world):
            receipt = await self._rank(rank, layout, opened, None, lambda g: True, self.history[version], extra=True)
            data = receipt.to_bytes()
            await self.store.create(receipt_key(self.name, version, rank, extra_full=True), data)
            ref = FullRef(version=version, sha256=sha256_hex(data), size=len(data), shard_bytes=receipt.shard_bytes)
            refs.append(ref)
        self.fulls[version] = tuple(refs)

    async def _rank(
        self,
        rank: int,
        layout: Layout,
        opened: Open,
        base: Weights | None,
        full: Callable[[Group], bool],
        weights: Weights | None = None,
        *,
        extra: bool = False,
    ) -> Receipt:
        owned = layout.owned(rank)
        fulls = [i for i, group in enumerate(owned) if base is None or full(group)]
        coded = [
            encode_group(
                None if i in fulls or base is None else group_bits(group, base),
                group_bits(group, weights or self.weights),
                group.dtype,
            )
            for i, group in enumerate(owned)
        ]
        shard = SHARD_MAGIC + b"".join(item.payload for item in coded)
        nonce = f"{rank:08x}{int(extra):08x}"
        async with self.store.upload(shard_key(self.name, opened.version, rank, nonce, extra_full=extra)) as upload:
            await upload.write(shard)
            await upload.commit()
        return Receipt(
            run_id=self.run_id,
            version=opened.version,
            rank=rank,
            parent=opened.parent,
            layout=opened.layout,
            extra_full=extra,
            nonce=nonce,
            shard_bytes=len(shard),
            sizes=tuple(len(item.payload) for item in coded),
            changed=tuple(item.changed for item in coded),
            digests=b"".join(item.digest for item in coded).hex(),
            full=tuple(fulls),
            blocks="".join(sha256_hex(shard[at : at + BLOCK_BYTES]) for at in range(0, len(shard), BLOCK_BYTES)),
            fulls=() if extra else tuple(refs[rank] for refs in self.fulls.values()),
            assets=await self._assets() if rank == 0 and not extra else (),
        )

    async def _assets(self) -> tuple[Asset, ...]:
        found = []
        for name, data in self.assets.items():
            asset = Asset(name=name, sha256=sha256_hex(data), size=len(data))
            await self._once(asset_key(self.name, asset.sha256), data)
            found.append(asset)
        return tuple(found)

    async def _once(self, key: str, data: bytes) -> None:
        if not [entry async for entry in self.store.list(key)]:
            await self.store.create(key, data)

    async def move_head(self, position: Position) -> None:
        key = head_key(self.name)
        head = Head(
            run_id=self.run_id,
            term=self.term,
            launch="test",
            position=position,
            write_id=f"{self.published:016x}",
        )
        if not [entry async for entry in self.store.list(key)]:
            await self.store.create(key, head.to_bytes())
            return
        while True:
            found = await self.store.get(key, max_bytes=MAX_RECORD_BYTES)
            with contextlib.suppress(PreconditionFailed):  # a coordinator beside us moved it in between
                await self.store.replace(key, head.to_bytes(), etag=found.etag)
                return

    def tensors(self, version: int) -> dict[str, bytes]:
        """Raw bytes of every tensor at ``version``, tied names left out."""
        return {name: np.ascontiguousarray(bits).tobytes() for name, bits in self.history[version].items()}


class Down(MemoryStore):
    """The store while nobody can reach it."""

    async def get(self, key: str, *, max_bytes: int):  # type: ignore[no-untyped-def]
        raise StoreUnavailable("down", key=key)


def group_bits(group: Group, weights: Weights) -> np.ndarray:
    parts = [
        weights[p.tensor.name][tuple(slice(o, o + s) for o, s in zip(p.box.offsets, p.box.sizes, strict=True))]
        for p in group.pieces
    ]
    return np.concatenate([np.ascontiguousarray(part).reshape(-1) for part in parts])


def boxes(shape: tuple[int, ...], how: str, rank: int, world: int) -> list[Box]:
    if how == "all" or world == 1:
        return [whole(shape)]
    if how in ("rows", "cols"):
        axis = 0 if how == "rows" else 1
        # Uneven on purpose: the first rank takes the larger part.
        cut = -(-shape[axis] // world) if shape[axis] % 2 else shape[axis] // world + (1 if shape[axis] > world else 0)
        low, high = min(rank * cut, shape[axis]), min((rank + 1) * cut, shape[axis])
        high = shape[axis] if rank == world - 1 else high
        offsets = tuple(low if d == axis else 0 for d in range(len(shape)))
        sizes = tuple(high - low if d == axis else n for d, n in enumerate(shape))
        return [Box(offsets, sizes)] if high > low else []
    return [whole(shape)] if rank == int(how) % world else []


def read_model(files: dict[str, bytes]) -> dict[str, bytes]:
    """Raw bytes of each tensor in safetensors files, parsed here, not by the code under test."""
    found: dict[str, bytes] = {}
    for data in files.values():
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                found[name] = data[8 + length + start : 8 + length + end]
    return found

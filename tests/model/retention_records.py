"""What the launches of retention.py write: real records, made by the trainer in miniature; weights never change."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import cache
from typing import Any, NamedTuple, TypeVar

from tests.model.state import Violation
from tests.rollout_agent.training import Training
from weight_store.head import Head
from weight_store.keys import asset_key, head_key, layout_key, manifest_key, open_key, receipt_key, shard_key
from weight_store.manifest import Manifest, seal
from weight_store.memory import MemoryStore
from weight_store.position import GENESIS, Position
from weight_store.receipt import FullRef, Receipt
from weight_store.records import pack, record_format, sha256_hex
from weight_store.version import Abort, Open

T = TypeVar("T")

RUN = "tiny"
NONCE = "0" * 16
SPECS = (("w", "BF16", (4, 2), "rows"),)
Objects = dict[str, bytes]


class Launch(NamedTuple):
    """The launch that has the run, or of an older term one that does not know yet that it lost it."""

    term: int
    world: int
    settled: bool = False
    opened: int = 0
    published: int = 0
    fulls: tuple[int, ...] = ()


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run what waits for nothing but its own tasks."""
    return _runner().run(work)


@cache
def _runner() -> asyncio.Runner:
    return asyncio.Runner()  # one for all: making one takes longer than a collection


@cache
def training_of(world: int) -> Training:
    return Training(MemoryStore(), name=RUN, specs=SPECS, world=world, aliases={})


@cache
def layout_of(world: int) -> tuple[Any, bytes, str]:
    layout = training_of(world).layout()
    return layout, pack(layout.to_bytes()), sha256_hex(layout.to_bytes())


@cache
def parsed_register(data: bytes) -> Manifest | Abort:
    return Abort.parse(data) if record_format(data) == Abort.FORMAT else Manifest.parse(data)


@cache
def parsed_receipt(data: bytes) -> Receipt:
    return Receipt.parse(data)


def head_of(objects: Objects) -> Head:
    return Head.parse(objects[head_key(RUN)])


def manifest_of(objects: Objects, position: Position) -> Manifest:
    data = objects.get(manifest_key(RUN, position.version))
    if data is None or sha256_hex(data) != position.sha256:
        raise Violation(f"the manifest of version {position.version} is gone")
    found = parsed_register(data)
    assert isinstance(found, Manifest)
    return found


def in_order(objects: Objects) -> tuple[tuple[str, bytes], ...]:
    return tuple(sorted(objects.items()))


def with_shared(objects: Objects, launch: Launch) -> Objects:
    _, packed, sha256 = layout_of(launch.world)
    found = {
        layout_key(RUN, sha256): packed,
        asset_key(RUN, sha256_hex(config_of(launch.world))): config_of(launch.world),
    }
    return found | objects  # create-only: what is there already is as good


def config_of(world: int) -> bytes:
    return f"of {world}".encode()


def with_shards(objects: Objects, version: int, launch: Launch, *, extra: bool = False) -> Objects:
    """With the shards and receipts of all ranks."""
    opened = Open.parse(objects[open_key(RUN, version)])
    found = dict(objects)
    for rank, (receipt, shard) in enumerate(receipts_of(opened.to_bytes(), launch, extra)):
        if rank == 0 and not extra:
            config = config_of(launch.world)
            asset = {"name": "config.json", "sha256": sha256_hex(config), "size": len(config)}
            receipt = Receipt.model_validate({**receipt.model_dump(), "assets": [asset]}, strict=False)
        if launch.fulls and not extra:
            refs = [full_ref(objects, full, rank) for full in launch.fulls]
            receipt = receipt.model_copy(update={"fulls": tuple(ref for ref in refs if ref is not None)})
        found.setdefault(shard_key(RUN, version, rank, receipt.nonce, extra_full=extra), shard)
        found.setdefault(receipt_key(RUN, version, rank, extra_full=extra), receipt.to_bytes())
    return found


def full_ref(objects: Objects, version: int, rank: int) -> FullRef | None:
    data = objects.get(receipt_key(RUN, version, rank, extra_full=True))
    if data is None:
        return None
    return FullRef(
        version=version, sha256=sha256_hex(data), size=len(data), shard_bytes=parsed_receipt(data).shard_bytes
    )


@cache
def receipts_of(opened: bytes, launch: Launch, extra: bool) -> list[tuple[Receipt, bytes]]:
    """Weights never change: deltas are empty. The bytes are made by the trainer in miniature."""
    record, training = Open.parse(opened), training_of(launch.world)
    layout = layout_of(launch.world)[0]
    base = None if extra or record.parent == GENESIS else training.weights
    store, found = training.store, []
    assert isinstance(store, MemoryStore)
    training.assets, training.fulls = {}, {}
    for rank in range(launch.world):
        store._objects.clear()
        receipt = run(training._rank(rank, layout, record, base, lambda group: False, extra=extra))
        found.append((receipt, next(iter(store._objects.values()))[0]))
    return found


def manifest_bytes(objects: Objects, launch: Launch) -> bytes | None:
    """The manifest of what a launch has opened; None if part of it is gone."""
    opened = Open.parse(objects[open_key(RUN, launch.opened)])
    raw = [objects.get(receipt_key(RUN, launch.opened, rank)) for rank in range(launch.world)]
    if not all(raw) or (opened.parent != GENESIS and manifest_key(RUN, opened.parent.version) not in objects):
        return None
    parent = None if opened.parent == GENESIS else (manifest_of(objects, opened.parent), opened.parent)
    receipts = [(parsed_receipt(data), data) for data in raw if data is not None]
    return seal(opened, layout_of(launch.world)[0], receipts, parent).to_bytes()

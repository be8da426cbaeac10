"""What an earlier release wrote is read by this one, and this one still writes the same bytes.

The vectors are made by ``make_vectors.py`` when a format changes, and only added to; see there.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weight_store.chain import plan_chain
from weight_store.control import Control
from weight_store.head import Head
from weight_store.keys import open_key, parse_key
from weight_store.layout import Layout
from weight_store.manifest import Manifest, seal
from weight_store.memory import MemoryStore
from weight_store.offer import Offer
from weight_store.position import Position
from weight_store.reading import (
    fetch_groups,
    read_asset,
    read_head,
    read_layout,
    read_manifest,
    read_receipt,
)
from weight_store.receipt import SHARD_MAGIC, Receipt, group_ranges
from weight_store.records import Record, record_format, sha256_hex, unpack
from weight_store.version import Abort, Open

VECTORS = Path(__file__).parent / "vectors"
NAMES = ["v1-small", "v1-every-field"]
KINDS: dict[str, type[Record]] = {
    kind.FORMAT: kind for kind in (Head, Control, Offer, Layout, Open, Receipt, Manifest, Abort)
}


def objects(name: str) -> dict[str, bytes]:
    return {key: bytes.fromhex(data) for key, data in json.loads((VECTORS / f"{name}.json").read_text()).items()}


async def store_of(name: str) -> MemoryStore:
    store = MemoryStore()
    for key, data in objects(name).items():
        await store.create(key, data)
    return store


def test_no_vector_is_missing_or_was_altered() -> None:
    sums = json.loads((VECTORS / "SHA256SUMS.json").read_text())
    assert sums == {path.name: sha256_hex(path.read_bytes()) for path in VECTORS.glob("v*.json")}
    assert {f"{name}.json" for name in NAMES} == set(sums)


def records(name: str) -> dict[str, tuple[Record, bytes]]:
    """Every record of a vector, with its JSON."""
    found = {}
    for key, data in objects(name).items():
        if parse_key(key).kind in ("shard", "asset"):
            continue
        raw = unpack(data, key=key) if parse_key(key).kind in ("layout", "offer") else data
        found[key] = (KINDS[record_format(raw)].parse(raw, key=key), raw)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_records_are_read_and_written_back_the_same(name: str) -> None:
    for key, (record, raw) in records(name).items():
        assert record.to_bytes() == raw, key


def test_every_kind_has_a_vector() -> None:
    found = {type(record) for name in NAMES for record, _ in records(name).values()}
    assert found == set(KINDS.values())


@pytest.mark.parametrize("name", NAMES)
def test_sealing_again_gives_the_manifest_that_lies_there(name: str) -> None:
    found = {key: record for key, (record, _) in records(name).items()}
    stored = {key: raw for key, (_, raw) in records(name).items()}
    positions = {
        m.version: Position(version=m.version, sha256=sha256_hex(stored[k]))
        for k, m in found.items()
        if isinstance(m, Manifest)
    }
    for key, manifest in found.items():
        if not isinstance(manifest, Manifest):
            continue
        opened = found[open_key(parse_key(key).run, manifest.version)]
        layout = next(record for record in found.values() if isinstance(record, Layout))
        receipts = sorted(
            (record.rank, record, stored[k])
            for k, record in found.items()
            if isinstance(record, Receipt) and record.version == manifest.version and not record.extra_full
        )
        before = next(
            (m for m in found.values() if isinstance(m, Manifest) and positions[m.version] == manifest.parent), None
        )
        assert isinstance(opened, Open)
        made = seal(
            opened, layout, [(r, data) for _, r, data in receipts], before and (before, positions[before.version])
        )
        assert made == manifest


@pytest.mark.parametrize("name", NAMES)
async def test_a_reader_gets_from_the_head_to_every_payload(name: str) -> None:
    store = await store_of(name)
    head, _ = await read_head(store, "demo")
    target = await read_manifest(store, "demo", head.position)
    for asset in target.assets:
        assert len(await read_asset(store, "demo", asset)) == asset.size
    payloads = 0
    for hop in plan_chain(None, target, head.position):
        manifest = await read_manifest(store, "demo", hop.position)
        layout = await read_layout(store, "demo", manifest.layout)
        for rank, ref in enumerate(hop.extra_full or manifest.receipts):
            extra_full = bool(hop.extra_full)
            receipt = await read_receipt(store, "demo", hop.position, rank, ref, extra_full=extra_full)
            ranges = group_ranges(receipt, layout)
            assert all(item.full for item in ranges) or hop.kind == "delta"
            sizes = [len(item.payload) async for item in fetch_groups(store, "demo", receipt, ranges)]
            assert sum(sizes) + len(SHARD_MAGIC) == receipt.shard_bytes
            payloads += len(sizes)
    assert payloads == {"v1-small": 1, "v1-every-field": 8}[name]

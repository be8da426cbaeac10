"""Receipts that do not belong together, to the manifest or to the layout: refused in a sentence, nothing is fetched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollout_agent.errors import DamagedObject
from rollout_agent.replica import Replica
from tests.rollout_agent.training import OTHER_RUN_ID, Training
from weight_store.keys import layout_key, manifest_key, receipt_key
from weight_store.manifest import Manifest, ReceiptRef
from weight_store.position import Position
from weight_store.receipt import Receipt
from weight_store.records import pack, sha256_hex

Change = Callable[[Manifest], dict[str, Any]]


def _put(training: Training, key: str, data: bytes) -> None:
    training.store._objects[key] = (data, 0.0)  # type: ignore[attr-defined]


async def _lie(training: Training, receipt: dict[str, Any], manifest: Change) -> None:
    """Seal version 2 with another receipt of its last rank, or another manifest."""
    sealed = training.manifests[2]
    key = receipt_key("tiny", 2, sealed.world_size - 1)
    found = Receipt.parse((await training.store.get(key, max_bytes=1 << 20)).data)
    lying = found.model_copy(update=receipt).to_bytes()
    _put(training, key, lying)
    ref = ReceiptRef(sha256=sha256_hex(lying), size=len(lying), shard_bytes=found.shard_bytes)
    sealed = sealed.model_copy(update={"receipts": (*sealed.receipts[:-1], ref)})
    sealed = sealed.model_copy(update=manifest(sealed))
    _put(training, manifest_key("tiny", 2), sealed.to_bytes())
    await training.move_head(sealed.position(sealed.to_bytes()))


@pytest.mark.parametrize(
    ("receipt", "manifest", "said"),
    [
        ({"run_id": OTHER_RUN_ID}, lambda _: {}, "is of another run or layout"),
        ({"layout": "0" * 64}, lambda _: {}, "is of another run or layout"),
        ({"parent": Position(version=1, sha256="0" * 64)}, lambda _: {}, "not against its parent"),
        ({}, lambda m: {"receipts": m.receipts[:1], "world_size": 1}, "do not cover its layout"),
        ({}, lambda _: {"full_version": 2, "full_bytes": 1}, "is listed as a full but holds deltas"),
    ],
    ids=["run", "layout", "parent", "ranks", "full"],
)
async def test_is_refused(
    training: Training, tmp_path: Path, receipt: dict[str, Any], manifest: Change, said: str
) -> None:
    await training.publish()
    async with await Replica.open(run="tiny", model_dir=tmp_path, store=training.store) as replica:
        held = await replica.catch_up()
        fetched = replica.fetched_bytes
        training.step()
        await training.publish()
        await _lie(training, receipt, manifest)
        with pytest.raises(DamagedObject, match=said):
            await replica.catch_up()
        assert (replica.position, replica.fetched_bytes) == (held, fetched)


async def test_a_layout_with_a_dtype_of_a_later_release_is_refused(training: Training, tmp_path: Path) -> None:
    await training.publish()
    layout = training.layout().model_copy(update={"dtypes": ("F6",) * len(training.layout().dtypes)})
    raw = layout.to_bytes()
    _put(training, layout_key("tiny", sha256_hex(raw)), pack(raw))
    async with await Replica.open(run="tiny", model_dir=tmp_path, store=training.store) as replica:
        with pytest.raises(DamagedObject, match="upgrade weightcast"):
            await replica._source.layout(sha256_hex(raw))

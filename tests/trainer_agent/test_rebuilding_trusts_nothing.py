"""A base is rebuilt only from manifests that fit each other; what does not fit is named in a sentence."""

from __future__ import annotations

import asyncio

import pytest
import torch

from trainer_agent.rebuilding import rebuild_base
from weight_store.errors import FormatError
from weight_store.keys import manifest_key
from weight_store.manifest import ReceiptRef
from weight_store.memory import MemoryStore
from weight_store.opening import open_store
from weight_store.reading import read_head, read_layout, read_manifest


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_full_of_another_number_of_ranks_is_refused(service, launch_ranks, ranks: int) -> None:
    state = {"w": torch.randn(64, 64), "v": torch.randn(3)}
    publishers = launch_ranks(service, 2)
    for step in range(2):
        handles = publishers.together(lambda p, _, step=step, state=state: p.publish(state, step))
        assert [handle.sealed(30) for handle in handles] == [step + 1] * 2
        state = {name: tensor + 1e-3 for name, tensor in state.items()}

    async def rebuild() -> None:
        store = open_store(service.store_url)
        try:
            head, _ = await read_head(store, "r")
            manifest = await read_manifest(store, "r", head.position)
            layout = await read_layout(store, "r", manifest.layout)
            listed = (await read_manifest(store, "r", manifest.parent)).receipts[0]
            ref = ReceiptRef(sha256=listed.sha256, size=listed.size, shard_bytes=listed.shard_bytes)
            lying = manifest.model_copy(update={"full_version": 1, "extra_full": (ref,) * ranks})
            data = lying.to_bytes()
            kept = MemoryStore()
            await kept.create(manifest_key("r", 1), (await store.get(manifest_key("r", 1), max_bytes=1 << 20)).data)
            await kept.create(manifest_key("r", 2), data)
            # The slots are not reached.
            await rebuild_base(kept, "r", lying.position(data), (manifest.layout, layout), 1, None, 0)  # type: ignore[arg-type]
        finally:
            await store.close()

    with pytest.raises(FormatError, match=f"listed with {ranks} receipts, but the version has 2 ranks"):
        asyncio.run(rebuild())

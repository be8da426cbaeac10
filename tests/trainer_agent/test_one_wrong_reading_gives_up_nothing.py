"""A rank that gives its version up in the bucket has made sure that it is its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trainer_agent.session import GivenUp, Refused
from trainer_agent.withdrawing import _withdraw_in_bucket
from weight_store.errors import ObjectNotFound
from weight_store.keys import manifest_key, open_key
from weight_store.memory import MemoryStore
from weight_store.position import GENESIS
from weight_store.store import Blob
from weight_store.version import Abort, Open

RUN_ID = "00000000-0000-4000-8000-00000000000a"


class Flipping(MemoryStore):
    """The first reading shows term 3 as term 2: one bit."""

    flipped = False

    async def get(self, key: str, *, max_bytes: int) -> Blob:
        blob = await super().get(key, max_bytes=max_bytes)
        if self.flipped or b'"term":3' not in blob.data:
            return blob
        self.flipped = True
        return Blob(blob.data.replace(b'"term":3', b'"term":2'), blob.etag)


def rank_of(term: int, store: MemoryStore) -> Any:
    """What of a worker is needed to withdraw."""
    config = SimpleNamespace(run="r", rank=0)
    return SimpleNamespace(config=config, store=store, run_id=RUN_ID, term=term, nonce=lambda: "0" * 16)


async def opened_in_term_3(store: MemoryStore) -> None:
    fields = {"step": 1, "ordinal": 0, "layout": "0" * 64, "world_size": 1, "write_id": "0" * 16}
    opened = Open(run_id=RUN_ID, version=1, term=3, parent=GENESIS, **fields)  # type: ignore[arg-type]
    await store.create(open_key("r", 1), opened.to_bytes())


async def test_a_version_of_another_launch_is_not_given_up_because_of_one_bit() -> None:
    store = Flipping()
    await opened_in_term_3(store)
    assert await _withdraw_in_bucket(rank_of(2, store), 1, Refused("x", "why")) == GivenUp()
    assert store.flipped
    with pytest.raises(ObjectNotFound):
        await store.get(manifest_key("r", 1), max_bytes=1 << 20)


async def test_the_own_version_is_given_up_although_it_was_read_wrong_once() -> None:
    store = Flipping()
    await opened_in_term_3(store)
    assert await _withdraw_in_bucket(rank_of(3, store), 1, Refused("x", "why")) == GivenUp()
    assert Abort.parse((await store.get(manifest_key("r", 1), max_bytes=1 << 20)).data).reason == "withdrawn"

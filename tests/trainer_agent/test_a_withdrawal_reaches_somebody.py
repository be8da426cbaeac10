"""A rank that gives a version up tells the coordinator, or the bucket where no coordinator will hear it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.errors import CoordinatorError, CoordinatorUnreachable, Fenced, TokenRequired
from coordinator.wire import MAX_SENTENCE, WithdrawalReport
from trainer_agent.patience import Patience
from trainer_agent.session import GivenUp, Interrupted, Refused
from trainer_agent.withdrawing import withdraw
from weight_store.errors import ObjectNotFound, StoreError, StoreRefused, StoreUnavailable
from weight_store.keys import manifest_key, open_key
from weight_store.manifest import Manifest
from weight_store.memory import MemoryStore
from weight_store.position import GENESIS
from weight_store.records import Record
from weight_store.version import Abort, Open

RUN_ID = "00000000-0000-4000-8000-00000000000a"
WHY = Refused("codec", "why" * MAX_SENTENCE)
"""Longer than anybody keeps."""


class Failing(MemoryStore):
    """``errors``: what writers are told first."""

    def __init__(self, *errors: StoreError) -> None:
        super().__init__()
        self.errors = list(errors)

    async def create(self, key: str, data: bytes) -> str:
        if key == manifest_key("r", 1) and self.errors:
            raise self.errors.pop(0)
        return await super().create(key, data)


async def rank_of(store: MemoryStore, *errors: CoordinatorError) -> Any:
    """What of a worker is needed to withdraw. ``errors``: what the coordinator answers, the last one ever after."""
    fields = {"step": 1, "ordinal": 0, "layout": "0" * 64, "world_size": 1, "write_id": "0" * 16}
    opened = Open(run_id=RUN_ID, version=1, term=1, parent=GENESIS, **fields)  # type: ignore[arg-type]
    await store.create(open_key("r", 1), opened.to_bytes())
    left = list(errors)

    async def refuse(run: str, version: int, rank: int, report: WithdrawalReport) -> None:
        raise left.pop(0) if len(left) > 1 else left[0]

    async def no_sleep(seconds: float) -> None:
        pass

    return SimpleNamespace(
        config=SimpleNamespace(run="r", rank=0),
        coordinator=SimpleNamespace(withdraw=refuse),
        store=store,
        run_id=RUN_ID,
        term=1,
        nonce=lambda: "0" * 16,
        patience=Patience(sleep=no_sleep),
    )


async def written(store: MemoryStore) -> bytes:
    return (await store.get(manifest_key("r", 1), max_bytes=1 << 20)).data


@pytest.mark.parametrize("error", [TokenRequired("no token"), CoordinatorUnreachable("away")])
async def test_the_bucket_is_told_also_when_it_is_away_for_a_while(error: CoordinatorError) -> None:
    store = Failing(StoreUnavailable("away"), StoreUnavailable("away"))
    assert await withdraw(await rank_of(store, error), 1, WHY) == GivenUp()
    assert Abort.parse(await written(store)).reason == "withdrawn"


async def test_what_neither_will_hear_is_the_coordinators_refusal() -> None:
    """Once one answers at all."""
    rank = await rank_of(Failing(*[StoreRefused("denied")] * 3), CoordinatorUnreachable("away"), TokenRequired("none"))
    with pytest.raises(TokenRequired):
        await withdraw(rank, 1, WHY)


async def test_a_launch_that_is_over_decides_nothing() -> None:
    store = MemoryStore()
    with pytest.raises(Fenced):
        await withdraw(await rank_of(store, Fenced("another launch")), 1, WHY)
    with pytest.raises(ObjectNotFound):
        await written(store)


@pytest.mark.parametrize(("kind", "outcome"), [(Abort, GivenUp()), (Manifest, Interrupted())])
async def test_what_is_decided_already_stays_so(kind: type[Record], outcome: object) -> None:
    first, store = MemoryStore(), MemoryStore()
    await withdraw(await rank_of(first, TokenRequired("no token")), 1, WHY)
    known = (await written(first)).replace(Abort.FORMAT.encode(), kind.FORMAT.encode())
    await store.create(manifest_key("r", 1), known)
    rank = await rank_of(store, TokenRequired("no token"))
    assert await withdraw(rank, 1, Refused("codec", "another")) == outcome
    assert await written(store) == known


async def test_what_retention_has_passed_is_given_up() -> None:
    store = MemoryStore()
    rank = await rank_of(store, TokenRequired("no token"))
    await store.delete(open_key("r", 1))
    assert await withdraw(rank, 1, WHY) == GivenUp()

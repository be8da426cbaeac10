"""What an earlier run of the same name left behind, or is still told, is never taken for this run's."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.wire import WaitAnswer
from trainer_agent import Publisher
from trainer_agent.errors import PublicationFailed
from trainer_agent.messages import AskServing, Served
from trainer_agent.worker import Worker
from weight_store.keys import receipt_key
from weight_store.opening import open_store
from weight_store.receipt import Receipt

ANOTHER = "00000000-0000-4000-8000-000000000000"


async def leave(store_url: str, receipt: Receipt) -> None:
    store = open_store(store_url)
    await store.create(receipt_key("r", receipt.version, receipt.rank), receipt.to_bytes())
    await store.close()


def test_a_receipt_of_another_run_costs_one_version(service: Any, make_state: Any, check_same: Any) -> None:
    with Publisher(run="r", store=service.store_url, coordinator=service.url, full_every=0) as publisher:
        assert publisher.publish(make_state(), 0).sealed(30) == 1
        (receipt,) = service.read("r").receipts
        asyncio.run(leave(service.store_url, receipt.model_copy(update={"version": 2, "run_id": ANOTHER})))
        with pytest.raises(PublicationFailed, match=r"is of run 0000|given up"):
            publisher.publish(make_state(1), 1).sealed(30)
        assert publisher.publish(make_state(2), 2).sealed(30) == 3
    check_same(service.read("r").state(), make_state(2))


@pytest.mark.parametrize(("run_id", "reached"), [(ANOTHER, False), ("mine", True), (None, True)])
async def test_who_serves_another_run_serves_not_this_one(run_id: str | None, reached: bool) -> None:
    told: list[Any] = []

    async def wait(*_: object, **__: object) -> WaitAnswer:
        return WaitAnswer.model_construct(reached=True, version=3, regions=(), run_id=run_id)

    worker = Worker(
        SimpleNamespace(run="r"),
        None,
        None,
        SimpleNamespace(wait=wait),
        told.append,
        run_id="mine",  # type: ignore[arg-type]
    )
    await worker.ask_serving(AskServing(id=7, version=3, regions=(), quorum=1.0, timeout_s=1.0))
    worker.encoder.close()
    (answer,) = told
    assert (type(answer), answer.reached, bool(answer.error)) == (Served, reached, not reached)

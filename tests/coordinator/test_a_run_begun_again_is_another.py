"""A run that was deleted and begun again counts terms and versions from 1: whoever belongs to the former is told."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.errors import WrongRun
from coordinator.wire import OpenRequest, ProgressReport, ReceiptReport, WithdrawalReport


async def begun_again(place: Any, former: Any) -> Any:
    """Another launch of the same world, in term 1 of a run of the same name."""
    for key in [entry.key async for entry in place.store.list("")]:
        await place.store.delete(key)
    job = await place.job(await place.node(), "launch-b").start()
    assert (job.term.term, job.layout_sha256) == (former.term.term, former.layout_sha256)
    assert job.term.run_id != former.term.run_id
    return job


def reports(job: Any) -> tuple[OpenRequest, ReceiptReport, ProgressReport, WithdrawalReport]:
    of = {"term": job.term.term, "run_id": job.term.run_id}
    return (
        OpenRequest(**of, step=7, ordinal=7, layout=job.layout_sha256, world_size=job.world_size),
        ReceiptReport(**of, sha256="0" * 64),
        ProgressReport(**of),
        WithdrawalReport(**of, code="x", sentence="why"),
    )


async def test_a_launch_of_the_former_run_moves_nothing(place: Any, job: Any, node: Any) -> None:
    await job.publish(step=1)
    new = await begun_again(place, job)
    opened = await new.open(step=1)
    request, receipt, progress, withdrawal = reports(job)
    for client in (node.client, new.client):
        with pytest.raises(WrongRun, match="another one of its name was begun"):
            await client.open_version("demo", request)
        with pytest.raises(WrongRun):
            await client.report_receipt("demo", 1, 0, receipt)
        with pytest.raises(WrongRun):
            await client.report_progress("demo", 1, 0, progress)
        with pytest.raises(WrongRun):
            await client.withdraw("demo", 1, 0, withdrawal)
    for rank in (0, 1):
        answer = await new.receipt(opened, rank)
    assert answer.state == "sealed"


async def test_a_coordinator_that_remembers_the_former_run_looks_again(place: Any, job: Any, node: Any) -> None:
    await job.open(step=1)
    await node.tick()  # version 1 of the former run waits
    new = await begun_again(place, job)
    opened = await new.open(step=1)
    _, _, progress, _ = reports(new)
    assert (await node.client.report_progress("demo", 1, 0, progress)).run_id == new.term.run_id == opened.run_id


async def test_who_asks_for_agents_is_told_of_which_run(place: Any, job: Any, beat: Any, node: Any) -> None:
    sealed = await job.publish(step=1)
    await node.client.heartbeat("demo", "eu", "a", beat(job.term.run_id, sealed.position, sealed.position))
    assert (await node.client.wait("demo", 1)).run_id == job.term.run_id
    new = await begun_again(place, job)
    assert not (await node.client.wait("demo", 1)).reached
    position = (await new.publish(step=1)).position
    await node.client.heartbeat("demo", "eu", "a", beat(new.term.run_id, position, position))
    found = await node.client.wait("demo", 1)
    assert (found.reached, found.run_id) == (True, new.term.run_id)

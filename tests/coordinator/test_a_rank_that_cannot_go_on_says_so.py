"""A rank that will never send its shard withdraws the version: nobody waits for it, and everybody is told why."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from coordinator.errors import BadRequest, Fenced, UnknownVersion
from coordinator.wire import ProgressReport, VersionAnswer, WithdrawalReport
from weight_store.keys import manifest_key
from weight_store.records import MAX_RECORD_BYTES
from weight_store.version import MAX_DETAIL, Abort

FULL = "object r/v/000000000001/00001-0000000000000001.shard could not be written, No space left: free space"


def why(term: int = 1, code: str = "store-unwritable", sentence: str = FULL) -> WithdrawalReport:
    return WithdrawalReport(term=term, code=code, sentence=sentence)


async def withdraw(job: Any, opened: VersionAnswer, rank: int, at: Any = None, **said: Any) -> VersionAnswer:
    client = (at or job).client
    return await client.withdraw("demo", opened.version, rank, why(job.term.term, **said))


async def test_the_version_is_given_up_at_once_with_rank_and_reason(job: Any, place: Any) -> None:
    opened = await job.open(step=7)
    await job.receipt(opened, 0)
    answer = await withdraw(job, opened, 1)
    assert (answer.state, answer.missing) == ("aborted", (1,))
    assert answer.reason == (f"withdrawn: rank 1 cannot send its shard of version 1 (step 7): store-unwritable: {FULL}")
    assert (await job.client.version("demo", 1)).reason == answer.reason
    assert [found.state for found in await job.client.versions("demo")] == ["aborted"]


async def test_the_others_are_told_when_they_next_say_something(job: Any) -> None:
    opened = await job.open(step=7)
    await withdraw(job, opened, 1)
    sign = await job.client.report_progress("demo", 1, 0, ProgressReport(term=job.term.term))
    assert sign.state == "aborted"
    assert (await job.receipt(opened, 0)).state == "aborted"
    assert (await job.open(step=7)).state == "aborted", "opened once, whatever became of it"
    job.published += 1
    assert (await job.publish(step=8)).version == 2


async def test_saying_it_again_changes_nothing(job: Any, place: Any) -> None:
    opened = await job.open(step=7)
    first = await withdraw(job, opened, 1)
    other = await place.node()
    for at in (None, other):
        assert await withdraw(job, opened, 1, at=at, sentence="something else") == first
        assert await withdraw(job, opened, 0, at=at) == first


async def test_another_coordinator_learns_of_it_from_the_bucket(job: Any, place: Any, node: Any) -> None:
    other = await place.node()
    opened = await job.open(step=7)
    await job.receipt(opened, 0)
    await other.tick()
    answer = await withdraw(job, opened, 1, at=other)
    assert answer.state == "aborted"
    assert (await node.client.version("demo", 1, wait_s=0)).reason == answer.reason


async def test_a_rank_whose_receipt_is_there_withdraws_nothing(job: Any) -> None:
    opened = await job.open(step=7)
    await job.write_receipt(opened, 1)  # and not reported: the sidecar was killed in between
    answer = await withdraw(job, opened, 1)
    assert (answer.state, answer.missing) == ("undecided", (0,))
    assert (await job.receipt(opened, 0)).state == "sealed"
    assert (await withdraw(job, opened, 1)).state == "sealed"


async def test_a_late_receipt_changes_nothing(job: Any) -> None:
    opened = await job.open(step=7)
    await withdraw(job, opened, 1)
    for rank in (0, 1):
        assert (await job.receipt(opened, rank)).state == "aborted"


async def test_reports_that_make_no_sense(job: Any, place: Any, node: Any) -> None:
    opened = await job.open(step=7)
    with pytest.raises(BadRequest, match="rank 7 is outside the world of 2"):
        await withdraw(job, opened, 7)
    with pytest.raises(UnknownVersion):
        await withdraw(job, opened.model_copy(update={"version": 9}), 1)
    await place.job(node, "launch-b").start()
    with pytest.raises(Fenced, match="launch-b took the run over"):
        await withdraw(job, opened, 1)


@pytest.mark.parametrize("said", [{"code": "No Code"}, {"code": "x" * 65}, {"code": ""}, {"sentence": "x" * 1001}])
def test_what_is_too_long_or_no_code_is_refused(said: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        why(**said)


async def test_what_is_kept_is_one_bounded_line(job: Any, place: Any) -> None:
    opened = await job.open(step=7)
    await withdraw(job, opened, 0, sentence="a\nb\x1b[31m\u2028" + "x" * 990)
    stored = await place.store.get(manifest_key("demo", 1), max_bytes=MAX_RECORD_BYTES)
    abort = Abort.parse(stored.data)
    assert (abort.reason, abort.missing, len(abort.detail) <= MAX_DETAIL) == ("withdrawn", (0,), True)
    assert abort.detail.isprintable()
    assert "a b [31m xxx" in abort.detail

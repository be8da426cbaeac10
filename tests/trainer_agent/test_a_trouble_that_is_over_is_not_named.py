"""What a step waits for is what is wrong now, not an outage that ended with the publication before."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.trainer_agent.silent import attached_desk
from trainer_agent.desk import Desk
from trainer_agent.handle import Handle
from trainer_agent.messages import Event, Failed, FullDone, Waiting
from trainer_agent.patience import Patience
from weight_store.errors import ObjectNotFound, StoreError, StoreUnavailable
from weight_store.retry import ONCE, Retrier, RetryPolicy

OUTAGE = "http://store cannot be reached"


@pytest.fixture
def attached(tmp_path) -> tuple[Desk, Callable[[Event], None], Callable[[int], Handle]]:
    """A desk whose sidecar is there, what that tells, and publications that are undecided."""
    desk, arena, tell = attached_desk(tmp_path)

    def publish(ordinal: int) -> Handle:
        handle = desk.new_handle(ordinal, step=ordinal)
        desk.publish(handle, slot=0, copy_s=0)
        return handle

    yield desk, tell, publish
    arena.remove()


def said(handle: Handle) -> str:
    with pytest.raises(TimeoutError) as told:
        handle.sealed(0.01)
    return str(told.value)


@pytest.mark.parametrize(
    "end", [Failed(ordinal=0, code="version-aborted", message="given up"), FullDone(slot=1)], ids=lambda end: end.kind
)
def test_the_end_of_what_was_in_trouble_ends_the_trouble(attached, end: Event) -> None:
    _, tell, publish = attached
    handle = publish(0)
    tell(Waiting(reason=OUTAGE))
    assert OUTAGE in said(handle)
    tell(end)
    assert said(publish(1)) == "step 1 is not decided after 0.01 s"


class Outage:
    """An operation that fails so often for a while, and then for good."""

    def __init__(self, times: int, then: StoreError) -> None:
        self.errors = [StoreUnavailable(OUTAGE)] * times + [then]

    async def __call__(self) -> None:
        raise self.errors.pop(0)


async def no_sleep(seconds: float) -> None:
    pass


@pytest.mark.parametrize("then", [ObjectNotFound("no such object"), StoreUnavailable(OUTAGE)], ids=["answer", "end"])
async def test_retries_that_end_take_back_what_they_told(then: StoreError) -> None:
    told: list[str] = []
    retrier = Retrier(RetryPolicy(attempts=3), sleep=no_sleep, tell=told.append)
    with pytest.raises(StoreError):
        await retrier.call(Outage(2, then))
    assert told == [OUTAGE, OUTAGE, ""]
    with pytest.raises(StoreError):
        await Retrier(ONCE, tell=told.append).call(Outage(0, then))
    assert told == [OUTAGE, OUTAGE, ""]


async def test_so_does_patience() -> None:
    told: list[str] = []
    with pytest.raises(ObjectNotFound):
        await Patience(sleep=no_sleep, tell=told.append)("looking", Outage(1, ObjectNotFound("none")))
    assert told == [f"looking: {OUTAGE}", ""]


async def test_patience_asks_every_few_seconds_and_says_so_ever_more_rarely(caplog: pytest.LogCaptureFixture) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    with pytest.raises(ObjectNotFound):
        await Patience(sleep, fraction=lambda: 1.0)("looking", Outage(20, ObjectNotFound("none")))
    assert len(slept) == 20
    assert slept == sorted(slept)
    assert (slept[0], slept[-1]) == (0.1, 5.0)
    said = [record.getMessage().partition("attempt ")[2].partition(";")[0] for record in caplog.records]
    assert said == ["1", "2", "4", "8", "16"]

"""Retries wait with full jitter, slow down when told to, and end; what must not be retried is not. Virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weight_store.errors import (
    ObjectNotFound,
    PreconditionFailed,
    StoreError,
    StoreRefused,
    StoreThrottled,
    StoreUnavailable,
)
from weight_store.local import LocalStore
from weight_store.memory import MemoryStore
from weight_store.retry import Retrier, RetryPolicy, with_retry
from weight_store.s3 import S3Store
from weight_store.s3_settings import S3Location
from weight_store.store import Blob, Entry, MultipartStore


@dataclass
class VirtualTime:
    """A clock that moves only when somebody sleeps; ``jitter`` is the next draw."""

    now_s: float = 100.0
    jitter: float = 0.5
    slept_s: list[float] = field(default_factory=list)

    async def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds

    def retrier(self, policy: RetryPolicy) -> Retrier:
        return Retrier(policy, clock=lambda: self.now_s, sleep=self.sleep, fraction=lambda: self.jitter)


class Failing(MemoryStore):
    """Raises the queued errors, before acting or (``acts``) afterwards, then works."""

    def __init__(self, *errors: StoreError, acts: bool = False) -> None:
        super().__init__()
        self.errors = list(errors)
        self.acts = acts
        self.calls: list[str] = []

    def _fail(self, operation: str) -> None:
        self.calls.append(operation)
        if self.errors:
            raise self.errors.pop(0)

    async def get(self, key: str, *, max_bytes: int) -> Blob:
        self._fail("get")
        return await super().get(key, max_bytes=max_bytes)

    async def create(self, key: str, data: bytes) -> str:
        if self.acts and self.errors:
            await super().create(key, data)
        self._fail("create")
        return await super().create(key, data)

    async def delete(self, key: str) -> None:
        self._fail("delete")
        await super().delete(key)

    async def list(self, prefix: str) -> AsyncIterator[Entry]:
        self._fail("list")
        async for entry in super().list(prefix):
            yield entry


def unavailable() -> StoreUnavailable:
    return StoreUnavailable("the store does not answer", key="head")


@given(failures=st.integers(1, 10_000), fraction=st.floats(0, 1, exclude_max=True), throttled=st.booleans())
def test_a_delay_lies_between_zero_and_its_bound(failures: int, fraction: float, throttled: bool) -> None:
    policy = RetryPolicy(first_delay_s=0.1, max_delay_s=7.0, throttled_factor=4.0)
    bound = min(0.1 * 2 ** min(failures - 1, 50) * (4 if throttled else 1), 7.0)
    assert 0 <= policy.delay_s(failures, fraction, throttled=throttled) <= bound
    assert policy.delay_s(failures, 0.0, throttled=throttled) == 0


async def test_delays_double_and_are_jittered() -> None:
    time = VirtualTime()
    store = with_retry(Failing(*[unavailable() for _ in range(4)]), time.retrier(RetryPolicy(first_delay_s=0.2)))
    await store.create("head", b"x")
    assert time.slept_s == pytest.approx([0.1, 0.2, 0.4, 0.8])


async def test_a_throttling_store_is_given_more_time() -> None:
    time = VirtualTime()
    policy = RetryPolicy(first_delay_s=0.2, throttled_factor=5)
    await with_retry(Failing(StoreThrottled("slow down")), time.retrier(policy)).delete("head")
    assert time.slept_s == pytest.approx([0.5])


async def test_attempts_are_bounded() -> None:
    time = VirtualTime()
    failing = Failing(*[unavailable() for _ in range(9)])
    with pytest.raises(StoreUnavailable, match=r"gave up after 3 attempts") as caught:
        await with_retry(failing, time.retrier(RetryPolicy(attempts=3))).delete("head")
    assert len(failing.calls) == 3
    assert caught.value.key == "head"


async def test_the_budget_is_bounded() -> None:
    time = VirtualTime(jitter=0.999)
    policy = RetryPolicy(attempts=1000, first_delay_s=1, max_delay_s=8, budget_s=30)
    with pytest.raises(StoreUnavailable):
        await with_retry(Failing(*[unavailable() for _ in range(1000)]), time.retrier(policy)).delete("head")
    assert sum(time.slept_s) <= 30


async def test_the_class_of_the_error_stays() -> None:
    time = VirtualTime()
    failing = Failing(*[StoreThrottled("slow down") for _ in range(2)])
    with pytest.raises(StoreThrottled):
        await with_retry(failing, time.retrier(RetryPolicy(attempts=2))).delete("head")


@pytest.mark.parametrize("error", [StoreRefused("no"), ObjectNotFound("no"), PreconditionFailed("no")])
async def test_only_unavailability_is_retried(error: StoreError) -> None:
    time = VirtualTime()
    failing = Failing(error)
    with pytest.raises(type(error)):
        await with_retry(failing, time.retrier(RetryPolicy())).delete("head")
    assert failing.calls == ["delete"]
    assert time.slept_s == []


async def test_a_create_that_happened_is_not_a_conflict() -> None:
    time = VirtualTime()
    failing = Failing(unavailable(), acts=True)
    await with_retry(failing, time.retrier(RetryPolicy())).create("head", b"ours")
    assert failing.calls == ["create", "create", "get"]


async def test_a_create_refused_for_another_request_that_came_to_nothing_is_retried() -> None:
    """409 says that another one is under way, not that it will succeed; callers take a refusal for "it is there"."""
    time = VirtualTime()
    failing = Failing(PreconditionFailed("conflicting request"))
    await with_retry(failing, time.retrier(RetryPolicy())).create("asset", b"ours")
    assert failing.calls == ["create", "get", "create"]
    assert (await failing.get("asset", max_bytes=10)).data == b"ours"


async def test_a_replace_of_what_is_gone_is_refused_at_once() -> None:
    time = VirtualTime()
    with pytest.raises(PreconditionFailed):
        await with_retry(Failing(), time.retrier(RetryPolicy())).replace("head", b"new", etag="old")
    assert time.slept_s == []


async def test_a_listing_is_retried_before_its_first_entry() -> None:
    time = VirtualTime()
    failing = Failing()
    await failing.create("a", b"x")
    failing.errors = [unavailable(), unavailable()]
    entries = [entry.key async for entry in with_retry(failing, time.retrier(RetryPolicy())).list("")]
    assert entries == ["a"]


async def test_cancelling_ends_the_retries() -> None:
    failing = Failing(*[unavailable() for _ in range(100)])
    policy = RetryPolicy(attempts=100, first_delay_s=1000, max_delay_s=1000, budget_s=1e9)
    store = with_retry(failing, Retrier(policy, fraction=lambda: 1.0))
    task = asyncio.create_task(store.delete("head"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert failing.calls == ["delete"]


async def test_finding_unfinished_uploads_shows_through_where_it_is(tmp_path: object) -> None:
    retrier = Retrier(RetryPolicy())
    s3 = S3Store(S3Location("bucket"))
    assert isinstance(with_retry(s3, retrier), MultipartStore)
    assert not isinstance(with_retry(MemoryStore(), retrier), MultipartStore)
    assert not isinstance(with_retry(LocalStore(str(tmp_path)), retrier), MultipartStore)
    await s3.close()

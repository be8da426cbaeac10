"""The one place that retries: a decorator that is a store, and the loop that it shares with multipart uploads.

It also keeps the number of requests under way to what the store takes (:mod:`~weight_store.pacing`). Only
:class:`~weight_store.errors.StoreUnavailable` is retried, and of that not ``UploadLost``. The outcome of a conditional
write is then unknown, so one that is told "exists already" reads the object back: our own bytes mean that a lost
attempt had succeeded.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from weight_store.errors import (
    ObjectNotFound,
    ObjectTooLarge,
    PreconditionFailed,
    StoreThrottled,
    StoreUnavailable,
    UploadLost,
)
from weight_store.pacing import Allowance
from weight_store.store import Blob, Entry, MultipartStore, Store, UnfinishedUpload, Upload

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """At most ``attempts`` tries within ``budget_s``, with exponential delays and full jitter between them.

    Full jitter (a delay drawn evenly from zero to the bound) spreads a fleet that failed together; see "Exponential
    Backoff And Jitter", AWS Architecture Blog. A throttled store gets ``throttled_factor`` times the bound, and fewer
    than ``concurrency`` requests at once.
    """

    attempts: int = 8
    first_delay_s: float = 0.1
    max_delay_s: float = 10.0
    budget_s: float = 60.0
    throttled_factor: float = 4.0
    concurrency: int = 64

    def delay_s(self, failures: int, fraction: float, *, throttled: bool = False) -> float:
        """Return the wait after the ``failures``-th failure (from 1); ``fraction`` in [0, 1) is the jitter."""
        # The exponent is capped because 2.0**1024 overflows, long after the bound is reached.
        bound = self.first_delay_s * 2.0 ** min(failures - 1, 60)
        if throttled:
            bound *= self.throttled_factor
        return min(bound, self.max_delay_s) * fraction


ONCE = RetryPolicy(attempts=1)
"""No retries."""


def fraction() -> float:
    """Draw from [0, 1)."""
    # From the system, so that forked ranks and cloned machines do not draw the same delays.
    return secrets.randbits(53) / 2**53


def nobody(reason: str) -> None:
    """Be told a reason, and do nothing."""


def to_log(log: logging.Logger) -> Callable[[str], None]:
    """What tells ``log``, at level DEBUG, the reason of each attempt that is repeated."""

    def tell(reason: str) -> None:
        if reason:
            log.debug("%s; trying again", reason)

    return tell


class Retrier:
    """Runs an operation until it succeeds, fails for good, or the policy is used up.

    ``clock`` counts seconds from anywhere and only upwards; ``sleep`` waits; ``fraction`` draws from [0, 1). ``tell``
    gets the sentence of each failure that is about to be retried, and "" once that succeeds or is given up.
    """

    def __init__(
        self,
        policy: RetryPolicy,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        fraction: Callable[[], float] = fraction,
        tell: Callable[[str], None] = nobody,
    ) -> None:
        self._policy = policy
        self._tell = tell
        self._clock = clock
        self._sleep = sleep
        self._fraction = fraction
        self.allowance = Allowance(policy.concurrency, clock=clock)

    async def call(self, operation: Callable[[], Awaitable[T]], *, composed: bool = False) -> T:
        """Await ``operation()``, again after each ``StoreUnavailable``; the last one is raised, saying how often.

        ``UploadLost`` is raised at once: only whoever has the bytes can begin the upload again.

        ``composed``: the operation calls this retrier itself. It takes no place of its own, for which the inner calls
        would wait in vain once a single request is permitted.
        """
        started_s = self._clock()
        failures, told = 0, False
        try:
            while True:
                try:
                    return await (operation() if composed else self._paced(operation))
                except UploadLost:
                    raise
                except StoreUnavailable as error:
                    failures += 1
                    delay_s = self._policy.delay_s(
                        failures, self._fraction(), throttled=isinstance(error, StoreThrottled)
                    )
                    spent_s = self._clock() - started_s
                    if failures >= self._policy.attempts or spent_s + delay_s > self._policy.budget_s:
                        raise _given_up(error, failures, spent_s) from error
                    told = True
                    self._tell(str(error))
                await self._sleep(delay_s)
        finally:
            # However it ended: whoever goes on tells what goes on failing.
            if told:
                self._tell("")

    async def _paced(self, operation: Callable[[], Awaitable[T]]) -> T:
        await self.allowance.enter()
        try:
            result = await operation()
        except StoreThrottled:
            self.allowance.throttled()
            raise
        finally:
            self.allowance.leave()
        # A refusal is no success here: a bucket that denies everything says nothing about its load.
        self.allowance.succeeded()
        return result


def _given_up(error: StoreUnavailable, attempts: int, spent_s: float) -> StoreUnavailable:
    if attempts == 1:
        return error
    return type(error)(f"{error} (gave up after {attempts} attempts in {spent_s:.1f} s)", key=error.key)


class RetryingStore:
    """A store whose every operation is retried by ``retrier``; writes keep their create-only and compare meaning.

    A successful ``create`` means that the object holds exactly our bytes. It does not prove that nobody else wrote
    the same ones: whoever must know that puts a write id into them.
    """

    def __init__(self, store: Store, retrier: Retrier) -> None:
        self._store = store
        self._retrier = retrier

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._store!r})"

    async def get(self, key: str, *, max_bytes: int) -> Blob:
        """See :meth:`~weight_store.store.Store.get`."""
        return await self._retrier.call(lambda: self._store.get(key, max_bytes=max_bytes))

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """See :meth:`~weight_store.store.Store.read_into`."""
        await self._retrier.call(lambda: self._store.read_into(key, offset, buffer))

    async def create(self, key: str, data: bytes) -> str:
        """See :meth:`~weight_store.store.Store.create`; a write of ours whose reply was lost counts as success.

        ``PreconditionFailed`` only if there is an object: a refusal in favour of another request that came to nothing
        is retried.
        """
        return await self._write(key, data, lambda: self._store.create(key, data), create=True)

    async def replace(self, key: str, data: bytes, *, etag: str) -> str:
        """See :meth:`~weight_store.store.Store.replace`; a write of ours whose reply was lost counts as success.

        One that was already replaced by somebody else again is reported as ``PreconditionFailed``.
        """
        return await self._write(key, data, lambda: self._store.replace(key, data, etag=etag))

    @asynccontextmanager
    async def upload(self, key: str) -> AsyncIterator[Upload]:
        """See :meth:`~weight_store.store.Store.upload`; parts are retried by the adapter that knows them."""
        async with self._store.upload(key) as upload:
            yield _RetryingUpload(upload, self._retrier)

    async def delete(self, key: str) -> None:
        """See :meth:`~weight_store.store.Store.delete`."""
        await self._retrier.call(lambda: self._store.delete(key))

    async def list(self, prefix: str) -> AsyncIterator[Entry]:
        """See :meth:`~weight_store.store.Store.list`; retried up to the first entry.

        Later failures are the adapter's to retry, by the page: servers differ in their order, so nobody else could
        go on where it stopped.
        """

        async def first() -> tuple[AsyncIterator[Entry], Entry | None]:
            entries = self._store.list(prefix)
            return entries, await anext(entries, None)

        entries, entry = await self._retrier.call(first, composed=True)
        while entry is not None:
            yield entry
            entry = await anext(entries, None)

    async def close(self) -> None:
        """See :meth:`~weight_store.store.Store.close`."""
        await self._store.close()

    async def _write(self, key: str, data: bytes, write: Callable[[], Awaitable[str]], *, create: bool = False) -> str:
        async def attempt() -> str:
            try:
                return await write()
            except PreconditionFailed as refusal:
                # Also at the first attempt: aiohttp, proxies and load balancers repeat a PUT without telling.
                return await self._etag_if_ours(key, data, refusal, create=create)

        return await self._retrier.call(attempt)

    async def _etag_if_ours(self, key: str, data: bytes, refusal: PreconditionFailed, *, create: bool) -> str:
        try:
            blob = await self._store.get(key, max_bytes=len(data))
        except ObjectTooLarge:
            raise refusal from None
        except ObjectNotFound:
            if not create:
                raise refusal from None
            # 409: another request for the key was under way. Callers take a refusal for "it is there".
            raise StoreUnavailable(f"{refusal}, yet there is no such object", key=key) from refusal
        if blob.data != data:
            raise refusal
        return blob.etag


class _RetryingUpload:
    """Retries ``commit``, which an adapter allows to be called again after ``StoreUnavailable``."""

    def __init__(self, upload: Upload, retrier: Retrier) -> None:
        self._upload = upload
        self._retrier = retrier

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        # Not retried: part of the data may have been taken already.
        await self._upload.write(data)

    async def commit(self) -> None:
        await self._retrier.call(self._upload.commit, composed=True)


class _RetryingMultipartStore(RetryingStore):
    """Over a store whose unfinished uploads can be found."""

    def __init__(self, store: Store, retrier: Retrier, uploads: MultipartStore) -> None:
        super().__init__(store, retrier)
        self._uploads = uploads

    async def list_uploads(self, prefix: str) -> AsyncIterator[UnfinishedUpload]:
        # The adapter retries by the page, as for objects.
        async for upload in self._uploads.list_uploads(prefix):
            yield upload

    async def abort_upload(self, upload: UnfinishedUpload) -> None:
        await self._retrier.call(lambda: self._uploads.abort_upload(upload))


def with_retry(store: Store, retrier: Retrier) -> RetryingStore:
    """Return ``store`` with retries; a ``MultipartStore`` stays one."""
    if isinstance(store, MultipartStore):
        return _RetryingMultipartStore(store, retrier, store)
    return RetryingStore(store, retrier)

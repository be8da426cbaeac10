"""Examines a store from a place of its own, and cleans up behind itself."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from weight_store.doctor.diagnosis import Observations, advice, can_move_head, classify
from weight_store.doctor.observing import observe_conditional, observe_freshness, observe_multipart, observe_ranges
from weight_store.doctor.s3_observing import PlainSeen, observe_plain
from weight_store.errors import StoreError, StoreRefused
from weight_store.keys import DOCTOR_PREFIX
from weight_store.object_keys import check_object_key
from weight_store.opening import check_reachable, open_store, parse_s3_url
from weight_store.retry import RetryPolicy
from weight_store.s3_settings import MIB, S3Options
from weight_store.store import MultipartStore, Store

_POLICY = RetryPolicy(attempts=4, budget_s=30.0)
_PART_BYTES = 5 * MIB
_CREATE_ROUNDS = 10
_INCREMENTS = 4


@dataclass(frozen=True, slots=True)
class Examination:
    """What to examine and how hard. ``probe_id`` names the place of this examination and is never used twice."""

    url: str
    probe_id: str
    writers: int = 8
    rounds: int = _CREATE_ROUNDS
    size_bytes: int = 32 * MIB
    tell: Callable[[str], None] = lambda _: None

    async def run(self) -> Observations:
        """Do it. Raises ``StoreRefused`` or ``StoreUnavailable`` if the store cannot be examined at all."""
        place = f"{DOCTOR_PREFIX}{self.probe_id}"
        options = S3Options(part_bytes=_PART_BYTES)
        async with AsyncExitStack() as stack:
            stores = [await stack.enter_async_context(_opened(self.url, options)) for _ in range(self.writers)]
            for store in stores:
                # Connected before the races, so that they start together.
                await check_reachable(store)
            async with cleaned(stores[0], place):
                return await self._observe(stores, place, options)

    async def _observe(self, stores: list[Store], place: str, options: S3Options) -> Observations:
        first, last = stores[0], stores[-1]
        plain: PlainSeen | None = None
        if self.url.startswith("s3:"):
            self.tell("plain writes, checksums, clock")
            plain = await observe_plain(parse_s3_url(self.url), options, place, policy=_POLICY)
        else:
            await first.create(f"{place}/plain", b"")  # a directory that cannot be written says so in its own words
        self.tell(f"conditional writes, {self.rounds} races of {self.writers} writers")
        conditional = await observe_conditional(stores, place, rounds=self.rounds, increments=_INCREMENTS)
        seen = Observations(conditional)
        if plain is not None:
            seen = replace(seen, checks_md5=plain.checks_md5, checks_crc32=plain.checks_crc32, skew_s=plain.skew_s)
        if conditional.create_new != "done":
            return seen  # nothing can be written through the port
        self.tell("read after write, ranges")
        stale, lists = await observe_freshness(first, last, place, rounds=self.rounds)
        seen = replace(seen, stale=stale, lists=lists, ranges=await observe_ranges(first, place))
        if seen.ranges:
            return seen  # what is uploaded in parts could not be read back
        self.tell(f"uploads in parts, {self.size_bytes // MIB} MiB")
        multipart, up, down = await observe_multipart(first, place, self.size_bytes, time.monotonic)
        return replace(seen, multipart=multipart, upload_rate=up or None, download_rate=down or None)


async def require_conditional_writes(store: Store, probe_id: str) -> None:
    """Make sure, in about thirty small requests, that many writers may share ``store``; ``StoreRefused`` says why not.

    Works in a place named by ``probe_id``, which is never used twice. ``StoreUnavailable`` if it does not answer,
    ``StoreUnwritable`` for a directory in which nothing can be written.
    """
    place = f"{DOCTOR_PREFIX}{probe_id}"
    async with cleaned(store, place):
        seen = await observe_conditional([store] * 4, place, rounds=2, increments=1)
        own_words = await _refusal(store, f"{place}/permission") if classify(seen) == "refused" else ""
    kind = classify(seen)
    if kind != "full":
        way_out = " or start with --single-writer" if can_move_head(seen) else ""
        raise StoreRefused(
            f"{own_words}the store is {advice(kind, seen)} ('weightcast doctor' tells more; use another store{way_out})"
        )


async def _refusal(store: Store, key: str) -> str:
    """Why the store refuses a write, in its own words: keys that may not write look like a store that cannot."""
    try:
        await store.create(key, b"")
    except StoreRefused as error:
        return f"{error}; if that is not the reason, "
    return ""


@asynccontextmanager
async def cleaned(store: Store, place: str) -> AsyncIterator[None]:
    """Remove everything below ``place`` at the end, whatever happens. What cannot be removed is left without a word:
    a store that refuses to delete was never promised to be clean, and the first error is the one that matters.
    """
    check_object_key(place)
    try:
        yield
    finally:
        with contextlib.suppress(StoreError):
            if isinstance(store, MultipartStore):
                for upload in [found async for found in store.list_uploads(f"{place}/")]:
                    await store.abort_upload(upload)
        with contextlib.suppress(StoreError):
            for key in [entry.key async for entry in store.list(f"{place}/")]:
                await store.delete(key)


@asynccontextmanager
async def _opened(url: str, options: S3Options) -> AsyncIterator[Store]:
    store = open_store(url, policy=_POLICY, options=options)
    try:
        yield store
    finally:
        await store.close()

"""Fetch and decode a hop's groups: ranks in parallel, groups on all threads, memory bounded.

Every decoded group is compared with its receipt's digest before anybody gets to see it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from concurrent.futures import Executor

from codec import Change, CodecError, decode_group
from codec.dtypes import Bits
from rollout_agent.errors import DamagedObject
from rollout_agent.settled import in_pool
from rollout_agent.source import LoadedHop
from weight_store.keys import shard_key
from weight_store.layout import Group
from weight_store.reading import fetch_groups
from weight_store.receipt import GroupRange, Receipt
from weight_store.store import Store

REQUESTS = 3
"""Ranged GETs under way at once, of 32 MiB each (more only for a single larger group)."""
DECODE_BYTES = 128 << 20
"""Payloads and results in memory at once; with the requests this stays below 256 MiB above the model, where large
blocks go back to the system when they are freed (:func:`rollout_agent.linux.give_back_large_blocks`)."""

Base = Callable[[Group], Bits]
Take = Callable[[Group, Change], None]


class _Budget:
    """A number of bytes that jobs take and give back; a larger job waits until it is alone."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._used = 0
        self._freed = asyncio.Condition()

    async def take(self, size: int) -> int:
        size = min(size, self._total)
        async with self._freed:
            await self._freed.wait_for(lambda: self._used + size <= self._total)
            self._used += size
        return size

    async def give(self, size: int) -> None:
        async with self._freed:
            self._used -= size
            self._freed.notify_all()


class Fetcher:
    """Fetches from one run. ``fetched_bytes`` counts what came over the wire."""

    def __init__(self, store: Store, run: str, pool: Executor) -> None:
        self._store = store
        self._run = run
        self._pool = pool
        self.fetched_bytes = 0

    async def run(self, hop: LoadedHop, wanted: Collection[int], base: Base, take: Take) -> None:
        """Decode each wanted group against ``base(group)`` and hand it to ``take``, from many threads.

        Raises ``DamagedObject`` naming shard and group, ``FormatError`` for a damaged block, or what the store raises.
        What had been taken by then stays taken; nothing is taken after this has ended.
        """
        by_rank = [
            (receipt, [hop.ranges[group.index] for group in hop.layout.owned(receipt.rank) if group.index in wanted])
            for receipt in hop.receipts
        ]
        busy = [(receipt, ranges) for receipt, ranges in by_rank if ranges]
        ranks = asyncio.Semaphore(REQUESTS)
        budget = _Budget(DECODE_BYTES)
        parallel = max(1, REQUESTS // max(1, len(busy)))
        try:
            async with asyncio.TaskGroup() as tasks:
                for receipt, ranges in busy:
                    tasks.create_task(self._rank(receipt, ranges, parallel, ranks, budget, base, take))
        except BaseExceptionGroup as group:
            raise _first(group) from None

    async def _rank(
        self,
        receipt: Receipt,
        ranges: list[GroupRange],
        parallel: int,
        ranks: asyncio.Semaphore,
        budget: _Budget,
        base: Base,
        take: Take,
    ) -> None:
        async def one(item: GroupRange, payload: bytes, size: int) -> None:
            try:
                await in_pool(self._pool, _decode, self._run, receipt, item, payload, base, take)
            finally:
                await budget.give(size)

        async with ranks, asyncio.TaskGroup() as tasks:
            async for fetched in fetch_groups(self._store, self._run, receipt, ranges, parallel=parallel):
                self.fetched_bytes += len(fetched.payload)
                size = await budget.take(len(fetched.payload) + 2 * fetched.range.group.nbytes)
                # Copied: the iterator's buffer is only ours until its next item.
                tasks.create_task(one(fetched.range, bytes(fetched.payload), size))


def _decode(run: str, receipt: Receipt, item: GroupRange, payload: bytes, base: Base, take: Take) -> None:
    group = item.group
    try:
        change = decode_group(None if item.full else base(group), payload, group.dtype, group.elements)
    except CodecError as error:
        raise DamagedObject(f"{_name(run, receipt, group)} does not decode: {error}") from None
    if change.digest != item.digest:
        raise DamagedObject(
            f"{_name(run, receipt, group)} decodes to digest {change.digest.hex()}, expected {item.digest.hex()}"
        )
    take(group, change)


def _name(run: str, receipt: Receipt, group: Group) -> str:
    key = shard_key(run, receipt.version, receipt.rank, receipt.nonce, extra_full=receipt.extra_full)
    return f"group {group.index} ({group.pieces[0].tensor.name} {group.pieces[0].box}) of {key}"


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of a task group; its siblings were only cancelled because of it."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

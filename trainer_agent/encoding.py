"""Groups to payloads on all cores, in order, within a bounded window of memory."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import codec
from codec.threads import cores
from trainer_agent.errors import WeightsDamaged

WINDOW_BYTES = 256 << 20
"""Weights of the groups that are being encoded or wait to be written: bounds the memory that payloads take."""

Bits = NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One group, of the tensor ``name``: raw bits now and, for a delta, at the base, with the digests that both must
    have (``digest``: empty where it is not known).
    """

    name: str
    dtype: str
    new: Bits
    digest: bytes = b""
    base: Bits | None = None
    base_digest: bytes = b""


@dataclass(frozen=True, slots=True)
class Damage:
    """A group in shared memory that no longer has the XXH3-128 ``expected`` of it."""

    name: str
    expected: bytes
    found: bytes

    def __str__(self) -> str:
        return f"the group of {self.name}: XXH3-128 {self.found.hex()}, expected {self.expected.hex()}"


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """One coded group. ``full``: its payload needs no base; ``damage``: because the base had changed."""

    payload: bytes
    digest: bytes
    changed: int
    full: bool
    damage: Damage | None
    seconds: float


class Encoder:
    """A pool of threads; the codec releases the GIL."""

    def __init__(self, threads: int | None = None, window_bytes: int = WINDOW_BYTES) -> None:
        self._pool = ThreadPoolExecutor(threads or cores(), thread_name_prefix="weightcast-encode")
        self._window_bytes = window_bytes

    async def encode(self, jobs: Iterable[Job]) -> AsyncGenerator[Encoded, None]:
        """Yield the results in order. Later groups are encoded while the consumer uploads earlier ones."""
        loop = asyncio.get_running_loop()
        running: deque[tuple[int, asyncio.Future[Encoded]]] = deque()
        held = 0
        todo = iter(jobs)
        job = next(todo, None)
        try:
            while job is not None or running:
                while job is not None and (not running or held + job.new.nbytes <= self._window_bytes):
                    running.append((job.new.nbytes, loop.run_in_executor(self._pool, encode, job)))
                    held += job.new.nbytes
                    job = next(todo, None)
                nbytes, future = running[0]
                yield await future
                running.popleft()
                held -= nbytes
        finally:
            for _, future in running:
                future.cancel()

    async def digests(self, groups: Iterable[Bits]) -> list[bytes]:
        """XXH3-128 of every group, in order."""
        loop = asyncio.get_running_loop()
        return await asyncio.gather(*(loop.run_in_executor(self._pool, codec.digest, group) for group in groups))

    def close(self) -> None:
        """End the threads; groups being encoded are finished first."""
        self._pool.shutdown(cancel_futures=True)


def encode(job: Job) -> Encoded:
    """Encode one group. A base that no longer has its digest is not used: the group is sent whole instead.

    ``WeightsDamaged`` if the group itself does not have its own.
    """
    started_s = time.perf_counter()
    base, damage = job.base, None
    if base is not None and (found := codec.digest(base)) != job.base_digest:
        base, damage = None, Damage(job.name, job.base_digest, found)
    group = codec.encode_group(base, job.new, job.dtype)
    if job.digest not in (b"", group.digest):
        raise WeightsDamaged(
            f"{Damage(job.name, job.digest, group.digest)}: it changed in shared memory between copy and encoding, so "
            "something wrote to it, or the memory is faulty; the next publication copies all anew"
        )
    full = not codec.needs_base(group.payload)
    return Encoded(group.payload, group.digest, group.changed, full, damage, time.perf_counter() - started_s)

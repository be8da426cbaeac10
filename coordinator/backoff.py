"""Retrying what may succeed later: exponential backoff with full jitter, bounded by attempts or by time."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from coordinator.errors import TryAgain

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Backoff:
    """The n-th pause is drawn from 0 .. ``min(first_s * 2**n, longest_s)`` (full jitter: callers do not march in step).

    ``attempts`` None: no limit. ``budget_s`` None: no limit in time.
    """

    first_s: float = 0.2
    longest_s: float = 10.0
    attempts: int | None = None
    budget_s: float | None = None

    def pause_s(self, failures: int, draw: float) -> float:
        """Seconds to wait after ``failures`` failures in a row; ``draw`` in [0, 1)."""
        return draw * min(self.longest_s, self.first_s * 2.0 ** min(failures - 1, 30))


async def retrying(
    call: Callable[[], Awaitable[T]],
    backoff: Backoff | None = None,
    *,
    on_failure: Callable[[TryAgain, float], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    draw: Callable[[], float] = random.random,
) -> T:
    """Await ``call()`` until it does not raise :class:`TryAgain`; raises the last one when the limits are reached.

    ``on_failure(error, pause_s)`` hears of every failure that will be tried again.
    """
    backoff = backoff or Backoff()
    start_s, failures = clock(), 0
    while True:
        try:
            return await call()
        except TryAgain as error:
            failures += 1
            pause_s = backoff.pause_s(failures, draw())
            tired = backoff.attempts is not None and failures >= backoff.attempts
            late = backoff.budget_s is not None and clock() + pause_s - start_s > backoff.budget_s
            if tired or late:
                raise
            if on_failure is not None:
                on_failure(error, pause_s)
        await sleep(pause_s)

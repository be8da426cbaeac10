"""Waking those who wait, and sharing one read among those who ask at the same time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Broadcast:
    """Wakes everybody who waits. Check the condition, then call :meth:`wait` without awaiting in between."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.closed = False

    def notify(self) -> None:
        """Wake all who wait now."""
        self._event.set()
        if not self.closed:
            self._event = asyncio.Event()

    def close(self) -> None:
        """Wake all, now and ever after: the coordinator stops and nobody should keep it from doing so."""
        self.closed = True
        self.notify()

    async def wait(self, timeout_s: float) -> None:
        """Return when notified or after ``timeout_s``."""
        try:
            await asyncio.wait_for(self._event.wait(), max(timeout_s, 0))
        except TimeoutError:
            return


class Shared(Generic[T]):
    """``await shared()`` gives an outcome of ``read`` that began after the call; concurrent callers share one.

    Failures are shared too: while the store is down, a crowd of callers must not queue for a time-out each.
    """

    def __init__(self, read: Callable[[], Awaitable[T]]) -> None:
        self._read = read
        self._turns = itertools.count(1)
        self._began = 0
        self._lock = asyncio.Lock()
        self._outcome: asyncio.Future[T] | None = None

    async def __call__(self) -> T:
        """Read, or share a read that begins after this call. Raises what ``read`` raises."""
        asked = next(self._turns)
        async with self._lock:
            if self._outcome is None or self._began < asked:
                began = next(self._turns)
                outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
                try:
                    outcome.set_result(await self._read())
                except Exception as error:  # noqa: BLE001 - handed to every caller, below
                    outcome.set_exception(error)
                self._outcome, self._began = outcome, began
            return self._outcome.result()

"""How many requests a store is asked at once: halved when it complains, raised by one while it is content.

Additive increase and multiplicative decrease, as in TCP: many clients that share one store without knowing each other
converge to equal shares. See Chiu and Jain, "Analysis of the increase and decrease algorithms", 1989.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class Allowance:
    """A number of requests that may be under way, between 1 and ``most``. Belongs to one event loop.

    ``clock`` counts seconds from anywhere. Complaints within ``window_s`` after one that halved the number are of
    requests that were sent before: they do not halve it again.
    """

    def __init__(self, most: int, *, clock: Callable[[], float], window_s: float = 1.0) -> None:
        self.permitted = self._most = max(1, most)
        self._clock = clock
        self._window_s = window_s
        self._halved_s = float("-inf")
        self._successes = 0
        self._running = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a place, hold it within the block."""
        await self.enter()
        try:
            yield
        finally:
            self.leave()

    async def enter(self) -> None:
        """Wait for a place; :meth:`leave` gives it back. For who takes one at every request."""
        while self._running >= self.permitted:
            await self._wait()
        self._running += 1

    def leave(self) -> None:
        """Give a place back."""
        self._running -= 1
        if self._waiting:
            self._wake()

    def succeeded(self) -> None:
        """Note an answer; as many of them as are permitted at once permit one more."""
        self._successes += 1
        if self._successes >= self.permitted:
            self._successes = 0
            if self.permitted < self._most:
                self.permitted += 1
                self._wake()

    def throttled(self) -> None:
        """Note that the store asks for fewer requests."""
        self._successes = 0
        now_s = self._clock()
        if now_s - self._halved_s >= self._window_s:
            self._halved_s = now_s
            self.permitted = max(1, self.permitted // 2)

    async def _wait(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            self._waiting.remove(waiter)
            # It may have been woken as well: the next one takes the place.
            self._wake()
            raise
        self._waiting.remove(waiter)

    def _wake(self) -> None:
        free = self.permitted - self._running
        for waiter in self._waiting:
            if free <= 0:
                return
            if not waiter.done():
                waiter.set_result(None)
            free -= 1

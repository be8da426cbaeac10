"""Waiting for the next version: told by a coordinator, or at the pace at which the bucket is looked at.

A coordinator is a hint and no more. While it is silent the bucket is looked at beside it, and what it announces is
acted upon at once only the first time: if the bucket does not say the same, the next look comes at the usual pace.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from coordinator.client import CoordinatorClient
from coordinator.errors import CoordinatorError, CoordinatorUnreachable
from coordinator.wire import HeadAnswer
from weight_store.position import Position

_LOG = logging.getLogger(__name__)

_LONG_POLL_S = 20.0
_GRACE_S = 2.0
"""How much later than it was asked to a coordinator may answer before it counts as silent."""


class Announcements:
    """Of one run. ``pause`` sleeps for as long as two looks at the head are apart, ``sleep`` as long as it is told.

    ``note`` is told what is wrong with the coordinator, ``heard`` is called once it answers again.
    """

    def __init__(
        self,
        client: CoordinatorClient,
        run: str,
        *,
        pause: Callable[[], Awaitable[None]],
        sleep: Callable[[float], Awaitable[None]],
        note: Callable[[CoordinatorError], None],
        heard: Callable[[], None],
    ) -> None:
        self._client = client
        self._run = run
        self._pause = pause
        self._sleep = sleep
        self._note = note
        self._heard = heard
        self._asking: asyncio.Task[HeadAnswer] | None = None
        self._silent = False
        self._hurried: Position | None = None
        """The version held when an announcement was last acted upon at once."""

    async def wait(self, held: Position) -> None:
        """Return when the head may have moved on from ``held``, or after a while."""
        if self._asking is None:
            self._asking = asyncio.ensure_future(self._client.head(self._run, after=held.version, wait_s=_LONG_POLL_S))
        patience = asyncio.ensure_future(self._pause() if self._silent else self._sleep(_LONG_POLL_S + _GRACE_S))
        try:
            await asyncio.wait((self._asking, patience), return_when=asyncio.FIRST_COMPLETED)
        finally:
            patience.cancel()
        if not self._asking.done():
            self._silent = True  # the question stays asked, beside looks at the bucket
            self._note(CoordinatorUnreachable("the coordinator does not answer"))
        elif not self._is_news(held):
            await self._pause()

    def _is_news(self, held: Position) -> bool:
        """Whether the answer, which is there, is a reason to look at once."""
        asking, self._asking = self._asking, None
        if asking is None:
            return False
        try:
            head = asking.result()
        except CoordinatorError as error:
            self._silent = True
            self._note(error)
            return False
        if self._silent:
            self._silent = False
            _LOG.info("the coordinator answers again")
            self._heard()
        if head.position.version <= held.version or self._hurried == held:
            return False
        self._hurried = held
        return True

    async def close(self) -> None:
        """Ask no more. Calling it twice is allowed."""
        asking, self._asking = self._asking, None
        if asking is not None:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

"""Whether the store is fit for what would be done with it, asked before anything is: until then nothing is decided."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from weight_store.errors import StoreUnavailable

logger = logging.getLogger(__name__)

AGAIN_S = 5.0


class StoreCheck:
    """Asks ``examine`` until it returns. A store that does not answer is asked again; any other error is the answer.

    ``sleep`` waits seconds. The reason why it has not passed is for those who may know the store's address.
    """

    def __init__(
        self, examine: Callable[[], Awaitable[None]], *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._examine = examine
        self._sleep = sleep
        self._passed = asyncio.Event()
        self.reason = "it has not been asked yet"

    def __repr__(self) -> str:
        return "StoreCheck(passed)" if self.passed else f"StoreCheck({self.reason!r})"

    @property
    def passed(self) -> bool:
        """Whether the store was found fit."""
        return self._passed.is_set()

    async def ask(self) -> None:
        """Ask once. Raises whatever ``examine`` does, except ``StoreUnavailable``, which becomes the reason."""
        try:
            await self._examine()
        except StoreUnavailable as error:
            logger.warning("nothing is decided until the store answers: %s", error)
            self.reason = str(error)
        else:
            self._passed.set()

    async def ask_until_passed(self) -> None:
        """Ask again and again; raises what :meth:`ask` raises."""
        while not self.passed:
            await self._sleep(AGAIN_S)
            await self.ask()

    async def wait(self) -> None:
        """Return once it has passed."""
        await self._passed.wait()

"""Signs of life: while a rank's bytes move it says so, and the coordinator does not give the version up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from typing import Any, TypeVar

from coordinator.errors import CoordinatorError
from weight_store.finishing import finished

T = TypeVar("T")

_log = logging.getLogger(__name__)

SIGN_EVERY_S = 5.0
"""A few dozen to a version that expires after two minutes, and one small request at that."""


class Movement:
    """Counts how often one publication got further than it ever was: bytes sent or received, groups taken or applied.

    What is done again counts only where it gets beyond all attempts before, so a publication moves no more often than
    its shard and its base are large, whatever a store does with what it was sent. May be told from any thread: two at
    once may count one, for only whether the number changes matters.
    """

    def __init__(self) -> None:
        self.count = 0
        self._furthest: dict[tuple[str, int], int] = {}

    def begin(self) -> None:
        """The next publication: nothing of it has moved."""
        self._furthest = {}

    def carried(self, key: str, start: int, end: int) -> None:
        """Told by the store, see :data:`~weight_store.store.Moved`."""
        # The end of a shard's key is the attempt's nonce: all attempts send the same shard.
        self._reach(key.rpartition("-")[0], start, end - start)

    def applied(self, version: int, groups: int) -> None:
        """So many groups of a version are in the base that is rebuilt."""
        self._reach("applied", version, groups)

    def taken(self, items: Iterable[T]) -> Iterator[T]:
        """``items``, of which each is taken up to be encoded."""
        for number, item in enumerate(items, 1):
            self._reach("taken", 0, number)
            yield item

    def _reach(self, what: str, where: int, far: int) -> None:
        if far > self._furthest.get((what, where), 0):
            self._furthest[what, where] = far
            self.count += 1


class Decided(Exception):
    """The version is not undecided any more: nobody waits for what was under way for it."""


async def giving_signs(
    work: Coroutine[Any, Any, T],
    movement: Movement,
    sign: Callable[[], Awaitable[bool]],
    sleep: Callable[[float], Awaitable[None]],
) -> T:
    """What ``work`` returns or raises; until then ``sign()`` every few seconds if anything moved meanwhile.

    ``sign()`` tells whether the version is still undecided. Once it is not, ``work`` is cancelled: ``Decided``.
    """
    working = asyncio.create_task(work, name="signed-for")
    signs = asyncio.create_task(_give_signs(movement, sign, sleep), name="signs-of-life")
    try:
        await asyncio.wait({working, signs}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await finished(_end(working, signs))
    if not working.cancelled():
        return working.result()
    signs.result()  # raises what is a defect
    raise Decided


async def _end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def _give_signs(
    movement: Movement, sign: Callable[[], Awaitable[bool]], sleep: Callable[[float], Awaitable[None]]
) -> None:
    seen = movement.count
    while True:
        await sleep(SIGN_EVERY_S)
        now = movement.count
        if now == seen:
            continue
        try:
            if not await sign():
                return
        except CoordinatorError as error:
            # Nothing depends on a single sign, and what became of the version is learned at the end of the upload.
            _log.info("a sign of life did not arrive: %s", error)
        else:
            seen = now

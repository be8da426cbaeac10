"""Signs of life: while a rank's bytes move it says so, and the coordinator does not give the version up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import TypeVar

from coordinator.errors import CoordinatorError

T = TypeVar("T")

_log = logging.getLogger(__name__)

SIGN_EVERY_S = 5.0
"""A few dozen to a version that expires after two minutes, and one small request at that."""


class Movement:
    """Counts what moves: blocks sent or received, groups taken up. May be told from any thread."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        """Something moved. Two threads at once may count one; only whether the number changes matters."""
        self.count += 1

    def each(self, items: Iterable[T]) -> Iterator[T]:
        """``items``, each a movement when it is taken."""
        for item in items:
            self()
            yield item


@contextlib.asynccontextmanager
async def giving_signs(
    movement: Movement, sign: Callable[[], Awaitable[object]], sleep: Callable[[float], Awaitable[None]]
) -> AsyncIterator[None]:
    """Within the block, ``sign()`` every few seconds if anything moved meanwhile."""
    task = asyncio.create_task(_give_signs(movement, sign, sleep), name="signs-of-life")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.result()  # it never ends by itself: a defect


async def _give_signs(
    movement: Movement, sign: Callable[[], Awaitable[object]], sleep: Callable[[float], Awaitable[None]]
) -> None:
    seen = movement.count
    while True:
        await sleep(SIGN_EVERY_S)
        now = movement.count
        if now == seen:
            continue
        try:
            await sign()
        except CoordinatorError as error:
            # Nothing depends on a single sign, and what became of the version is learned at the end of the upload.
            _log.info("a sign of life did not arrive: %s", error)
        else:
            seen = now

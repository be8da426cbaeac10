"""Work in threads that is never left running behind its caller's back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

_T = TypeVar("_T")


async def in_thread(call: Callable[..., _T], *args: object, on_cancel: Callable[[], None] | None = None) -> _T:
    """Run ``call`` in a thread; a cancellation is passed on, but only after the call has ended.

    ``on_cancel`` tells the call to hurry.
    """
    return await settled(asyncio.get_running_loop().run_in_executor(None, call, *args), on_cancel)


async def in_pool(pool: Executor, call: Callable[..., _T], *args: object) -> _T:
    """The same in a given pool."""
    return await settled(asyncio.get_running_loop().run_in_executor(pool, call, *args))


async def settled(work: asyncio.Future[_T], on_cancel: Callable[[], None] | None = None) -> _T:
    """Await ``work``. A thread cannot be cancelled, and what it does to files must not overlap with what follows."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        if on_cancel is not None:
            on_cancel()
        while not work.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([work])
        if not work.cancelled():
            work.exception()
        raise

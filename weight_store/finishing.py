"""Work that must reach its end although the task that awaits it is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


async def finished(work: Coroutine[Any, Any, T] | asyncio.Future[T], on_cancel: Callable[[], None] | None = None) -> T:
    """Await ``work`` to its end; a cancellation that arrives meanwhile is raised only then.

    ``on_cancel`` tells the work to hurry.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if on_cancel is not None:
            on_cancel()
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({task})
        if not task.cancelled():
            # Looked at, or asyncio would report an error that nobody had retrieved.
            task.exception()
        raise


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Like :func:`asyncio.to_thread`, but the thread has always finished when this returns or raises.

    A thread cannot be cancelled: left behind, it would go on with a buffer or a descriptor that the caller reuses.
    """
    return await finished(asyncio.to_thread(function, *args, **kwargs))

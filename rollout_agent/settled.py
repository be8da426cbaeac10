"""Work in threads that is never left running behind its caller's back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

from weight_store.finishing import finished

_T = TypeVar("_T")


async def in_thread(call: Callable[..., _T], *args: object, on_cancel: Callable[[], None] | None = None) -> _T:
    """Run ``call`` in a thread; a cancellation is passed on, but only after the call has ended.

    ``on_cancel`` tells the call to hurry. What a thread does to files must not overlap with what follows.
    """
    return await finished(asyncio.get_running_loop().run_in_executor(None, call, *args), on_cancel)


async def in_pool(pool: Executor, call: Callable[..., _T], *args: object) -> _T:
    """The same in a given pool."""
    return await finished(asyncio.get_running_loop().run_in_executor(pool, call, *args))

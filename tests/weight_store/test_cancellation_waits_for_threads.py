"""A cancelled operation has let go of its buffer and its descriptors by the time the caller learns of it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from weight_store.finishing import finished, in_thread


async def test_the_thread_ends_before_the_cancelled_task() -> None:
    started, release, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        release.wait(10)
        ended.set()

    task = asyncio.create_task(in_thread(work))
    await asyncio.to_thread(started.wait, 10)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0.01)
        assert not task.done()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_an_error_after_the_cancellation_is_not_lost_in_a_warning() -> None:
    release = asyncio.Event()

    async def work() -> None:
        await release.wait()
        raise ValueError("too late")

    task = asyncio.create_task(finished(work()))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_results_and_errors_come_through() -> None:
    assert await in_thread(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await in_thread(divmod, 7, 0)

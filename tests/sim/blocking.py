"""Calls that block, where nothing really waits: a thread of their own runs only while the loop stands still."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from typing import Any

from tests.sim.errors import Killed
from tests.sim.loop import Process, SimLoop


class Blocking(threading.Thread):
    """One call. Either its thread runs or the loop does, never both, so that a seed remains one run."""

    def __init__(self, process: Process, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._process = process
        self._call = call
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._context = contextvars.copy_context()
        self._wants: tuple[Condition, Callable[[], bool], float | None] | None = None
        self._is_so = self._killed = False
        self._outcome: Any = None
        self._error: BaseException | None = None

    async def result(self) -> Any:
        """What the call comes to."""
        self.start()
        try:
            while self._has_more():
                assert self._wants is not None
                self._is_so = await self._until(*self._wants)
                self._turn.release()
        except BaseException:
            self._killed = True
            self._turn.release()
            raise
        finally:
            self.join()
        if self._error is not None:
            raise self._error
        return self._outcome

    def _has_more(self) -> bool:
        """Let the thread run until it waits, or ends."""
        self._back.acquire()
        return self._wants is not None

    async def _until(self, condition: Condition, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        loop = asyncio.get_running_loop()
        until_s = None if timeout_s is None else loop.time() + timeout_s
        while not (is_so := ready()) and (until_s is None or loop.time() < until_s):
            await condition.told(None if until_s is None else until_s - loop.time())
            await self._process.turn()
        return is_so

    # ---- in the thread

    def run(self) -> None:
        self._context.run(self._run)

    def _run(self) -> None:
        # What the call sends, it sends by way of the simulation's loop.
        asyncio._set_running_loop(self._process.loop)
        try:
            self._outcome = self._call()
        except BaseException as error:
            self._error = error
        finally:
            asyncio._set_running_loop(None)
            self._wants = None
            self._back.release()

    def wait_for(self, condition: Condition, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        """Give the turn to the loop, and go on when it is so or the time is over."""
        if self._killed:
            raise Killed("its process is dead")
        self._wants = condition, ready, timeout_s
        self._back.release()
        self._turn.acquire()
        if self._killed:
            raise Killed("its process is dead")
        return self._is_so


class Condition:
    """Stands for ``threading.Condition``. Only a :class:`Blocking` call waits; others see what is so now."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self._changes = 0
        self._news = asyncio.Event()

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *_: object) -> None:
        pass

    def notify_all(self) -> None:
        """See ``threading.Condition``."""
        self._changes += 1
        self._news.set()
        self._news = asyncio.Event()

    async def told(self, timeout_s: float | None) -> None:
        """Return with the next notification, or when the time is over."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        except TimeoutError:
            pass

    def wait_for(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        """See ``threading.Condition``."""
        thread = threading.current_thread()
        return thread.wait_for(self, ready, timeout) if isinstance(thread, Blocking) else ready()

    def wait(self, timeout: float | None = None) -> bool:
        """See ``threading.Condition``."""
        changes = self._changes
        return self.wait_for(lambda: self._changes > changes, timeout)

"""An event loop in which time is a number, threads do not exist and every run with the same input is the same run.

Nothing ever really sleeps: when no callback is ready, the clock jumps to the next timer. ``asyncio.to_thread`` and
executors run their call in place. Order comes from the virtual delays that the simulation draws; callbacks that are due
at the same moment keep asyncio's own order, for production code may rely on that.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

from tests.sim.errors import Killed, Stuck

TICK_S = 1e-6
"""What one round of the loop takes."""


class SimTask(asyncio.Task[Any]):
    """A task with the same hash in every run: asyncio keeps tasks in sets, and cancels them in a set's order."""

    _numbers = itertools.count()

    def __init__(self, *args: Any, **options: Any) -> None:
        self._number = next(SimTask._numbers)
        super().__init__(*args, **options)

    def __hash__(self) -> int:
        return self._number


class _Selector:
    """Instead of waiting for sockets: move the clock on."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise Stuck("nothing is ready and nothing will ever be: a deadlock")
        # A little more than asked: code that waits for what is left of its time would wait for nothing, for ever.
        self._loop.now_s += timeout + TICK_S
        return []


class SimLoop(asyncio.BaseEventLoop):
    """See the module. ``now_s`` starts at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self._selector = _Selector(self)
        # Two timers that are closer than this count as one moment.
        self._clock_resolution = 1e-9
        self.set_task_factory(_make_task)
        self.defects: list[BaseException] = []
        self.set_exception_handler(self._note_defect)

    def time(self) -> float:
        """Virtual seconds."""
        return self.now_s

    def run_in_executor(self, executor: Any, call: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Run ``call`` here and now."""
        future = self.create_future()
        try:
            future.set_result(call(*args))
        except StopIteration as error:
            future.set_exception(RuntimeError(repr(error)))
        except BaseException as error:
            future.set_exception(error)
        return future

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def _note_defect(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, Killed | asyncio.CancelledError):
            self.defects.append(error or RuntimeError(str(context.get("message"))))


class Process:
    """Something that can be killed or paused as a whole: a coordinator, a sidecar, a trainer, an agent.

    Tasks belong to the process within which they were created. A killed process does nothing more: its tasks are
    cancelled, and whatever they try to do to the world while they end raises ``Killed``.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.tasks: dict[SimTask, None] = {}
        self._paused: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return self.name

    @property
    def paused(self) -> bool:
        """True between :meth:`pause` and :meth:`resume`."""
        return self._paused is not None

    def spawn(self, work: Coroutine[Any, Any, Any]) -> SimTask:
        """Start a task of this process."""
        context = contextvars.copy_context()
        context.run(_PROCESS.set, self)
        task: SimTask = asyncio.get_running_loop().create_task(work, context=context)  # type: ignore[assignment]
        return task

    def kill(self) -> None:
        """End it as kill -9 does."""
        if not self.alive:
            return
        self.alive = False
        self.resume()
        for task in list(self.tasks):
            task.cancel()
        self.tasks.clear()

    def pause(self) -> None:
        """Stop it where it is; the world goes on."""
        if self._paused is None:
            self._paused = asyncio.get_running_loop().create_future()

    def resume(self) -> None:
        """Let it go on."""
        paused, self._paused = self._paused, None
        if paused is not None and not paused.done():
            paused.set_result(None)

    async def turn(self) -> None:
        """Wait while paused; ``Killed`` if it is dead. Awaited before and after everything that leaves the process."""
        while self._paused is not None and self.alive:
            await asyncio.shield(self._paused)
        if not self.alive:
            raise Killed(self.name)

    async def sleep(self, seconds: float) -> None:
        """What production code is given as its sleep."""
        await asyncio.sleep(seconds)
        await self.turn()


_PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


def _make_task(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Future[Any]:
    task = SimTask(work, loop=loop, **options)
    context = options.get("context")
    process = context.get(_PROCESS) if context is not None else _PROCESS.get()
    if process is not None:
        process.tasks[task] = None
        task.add_done_callback(lambda done: process.tasks.pop(task, None))  # type: ignore[func-returns-value]
        if not process.alive:
            task.cancel()
    return task

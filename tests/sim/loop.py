"""An event loop in which time is a number, threads do not exist and every run with the same input is the same run.

Nothing ever really sleeps: when no callback is ready, the clock jumps to the next timer. ``asyncio.to_thread`` and
executors run their call in place. Order comes from the virtual delays that the simulation draws; callbacks that are due
at the same moment keep asyncio's own order, for production code may rely on that.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from tests.sim.errors import Killed, Stuck

_Future = asyncio.Future
_copy_context, _push, _pop = contextvars.copy_context, heapq.heappush, heapq.heappop
_PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)

TICK_S = 1e-6
"""What one round of the loop takes."""


class SimTask(asyncio.Task[Any]):
    """A task with the same hash in every run: asyncio keeps tasks in sets, and cancels them in a set's order."""

    _numbers = itertools.count()
    _number: int | None = None

    def __hash__(self) -> int:
        # Asked for the first time while the task is made.
        if self._number is None:
            self._number = next(SimTask._numbers)
        return self._number


class _Ran(asyncio.Future[Any]):
    """What became of a call that ran in place. Who awaits it lets others go on first, as one who awaits a thread."""

    def __await__(self) -> Generator[None, None, Any]:
        yield
        return self.result()


class Timer(list[Any]):
    """A callback that is due: when, a number, what, its arguments and its context; what asyncio calls a handle.

    A list, as it takes no frame of Python to make one or to compare two.
    """

    __slots__ = ()

    def when(self) -> float:
        """See ``asyncio.TimerHandle``."""
        when_s: float = self[0]
        return when_s

    def cancel(self) -> None:
        """See ``asyncio.Handle``."""
        self[2:4] = None, ()

    def cancelled(self) -> bool:
        """See ``asyncio.Handle``."""
        return self[2] is None


class SimLoop(asyncio.BaseEventLoop):
    """See the module. ``now_s`` starts at 0.

    asyncio's own loop spends most of a simulation on selectors, debug checks and comparing timers; what this one does
    not override is what runs seldom.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self._due: deque[Timer] = deque()
        self._timers: list[Timer] = []
        self._numbers = itertools.count()
        self._tasks: list[SimTask] = []
        self._crowd = 64
        self.defects: list[BaseException] = []
        self.set_exception_handler(self._note_defect)

    def time(self) -> float:
        """Virtual seconds."""
        return self.now_s

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> Timer:
        """See ``asyncio.loop``."""
        found = Timer((0.0, 0, callback, args, _copy_context() if context is None else context))
        self._due.append(found)
        return found

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> Timer:
        """See ``asyncio.loop``."""
        found = Timer((when, next(self._numbers), callback, args, _copy_context() if context is None else context))
        _push(self._timers, found)
        return found

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> Timer:
        """See ``asyncio.loop``."""
        return self.call_at(self.now_s + delay, callback, *args, context=context)

    def _run_once(self) -> None:
        """Run rounds until somebody stops the loop; asyncio's own runs one and checks more than is of use here."""
        due, timers = self._due, self._timers
        while not self._stopping:  # type: ignore[attr-defined]
            if not due:
                while timers and timers[0][2] is None:
                    _pop(timers)
                if not timers:
                    raise Stuck("nothing is ready and nothing will ever be: a deadlock")
                if timers[0][0] > self.now_s:
                    self.now_s = timers[0][0]
            # A little more than asked: code that waits for what is left of its time would wait for nothing, for ever.
            now_s = self.now_s = self.now_s + TICK_S
            while timers and timers[0][0] <= now_s:
                due.append(_pop(timers))
            for _ in range(len(due)):
                _, _, call, args, context = due.popleft()
                if call is None:
                    continue
                try:
                    context.run(call, *args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:
                    self._note_defect(self, {"exception": error})

    def create_task(  # type: ignore[override]
        self, coro: Any, *, name: str | None = None, context: contextvars.Context | None = None
    ) -> SimTask:
        """See ``asyncio.loop``; the task belongs to the process in whose context it is made."""
        task = SimTask(coro, loop=self, name=name, context=context)
        if len(self._tasks) >= self._crowd:
            self._tasks = self.running()
            self._crowd = 2 * len(self._tasks) + 64
        self._tasks.append(task)
        process = _PROCESS.get() if context is None else context.get(_PROCESS)
        if process is not None:
            process.adopt(task)
            if not process.alive:
                task.cancel()
        return task

    def running(self) -> list[SimTask]:
        """The tasks that have not ended: as ``asyncio.all_tasks``, which looks through those of every loop."""
        return [task for task in self._tasks if not task.done()]

    def run_in_executor(self, executor: Any, call: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Run ``call`` here and now."""
        future = _Ran(loop=self)
        try:
            future.set_result(call(*args))
        except StopIteration as error:
            future.set_exception(RuntimeError(repr(error)))
        except BaseException as error:
            future.set_exception(error)
        return future

    # What asyncio asks for at each future: always False, without a frame of Python.
    get_debug = bool

    def create_future(self) -> asyncio.Future[Any]:
        """See ``asyncio.loop``."""
        return _Future(loop=self)

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
        self.hindered = False
        """Whether :meth:`turn` would do more than return."""
        self.deciding: Callable[[bytes], None] | None = None
        """What befalls it when it is about to write this decision of a version."""
        self.loop = asyncio.get_running_loop()
        self.tasks: list[SimTask] = []
        self._crowd = 16
        self._paused: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return self.name

    @property
    def paused(self) -> bool:
        """True between :meth:`pause` and :meth:`resume`."""
        return self._paused is not None

    def adopt(self, task: SimTask) -> None:
        """Make a task end with the process."""
        if len(self.tasks) >= self._crowd:
            self.tasks = [found for found in self.tasks if not found.done()]
            self._crowd = 2 * len(self.tasks) + 16
        self.tasks.append(task)

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
        self.hindered = True
        for task in list(self.tasks):
            task.cancel()
        self.tasks.clear()

    def pause(self) -> None:
        """Stop it where it is; the world goes on."""
        if self._paused is None:
            self._paused = asyncio.get_running_loop().create_future()
            self.hindered = True

    def resume(self) -> None:
        """Let it go on."""
        paused, self._paused = self._paused, None
        self.hindered = not self.alive
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
        if self.hindered:
            await self.turn()


def is_over() -> bool:
    """Whether this is done for a process that was killed: by its tasks while they end, in reality never."""
    process = _PROCESS.get()
    return process is not None and not process.alive

"""The sidecar process: ``python -m trainer_agent.sidecar --socket PATH [--parent PID]``.

Listens on a Unix socket (mode 0600) for one trainer, takes its requests and sends it events. It never outlives the
trainer that started it (``--parent``); without ``--parent`` it serves one trainer after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from coordinator.client import CoordinatorClient
from trainer_agent.arena import Arena
from trainer_agent.messages import (
    MAX_LINE_BYTES,
    AskServing,
    Attach,
    Close,
    Event,
    Failed,
    Offered,
    Publish,
    Waiting,
    parse_request,
)
from trainer_agent.patience import EXPECTED, Patience
from trainer_agent.signs import Movement
from trainer_agent.worker import Worker
from weight_store.finishing import finished
from weight_store.opening import open_store

_log = logging.getLogger("trainer_agent.sidecar")

PARENT_POLL_S = 0.2
LAST_LOOK_S = 0.5
FAREWELL_S = 3.0
"""How long uploads are given up, once the trainer is gone, before the process ends all the same."""
_MAX_REASON = 1000
_DEFECT_STATUS = 70
"""Exit status after an exception that no rule foresees (EX_SOFTWARE of sysexits.h)."""


class Sidecar:
    """Serves trainers on one socket until it is told to end."""

    def __init__(self, socket_path: Path, parent: int | None) -> None:
        self._socket_path = socket_path
        self._parent = parent
        self._ended = asyncio.Event()
        self._status = 0
        self._asked_to_end = False
        self._serving: asyncio.Task[None] | None = None

    async def run(self) -> int:
        """Serve until the end; returns the exit status."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._defect)
        loop.add_signal_handler(signal.SIGTERM, self._ended.set)
        # Ctrl-C reaches the whole foreground group; when to end is for the trainer to say.
        loop.add_signal_handler(signal.SIGINT, lambda: None)
        previous = os.umask(0o177)
        try:
            server = await asyncio.start_unix_server(self._accept, self._socket_path, limit=MAX_LINE_BYTES)
        except FileNotFoundError:
            return 0  # the trainer has closed its Publisher already, and the directory went with it
        finally:
            os.umask(previous)
        watch = asyncio.create_task(self._watch_parent())
        await self._ended.wait()
        server.close()
        if not self._asked_to_end:
            # A trainer that was killed closes the connection a moment before it is gone.
            await asyncio.wait({watch}, timeout=LAST_LOOK_S)
            await self._farewell()
        watch.cancel()
        return self._status

    async def _farewell(self) -> None:
        """Nobody waits for what is under way any more: what can be given up in time is, and the process ends."""
        if self._serving is None:
            return
        self._serving.cancel()
        await asyncio.wait({self._serving}, timeout=FAREWELL_S)
        if not self._serving.done():
            _log.warning("what is being sent is left unfinished: garbage collection removes it")
            # Requests that are being sent cannot be cancelled, and their threads would be waited for.
            logging.shutdown()
            os._exit(self._status)

    def _defect(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        loop.default_exception_handler(context)
        self._status = _DEFECT_STATUS
        self._ended.set()

    async def _watch_parent(self) -> None:
        # A poll, because PR_SET_PDEATHSIG fires when the *thread* that started us ends.
        while self._parent is None or os.getppid() == self._parent:  # noqa: ASYNC110 - nothing sets an event
            await asyncio.sleep(PARENT_POLL_S)
        _log.warning("the trainer (process %d) is gone", self._parent)
        Arena(self._socket_path.parent).remove()
        self._ended.set()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._serving is not None and not self._serving.done():
            writer.close()
            return
        self._serving = asyncio.create_task(self._serve(reader, writer))
        self._serving.add_done_callback(raise_defect)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self._asked_to_end = await Connection(reader, writer).serve()
        finally:
            writer.close()
            if self._parent is not None:
                self._ended.set()


def raise_defect(task: asyncio.Task[None]) -> None:
    """Done-callback: what no rule foresees reaches the loop's exception handler, which ends the process."""
    if not task.cancelled():
        task.result()


def _make_worker(request: Attach, emit: Callable[[Event], None]) -> Worker:
    def tell(reason: str) -> None:
        emit(Waiting(reason=reason[:_MAX_REASON]))

    movement = Movement()
    store = open_store(request.store, tell=tell, moved=movement.carried)
    # What a full of an earlier version carries is no sign of life of the version being published.
    fulls = open_store(request.store, tell=tell)
    coordinator = CoordinatorClient(request.coordinator)
    arena = Arena(Path(request.arena))
    return Worker(request, arena, store, coordinator, emit, Patience(tell=tell), fulls=fulls, movement=movement)


class Connection:
    """One trainer: reads its requests in order, runs what takes long beside.

    ``make_worker`` makes the worker that an :class:`Attach` asks for, with what is to receive its events.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        make_worker: Callable[[Attach, Callable[[Event], None]], Worker] = _make_worker,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._make_worker = make_worker
        self._worker: Worker | None = None
        self._tasks: dict[asyncio.Task[None], int | None] = {}
        """What runs beside, with the publication's ordinal if it is one."""

    async def serve(self) -> bool:
        """Serve until the trainer closes, asks to end (True), or says something that is no request."""
        try:
            while line := await self._read_line():
                try:
                    request = parse_request(line)
                except ValueError as error:
                    _log.error("not a request: %s", error)
                    return False
                if isinstance(request, Close):
                    await self._finish(request.grace_s)
                    return True
                await self._handle(request)
            return False
        finally:
            await finished(self._end())

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._worker is not None:
            await self._worker.close()

    async def _read_line(self) -> bytes:
        try:
            return await self._reader.readline()
        except (ConnectionError, ValueError):  # ValueError: longer than any line of ours
            return b""

    def emit(self, event: Event) -> None:
        """Send an event; a trainer that is gone is noticed by the reader."""
        if not self._writer.is_closing():
            self._writer.write(event.to_line())

    async def _handle(self, request: Attach | Offered | Publish | AskServing) -> None:
        if isinstance(request, Attach):
            await self._attach(request)
        elif self._worker is None:
            _log.error("%s before attach", request.kind)
        elif isinstance(request, Offered):
            self._spawn(self._worker.settle_layout, None)
        elif isinstance(request, Publish):
            self._spawn(partial(self._worker.publish, request), request.ordinal)
        else:
            self._spawn(partial(self._worker.ask_serving, request), None)

    async def _attach(self, request: Attach) -> None:
        try:
            self._worker = self._make_worker(request, self.emit)
        except EXPECTED as error:
            self.emit(Failed(ordinal=None, code=error.code, message=str(error)))
            return
        # Not awaited: while the coordinator is away, requests (Close among them) are still to be read.
        self._spawn(self._worker.attach, None)

    def _spawn(self, work: Callable[[], Coroutine[Any, Any, None]], ordinal: int | None) -> None:
        task = asyncio.create_task(self._guard(work, ordinal))
        self._tasks[task] = ordinal
        task.add_done_callback(self._done)

    async def _guard(self, work: Callable[[], Coroutine[Any, Any, None]], ordinal: int | None) -> None:
        try:
            await work()  # called only here: a task that is cancelled before it begins would leave a coroutine behind
        except EXPECTED as error:
            self.emit(Failed(ordinal=ordinal, code=error.code, message=str(error)))

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        raise_defect(task)

    async def _finish(self, grace_s: float) -> None:
        # A start that got nowhere, or a question, has nothing that is worth waiting for.
        pending = {task for task, ordinal in self._tasks.items() if ordinal is not None}
        if self._worker is not None and self._worker.full is not None:
            pending.add(asyncio.create_task(self._worker.full.wait(grace_s)))
        if pending:
            await asyncio.wait(pending, timeout=grace_s)


def _set_level(level: str) -> None:
    """How much is logged. A level that there is not must not keep the sidecar from publishing."""
    if level.upper() not in logging.getLevelNamesMapping():
        _log.warning("WEIGHTCAST_LOG is %.20r, which is no level: INFO says what it does", level)
        return
    for name in ("trainer_agent", "weight_store"):
        logging.getLogger(name).setLevel(level.upper())


def main() -> int:
    """Run the process; returns its exit status."""
    parser = argparse.ArgumentParser(prog="trainer_agent.sidecar", description=__doc__)
    parser.add_argument("--socket", type=Path, required=True, help="where to listen; its directory must be private")
    parser.add_argument("--parent", type=int, help="end when this process is no longer our parent")
    options = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, format="weightcast sidecar: %(levelname)s %(message)s", level="WARNING")
    _set_level(os.environ.get("WEIGHTCAST_LOG") or "WARNING")
    with contextlib.suppress(FileNotFoundError):
        options.socket.unlink()
    return asyncio.run(Sidecar(options.socket, options.parent).run())


if __name__ == "__main__":
    sys.exit(main())

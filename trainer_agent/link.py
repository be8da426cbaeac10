"""The Publisher's end of the sidecar: starts the process, starts it again when it ends, and passes messages.

Everything the sidecar needs to go on is told again after a restart, so a kill -9 costs time and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from trainer_agent.errors import SidecarFailed
from trainer_agent.messages import MAX_LINE_BYTES, Event, Message, parse_event

_log = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
"""Importing the sidecar's modules from a cold network file system takes seconds."""
MAX_RESTARTS = 8
"""In a row, without a publication decided in between."""
_SMALL_HEAP = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
"""glibc gives larger blocks back when they are freed; else it keeps up to 32 MiB each in a heap for each thread."""


def restart_delay_s(failures: int) -> float | None:
    """How long to wait before the process is started again that has ended ``failures`` times in a row; None: never."""
    return None if failures > MAX_RESTARTS else min(0.05 * 2**failures, 5.0)


def ended_too_often(failures: int) -> SidecarFailed:
    """What publications are told once the process is not started again."""
    return SidecarFailed(
        f"the sidecar ended {failures} times in a row; its last messages are in the trainer's error output. Training "
        "goes on; a new Publisher would start another one"
    )


class Link:
    """A thread that keeps one sidecar running. Callbacks are called from that thread."""

    def __init__(
        self,
        socket_path: Path,
        *,
        on_connect: Callable[[], None],
        on_event: Callable[[Event], None],
        on_loss: Callable[[], None],
        on_end: Callable[[SidecarFailed], None],
    ) -> None:
        self._socket_path = socket_path
        self._on_connect = on_connect
        self._on_event = on_event
        self._on_loss = on_loss
        self._on_end = on_end
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._sending = threading.Lock()
        self._closing = threading.Event()
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name="weightcast-sidecar", daemon=True)

    @property
    def pid(self) -> int | None:
        """The sidecar's process, while it runs."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def start(self) -> None:
        """Start the thread, and with it the process."""
        self._thread.start()

    def note_progress(self) -> None:
        """Something was decided: earlier ends of the process no longer count."""
        self._failures = 0

    def send(self, message: Message) -> None:
        """Send a message. To a sidecar that is gone it is lost; the next one is told everything anew."""
        with self._sending:
            if self._connection is not None:
                with contextlib.suppress(OSError):
                    self._connection.sendall(message.to_line())

    def close(self, timeout_s: float) -> None:
        """Wait for the process to end, ``timeout_s`` at most; then end it."""
        self._closing.set()
        process = self._process
        if process is not None:
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(5)

    # -- in the thread --

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._one_process()
            except OSError as error:
                _log.warning("the sidecar cannot be started: %s", error)
            if self._closing.is_set():
                return
            self._on_loss()
            self._failures += 1
            delay_s = restart_delay_s(self._failures)
            if delay_s is None:
                self._on_end(ended_too_often(self._failures))
                return
            _log.warning("the sidecar ended; starting it again (%d)", self._failures)
            self._closing.wait(delay_s)

    def _one_process(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._socket_path.unlink()
        # -P: a directory of the trainer's that is called like one of our packages must not take its place.
        command = [sys.executable, "-P", "-m", "trainer_agent.sidecar"]
        arguments = ["--socket", str(self._socket_path), "--parent", str(os.getpid())]
        process = self._process = subprocess.Popen(  # noqa: S603
            [*command, *arguments], stdin=subprocess.DEVNULL, env={**_SMALL_HEAP, **os.environ}
        )
        connection = None
        try:
            connection = self._connect(process)
            if connection is not None:
                self._talk(connection)
        finally:
            with self._sending:
                self._connection = None
            # One that was never reached has nothing to finish, and nobody can tell it to end.
            if connection is None or not self._closing.is_set():
                process.kill()
                process.wait()

    def _connect(self, process: subprocess.Popen[bytes]) -> socket.socket | None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while process.poll() is None and not self._closing.is_set() and time.monotonic() < deadline_s:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect(str(self._socket_path))
            except OSError as error:
                connection.close()
                if not isinstance(error, FileNotFoundError | ConnectionRefusedError):
                    raise
                time.sleep(0.02)
            else:
                return connection
        return None

    def _talk(self, connection: socket.socket) -> None:
        with connection:
            with self._sending:
                self._connection = connection
            self._on_connect()
            for line in _lines(connection):
                try:
                    event = parse_event(line)
                except ValueError as error:
                    _log.error("the sidecar said something that is no event: %s", error)
                    return
                self._on_event(event)


def _lines(connection: socket.socket) -> Iterator[bytes]:
    pending = b""
    while len(pending) <= MAX_LINE_BYTES:
        try:
            data = connection.recv(1 << 16)
        except OSError:
            return
        if not data:
            return
        *lines, pending = (pending + data).split(b"\n")
        yield from lines

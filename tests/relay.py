"""A TCP relay in front of a real server, for tests of what goes wrong between two ends that are right."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

Hook = Callable[[bytes], Awaitable[bytes]]
"""What becomes of some bytes on their way. Raises :class:`Cut` to end the connection."""


class Cut(ConnectionError):
    """The connection ends here, after ``last``."""

    def __init__(self, last: bytes = b"") -> None:
        super().__init__("cut by the relay")
        self.last = last


class Relay:
    """Passes bytes on, through two hooks of each connection: those to the server, and those from it."""

    def __init__(self, endpoint_url: str) -> None:
        address = urlsplit(endpoint_url)
        self.upstream = (str(address.hostname), int(address.port or 0))
        self._passing: set[asyncio.StreamWriter] = set()
        self.port = 0

    def hooks(self) -> tuple[Hook, Hook]:
        """Upwards and downwards, for one more connection."""
        raise NotImplementedError

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Take connections at :attr:`port`; all have ended afterwards."""
        server = await asyncio.start_server(self._pass, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            server.close()
            while self._passing:
                for writer in self._passing:
                    writer.close()
                await asyncio.sleep(0.01)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(*self.upstream)
        self._passing.add(up_writer)
        upwards, downwards = self.hooks()
        sending = asyncio.create_task(_carry(reader, up_writer, upwards))
        # Else who sends would wait for an answer to what never arrived.
        sending.add_done_callback(lambda task: None if _went_well(task) else up_writer.close())
        try:
            with contextlib.suppress(ConnectionError):
                await _carry(up_reader, writer, downwards)
        finally:
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await sending
            for side in (writer, up_writer):
                side.close()
                with contextlib.suppress(OSError):
                    await side.wait_closed()
            self._passing.discard(up_writer)


def _went_well(task: asyncio.Task[None]) -> bool:
    return not task.cancelled() and task.exception() is None


async def _carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter, through: Hook) -> None:
    while data := await source.read(65536):
        try:
            sink.write(await through(data))
        except Cut as cut:
            sink.write(cut.last)
            raise
        finally:
            await sink.drain()
    sink.write_eof()

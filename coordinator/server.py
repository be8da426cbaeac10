"""Runs the coordinator as a process: listens, tells where, stops cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn

from coordinator.ambient import Settings
from coordinator.app import create_app
from coordinator.errors import CannotListen
from weight_store.errors import StoreUnavailable
from weight_store.opening import check_reachable, open_store
from weight_store.retry import RetryPolicy

logger = logging.getLogger(__name__)

# A request should fail while its caller still waits: agents ask again, and with more patience than we have.
_STORE_POLICY = RetryPolicy(attempts=4, max_delay_s=2.0, budget_s=8.0)
_GRACE_S = 10
_BACKLOG = 2048


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where to listen and on which store. ``port`` 0 picks a free one; ``ready_file`` receives the address."""

    store_url: str
    host: str = "127.0.0.1"
    port: int = 8470
    settings: Settings = field(default_factory=Settings)
    ready_file: Path | None = None
    access_log: bool = False


def run(options: ServerOptions, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; ``announce(url)`` is called once requests are answered.

    Raises ``CannotListen``, or ``StoreRefused`` if the bucket cannot be used as it is. A store that does not answer
    is waited for.
    """
    asyncio.run(_serve(options, announce))


async def _serve(options: ServerOptions, announce: Callable[[str], None]) -> None:
    store = open_store(options.store_url, policy=_STORE_POLICY)
    try:
        try:
            await check_reachable(store)
        except StoreUnavailable as error:
            logger.warning("starting without the store, which does not answer: %s", error)
        app = create_app(store, settings=options.settings)
        with contextlib.closing(_listen(options.host, options.port)) as listener:
            url = _url(options.host, listener.getsockname()[1])
            config = uvicorn.Config(
                app,
                lifespan="on",
                log_config=None,
                access_log=options.access_log,
                server_header=False,
                timeout_graceful_shutdown=_GRACE_S,
            )
            server = _Server(config, app.state.coordinator.registry.stop_waiting)
            server.on_started = lambda: _tell(options, url, announce)
            await server.serve(sockets=[listener])
    finally:
        await store.close()
        if options.ready_file is not None:
            options.ready_file.unlink(missing_ok=True)


class _Server(uvicorn.Server):
    """uvicorn, except that it ends long polls when told to stop, and exits with status 0 then."""

    def __init__(self, config: uvicorn.Config, stop_waiting: Callable[[], None]) -> None:
        super().__init__(config)
        self._stop_waiting = stop_waiting
        self.on_started: Callable[[], None] = lambda: None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Replace uvicorn's, which raises the signal again after a clean stop and so ends with a failure status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _stop(self) -> None:
        logger.info("stopping")
        self._stop_waiting()
        self.force_exit = self.should_exit  # asked twice: do not wait for connections
        self.should_exit = True


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise CannotListen(f"cannot listen on {host}: {error.strerror}; give an address of this machine") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise CannotListen(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --port, or 0 for a free one"
        ) from None
    return listener


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _tell(options: ServerOptions, url: str, announce: Callable[[str], None]) -> None:
    if options.ready_file is not None:
        temporary = options.ready_file.with_name(f"{options.ready_file.name}.{os.getpid()}")
        temporary.write_text(f"{url}\n")
        temporary.replace(options.ready_file)
    announce(url)

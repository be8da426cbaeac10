"""Runs the coordinator as a process: listens, tells where, stops cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import resource
import secrets
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from coordinator.access import is_loopback
from coordinator.ambient import Settings
from coordinator.app import create_app
from coordinator.checking import StoreCheck
from coordinator.errors import CannotListen
from coordinator.protocol import BoundedLoop, BoundedProtocol
from coordinator.tokens import TokenFile
from weight_store.doctor import require_conditional_writes
from weight_store.opening import check_reachable, open_store
from weight_store.retry import RetryPolicy, to_log
from weight_store.store import Store

logger = logging.getLogger(__name__)

# A request should fail while its caller still waits: agents ask again, and with more patience than we have.
_STORE_POLICY = RetryPolicy(attempts=4, max_delay_s=2.0, budget_s=8.0)
_GRACE_S = 10
_BACKLOG = 2048
_KEEP_ALIVE_S = 30
"""Longer than httpx keeps an idle connection (5 s), so that it is the client that closes and no request is lost."""
_MAX_HEADER_BYTES = 16 << 10
_SPARE_FILES = 128
"""Descriptors that are not clients' connections: those to the store, the log, the loop."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where to listen and on which store. ``port`` 0 picks a free one; ``ready_file`` receives the address.

    ``token_file`` may be left out only where ``host`` is this machine's own loopback. ``tls_cert`` and ``tls_key`` are
    PEM files, the certificate followed by its chain. Connections above ``max_connections``, or what the process's
    limit on open files allows, are answered with HTTP 503. ``single_writer``: the operator vouches that nothing else
    writes to the bucket, so that a store without sound conditional writes will do.
    """

    store_url: str
    host: str = "127.0.0.1"
    port: int = 8470
    settings: Settings = field(default_factory=Settings)
    ready_file: Path | None = None
    access_log: bool = False
    token_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    max_connections: int = 20_000
    single_writer: bool = False


def run(options: ServerOptions, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; ``announce(url)`` is called once requests are answered.

    Raises ``CannotListen``, ``TokenFileRefused``, or ``StoreRefused`` if the bucket cannot be used as it is. A store
    that does not answer is waited for: until it does, and is found fit, requests are answered with HTTP 503.
    """
    with asyncio.Runner(loop_factory=BoundedLoop) as runner:
        runner.run(_serve(options, announce))


async def _serve(options: ServerOptions, announce: Callable[[str], None]) -> None:
    tokens = _tokens(options)
    _check_tls(options)
    store = open_store(options.store_url, policy=_STORE_POLICY, tell=to_log(logger))
    try:
        _withdraw(options)  # what one that was killed has left
        check = StoreCheck(functools.partial(_examine, store, options))
        await check.ask()
        app = create_app(store, settings=options.settings, tokens=tokens, local_only=tokens is None, check=check)
        with contextlib.closing(_listen(options.host, options.port)) as listener:
            url = _url(options, listener.getsockname()[1])
            server = _Server(_config(options, app), app.state.coordinator.registry.stop_waiting)
            server.on_started = lambda: _tell(options, url, announce)
            late = asyncio.create_task(check.ask_until_passed(), name="check the store")
            late.add_done_callback(functools.partial(_stop_if_failed, server))
            try:
                await server.serve(sockets=[listener])
            finally:
                await _ended(late)
    finally:
        await store.close()
        _withdraw(options)


async def _examine(store: Store, options: ServerOptions) -> None:
    """Return if the store is fit for what would be done with it."""
    await check_reachable(store)
    if not options.single_writer:
        await require_conditional_writes(store, secrets.token_hex(8))


def _stop_if_failed(server: _Server, late: asyncio.Task[None]) -> None:
    """Stop the server if the store was found unfit after it had started, or could not be judged."""
    if not late.cancelled() and late.exception() is not None:
        server.stop()


async def _ended(task: asyncio.Task[None]) -> None:
    """End ``task``; raises what it raised, unless it is only cancelled now."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _config(options: ServerOptions, app: FastAPI) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        lifespan="on",
        log_config=None,
        access_log=options.access_log,
        server_header=False,
        timeout_graceful_shutdown=_GRACE_S,
        timeout_keep_alive=_KEEP_ALIVE_S,
        # h11, because it bounds what it holds of a request's head; httptools does not.
        http=BoundedProtocol,
        h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
        ws="none",
        limit_concurrency=_connections(options.max_connections),
        # What a client says of itself in X-Forwarded-For is nobody's business here.
        proxy_headers=False,
        ssl_certfile=options.tls_cert,
        ssl_keyfile=options.tls_key,
    )


def _tokens(options: ServerOptions) -> TokenFile | None:
    if options.token_file is not None:
        return TokenFile(options.token_file)
    if not is_loopback(options.host):
        raise CannotListen(
            f"refusing to serve {options.host} without tokens, where everybody could seal versions: give --token-file "
            "('weightcast token new --scope trainer --file FILE' makes one), or listen on 127.0.0.1"
        )
    return None


def _check_tls(options: ServerOptions) -> None:
    if (options.tls_cert is None) != (options.tls_key is None):
        raise CannotListen("TLS takes both --tls-cert and --tls-key")
    if options.tls_cert is None:
        if options.token_file is not None and not is_loopback(options.host):
            logger.warning(
                "tokens go over the network readable: give --tls-cert and --tls-key, unless a proxy before us does TLS"
            )
        return
    try:
        # Empty, not absent: without a password OpenSSL would ask for one on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(options.tls_cert, options.tls_key, password="")
    except OSError as error:  # SSLError is one
        what = error.strerror or type(error).__name__
        raise CannotListen(
            f"the certificate {options.tls_cert} and key {options.tls_key} cannot be used: {what}"
        ) from None


def _connections(wanted: int) -> int:
    """How many connections to accept: as many as wanted, if the process may open that many files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < allowed:
        soft = allowed if hard == resource.RLIM_INFINITY else min(allowed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= allowed:
        return wanted
    logger.warning("at most %d connections: the limit on open files is %d (ulimit -n)", soft - _SPARE_FILES, soft)
    return max(1, soft - _SPARE_FILES)


class _Server(uvicorn.Server):
    """uvicorn, except that it ends long polls when told to stop, and exits with status 0 then."""

    def __init__(self, config: uvicorn.Config, stop_waiting: Callable[[], None]) -> None:
        super().__init__(config)
        self._stop_waiting = stop_waiting
        self.on_started: Callable[[], None] = lambda: None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn leaves out the application then, whose end would be logged as an error
            await self.lifespan.shutdown()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Replace uvicorn's, which raises the signal again after a clean stop and so ends with a failure status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def stop(self) -> None:
        """End long polls and finish; a second call does not wait for connections."""
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


def _url(options: ServerOptions, port: int) -> str:
    scheme = "http" if options.tls_cert is None else "https"
    host = f"[{options.host}]" if ":" in options.host else options.host
    return f"{scheme}://{host}:{port}"


def _tell(options: ServerOptions, url: str, announce: Callable[[str], None]) -> None:
    if options.ready_file is not None:
        temporary = options.ready_file.with_name(f"{options.ready_file.name}.{os.getpid()}")
        temporary.write_text(f"{url}\n")
        temporary.replace(options.ready_file)
    announce(url)


def _withdraw(options: ServerOptions) -> None:
    if options.ready_file is not None:
        options.ready_file.unlink(missing_ok=True)

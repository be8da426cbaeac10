"""Telling an engine that a version is staged, and learning whether it serves it.

An :class:`Engine` is called after the gate has been opened again, and no other version takes the place of the one that
it is told of until it answers; so an engine may load straight from the directory while it is being called, and at any
other time through the gate. Only an answer ends that, not the agent's own end nor its patience: an engine that does not
answer is told again, by the next agent too. So one that is told while it loads still must not answer before it is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import httpx

from rollout_agent.commandline import split_command, without_token
from rollout_agent.errors import EngineAbsent, EngineRefused, EngineSilent

_LOG = logging.getLogger(__name__)

_PLACEHOLDERS = ("version", "path", "step", "run")
"""Fields of :class:`Staged`."""
_TAIL_BYTES = 400
_FROM_PROXIES = frozenset({502, 504})
"""What a proxy says when the one behind it has not answered."""


@dataclass(frozen=True, slots=True)
class Staged:
    """A version that is verified on this host."""

    run: str
    version: int
    step: int
    path: Path
    inherit: tuple[int, ...] = ()
    """Open files to be inherited by a process that loads it, so that it is known to run when the agent has ended."""


class Engine(Protocol):
    """Whatever serves the weights."""

    async def load(self, staged: Staged) -> None:
        """Return once the engine serves ``staged``; raise ``EngineRefused`` if it does not.

        ``EngineSilent`` if it may be loading, and is told again; ``EngineAbsent`` if nobody can be.
        """


class CommandEngine:
    """Runs a command for each version; exit status 0 confirms, another one refuses. One that hangs is ended.

    ``{version}``, ``{path}``, ``{step}`` and ``{run}`` in it are filled in. The command is split as a shell would
    split it, but no shell runs it: ``EngineRefused`` for one that has a shell's operators in it, or another ``{name}``.
    """

    def __init__(self, command: str, *, timeout_s: float = 600) -> None:
        self._argv = split_command(command, _PLACEHOLDERS)
        self._timeout_s = timeout_s

    async def load(self, staged: Staged) -> None:
        """See :meth:`Engine.load`."""
        argv = [_fill(word, staged) for word in self._argv]
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                pass_fds=staged.inherit,
                env=without_token(os.environ),
            )
        except OSError as error:
            raise EngineRefused(f"{argv[0]} could not be started: {error.strerror}") from None
        try:
            async with asyncio.timeout(self._timeout_s):
                output = await _drain(process)
                status = await process.wait()
        except TimeoutError:
            raise EngineSilent(f"{argv[0]} did not answer: it did not end within {self._timeout_s:g} s") from None
        finally:
            await _end(process)
        tail = output.decode("utf-8", "replace").strip()
        if status != 0:
            said = f": {tail}" if tail else ""
            raise EngineRefused(f"{argv[0]} ended with status {status} for version {staged.version}{said}")
        if tail:
            _LOG.info("%s for version %d said at its end: %s", argv[0], staged.version, tail)


class NotifyEngine:
    """POSTs ``{run, version, path, step}`` to a URL for each version; any 2xx confirms, 502 and 504 are no answer."""

    def __init__(self, url: str, *, timeout_s: float = 600, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._url = url
        self._client = httpx.AsyncClient(timeout=timeout_s, transport=transport)

    async def load(self, staged: Staged) -> None:
        """See :meth:`Engine.load`."""
        body = {"run": staged.run, "version": staged.version, "path": str(staged.path), "step": staged.step}
        try:
            answer = await self._client.post(self._url, json=body)
        except (httpx.ConnectError, httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise EngineAbsent(f"{self._where} does not answer: {type(error).__name__}") from None
        except httpx.HTTPError as error:
            raise EngineSilent(f"{self._where} did not answer: {type(error).__name__}") from None
        if answer.status_code in _FROM_PROXIES:
            raise EngineSilent(f"{self._where} answered {answer.status_code}: no word of the engine behind it")
        if not answer.is_success:
            raise EngineRefused(f"{self._where} answered {answer.status_code} to version {staged.version}")

    @property
    def _where(self) -> str:
        # Never the query or the user part: they may carry a token.
        with contextlib.suppress(httpx.InvalidURL):
            url = httpx.URL(self._url)
            return f"{url.scheme}://{url.netloc.decode().rpartition('@')[2]}{url.path}"
        return "the address to notify"


class Engines:
    """Several engines told one after the other; all must confirm."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = tuple(engines)

    async def load(self, staged: Staged) -> None:
        """See :meth:`Engine.load`."""
        for engine in self._engines:
            await engine.load(staged)


def _fill(word: str, staged: Staged) -> str:
    # Not str.format: other braces (JSON) in the command stay as they are.
    for name in _PLACEHOLDERS:
        word = word.replace(f"{{{name}}}", str(getattr(staged, name)))
    return word


async def _drain(process: asyncio.subprocess.Process) -> bytes:
    """Read all output, keep its end."""
    tail = b""
    while process.stdout is not None and (data := await process.stdout.read(1 << 16)):
        tail = (tail + data)[-_TAIL_BYTES:]
    return tail


async def _end(process: asyncio.subprocess.Process) -> None:
    """Leave nothing of the command behind, whichever way it ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()

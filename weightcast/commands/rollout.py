"""``weightcast rollout``: keep a model directory on the policy of a run."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import re
import signal
import socket
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from pydantic import TypeAdapter, ValidationError

from coordinator.client import CoordinatorClient
from coordinator.wire import AgentId
from rollout_agent.agent import Agent, Ambient, Pace
from rollout_agent.engine import CommandEngine, Engine, Engines, NotifyEngine
from rollout_agent.errors import DiskFull
from rollout_agent.linux import give_back_large_blocks
from rollout_agent.replica import Replica
from rollout_agent.selection import compile_patterns
from weight_store.control import RegionName
from weight_store.errors import StoreUnavailable
from weight_store.keys import check_run
from weight_store.opening import check_reachable, open_store
from weight_store.retry import to_log
from weight_store.store import Store
from weightcast.commands._options import run_option, store_option
from weightcast.commands._seconds import Seconds

_LOG = logging.getLogger(__name__)
_METRICS_S = 1.0


@dataclass(frozen=True)
class _Options:
    run: str
    region: str
    model_dir: Path
    state_dir: Path | None
    store: str
    coordinator: str | None
    include: tuple[str, ...]
    on_version: str | None
    notify: str | None
    engine_timeout: float
    agent_id: str | None
    poll_s: float
    scrub_every: float
    metrics_file: Path | None
    once: bool
    verbose: bool


@click.command()
@run_option()
@click.option(
    "--region",
    required=True,
    envvar="WEIGHTCAST_REGION",
    show_envvar=True,
    help="Region of this machine, as in eu-west.",
)
@click.option("--model-dir", required=True, type=click.Path(file_okay=False, path_type=Path), help="Kept up to date.")
@click.option(
    "--state-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where logs and checkpoint lie: a disk, if the model directory is in memory. By default within that.",
)
@store_option("store")
@click.option(
    "--coordinator",
    envvar="WEIGHTCAST_COORDINATOR",
    show_envvar=True,
    help="Its address; without it the bucket is polled.",
)
@click.option("--include", multiple=True, help="Keep only tensors like this: a shell pattern, or re: and a regex.")
@click.option(
    "--on-version",
    help="Command for each new version; {version} {path} {step} {run}; exit 0: it serves; another status: it does not, "
    "and is told again. No shell runs it: for ; | > write sh -c '…'. What it leaves in its process group is ended.",
)
@click.option("--notify", help="URL that gets a POST for each new version; 2xx: it serves, as with --on-version.")
@click.option(
    "--engine-timeout",
    default=600.0,
    show_default=True,
    type=Seconds(min=0, min_open=True),
    help="How long --on-version and --notify may take; after that the command is ended, and the engine told again "
    "until it answers.",
)
@click.option("--agent-id", help="Name in the coordinator's lists; by default made of host and directory.")
@click.option(
    "--poll",
    "poll_s",
    default=1.0,
    show_default=True,
    type=Seconds(min=0.01),
    help="Seconds between two looks at the bucket where no coordinator tells of versions.",
)
@click.option(
    "--scrub-every",
    default=86_400.0,
    show_default=True,
    type=Seconds(min=0),
    help="Seconds in which all weights are hashed once, evenly spread, at 50 MB/s at most; 0: never.",
)
@click.option(
    "--metrics-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Keep counters of damage and repairs in this file, as Prometheus' node_exporter collects them.",
)
@click.option(
    "--once",
    is_flag=True,
    help="Catch up, hand over, and end; exit status 0 only if that was done. No coordinator hears of it.",
)
@click.option("--verbose", is_flag=True, help="Log, too, whatever is asked of the store again because it failed.")
def command(**options: Any) -> None:
    """Keep a model directory on the policy of a run.

    Engines load from the directory through `weightcast gate` (or rollout_agent.gate.shared). Stop with Ctrl-C or
    SIGTERM; whatever ends it, the next start goes on from there.
    """
    chosen = _Options(**options)
    give_back_large_blocks()
    logging.basicConfig(
        level=logging.DEBUG if chosen.verbose else logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    for chatty in ("botocore", "aiobotocore", "urllib3", "httpx", "httpcore"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(_until_signal(_run(chosen)))


async def _until_signal(work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    await task


async def _run(options: _Options) -> None:
    check_run(options.run)
    _check_names(options)
    compile_patterns(options.include)
    engine = _engine(options)
    async with AsyncExitStack() as opened:
        client = None
        if options.coordinator:
            client = await opened.enter_async_context(CoordinatorClient(options.coordinator))
        store = open_store(options.store, tell=to_log(_LOG))
        opened.push_async_callback(store.close)
        await _warn_or_refuse(check_reachable(store))
        replica = await opened.enter_async_context(await _replica(options, store))
        agent_id = options.agent_id or _default_id(options.model_dir)
        pace = Pace(poll_s=options.poll_s, scrub_s=options.scrub_every)
        agent = Agent(replica, options.run, options.region, agent_id, client, engine, pace)
        if options.metrics_file is not None:
            opened.push_async_callback(_end, asyncio.create_task(_keep_metrics(options.metrics_file, replica)))
        _LOG.info("%s follows run %r of %s (agent %s)", options.model_dir, options.run, options.store, agent_id)
        if options.once:
            before = replica.position
            await agent.step()
            await replica.checkpoint()
            if agent.status.error:
                raise click.ClickException(agent.status.error)
            if before is not None and replica.position == before:
                _LOG.info("nothing is newer than version %d, which is %s", before.version, agent.status.state)
        else:
            await agent.follow()


async def _replica(options: _Options, store: Store) -> Replica:
    """Take the directories; where there is no space for that it is waited for, as it is later on."""
    pace, ambient, failures = Pace(), Ambient(), 0
    while True:
        try:
            return await Replica.open(
                run=options.run,
                model_dir=options.model_dir,
                state_dir=options.state_dir,
                store=store,
                include=options.include,
            )
        except DiskFull as error:
            if options.once:
                raise
            failures += 1
            pause_s = pace.retry_s(failures, ambient.draw())
            _LOG.warning("%s; waiting for space, trying again in %.1f s", error, pause_s)
            await ambient.sleep(pause_s)


def _check_names(options: _Options) -> None:
    """Names that no coordinator would take end the command: the agent would be missing from all lists."""
    if not _fits(RegionName, options.region):
        raise click.BadParameter(
            f"{options.region!r} is not 1 to 63 lower-case letters, digits or '-', with a letter or digit at both ends",
            param_hint="--region",
        )
    if options.agent_id is not None and not _fits(AgentId, options.agent_id):
        raise click.BadParameter(
            f"{options.agent_id!r} is not 1 to 128 letters, digits, '.', '_', ':' or '-', a letter or digit first",
            param_hint="--agent-id",
        )


def _fits(kind: Any, name: str) -> bool:
    try:
        TypeAdapter(kind).validate_python(name)
    except ValidationError:
        return False
    return True


async def _keep_metrics(path: Path, replica: Replica) -> None:
    """Write the counters whenever one of them has changed."""
    metrics = _MetricsFile(path)
    try:
        while True:
            await asyncio.to_thread(metrics.write, replica.faults.text())
            await asyncio.sleep(_METRICS_S)
    finally:
        metrics.write(replica.faults.text())


class _MetricsFile:
    """The file that holds the counters; what could not be written is tried again, and said once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written = ""
        self._failing = False

    def write(self, text: str) -> None:
        if text == self._written:
            return
        # The collector must never read half a file.
        temporary = self._path.with_name(self._path.name + ".tmp")
        try:
            temporary.write_text(text)
            temporary.replace(self._path)
        except OSError as error:
            if not self._failing:
                _LOG.warning("cannot write %s: %s; trying again", self._path, error.strerror)
            self._failing = True
            return
        self._written, self._failing = text, False


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _warn_or_refuse(check: Coroutine[Any, Any, None]) -> None:
    """A wrong bucket or key ends the command; a store that is merely down is waited for."""
    try:
        await check
    except StoreUnavailable as error:
        _LOG.warning("%s; going on with what is here", error)


def _engine(options: _Options) -> Engine | None:
    engines: list[Engine] = []
    if options.on_version:
        engines.append(CommandEngine(options.on_version, timeout_s=options.engine_timeout))
    if options.notify:
        if not re.match(r"https?://[^/]", options.notify):
            raise click.BadParameter("is a URL such as http://127.0.0.1:8000/reload", param_hint="--notify")
        engines.append(NotifyEngine(options.notify, timeout_s=options.engine_timeout))
    return Engines(engines) if engines else None


def _default_id(model_dir: Path) -> str:
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname()).strip(".-")[:64] or "host"
    return f"{host}-{hashlib.sha256(str(model_dir.absolute()).encode()).hexdigest()[:8]}"

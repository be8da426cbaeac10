"""``weightcast trainer``: any trainer that writes checkpoints becomes a publisher, without a line of its code."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import signal
from pathlib import Path

import click

from trainer_agent.checkpoint import open_checkpoint
from trainer_agent.errors import InvalidPieces, PiecesChanged, PublicationFailed, Unreachable
from trainer_agent.publisher import Publisher
from trainer_agent.watching import Found, already_sealed, next_to_publish, scan
from weight_store.errors import ObjectNotFound
from weight_store.opening import open_store
from weight_store.position import GENESIS
from weight_store.reading import read_head, read_manifest
from weightcast.commands._seconds import Seconds
from weightcast.commands._trainer_options import dtype_of, publishing_options
from weightcast.commands.publish import sealed_line


@click.command()
@click.option(
    "--watch",
    "directory",
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Directory in which the trainer makes one sub-directory a checkpoint.",
)
@click.option(
    "--marker",
    help="File whose presence says that a checkpoint is complete (prime-rl: STABLE). Without it: a safetensors index, "
    "which must be what the trainer writes last.",
)
@publishing_options
@click.option("--poll", "poll_s", default=1.0, show_default=True, type=Seconds(min=0.05))
def command(
    directory: Path,
    marker: str | None,
    run: str,
    store: str,
    coordinator: str,
    dtype: str,
    full_every: int,
    poll_s: float,
) -> None:
    """Watch a directory and publish each checkpoint that appears in it, in order of its step.

    The step is the last number in a sub-directory's name. What the run's head already has is not published again.
    Stop with Ctrl-C or SIGTERM.
    """
    if marker is not None and marker != Path(marker).name:
        raise click.BadParameter("is the name of a file in the checkpoint's directory", param_hint="--marker")
    stopping = Stopping()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    done = already_sealed(scan(directory, marker), asyncio.run(_head_step(store, run)))
    click.echo(f"watching {directory}: {len(done)} checkpoints are published already")
    first = _wait_for_next(directory, marker, done, poll_s, stopping)
    if first is None:
        return
    with Publisher(
        run=run,
        store=store,
        coordinator=coordinator,
        rank=0,
        world_size=1,
        assets_dir=directory / first.name,
        # Raised, not logged: what is wrong is said once, here.
        strict=True,
        full_every=full_every,
    ) as publisher:
        found: Found | None = first
        while found is not None:
            if _publish(publisher, directory, found, dtype, stopping):
                done.add(found)
            else:
                stopping.wait(poll_s)
            found = _wait_for_next(directory, marker, done, poll_s, stopping)


class Stopping:
    """Whether a signal has said to stop.

    Not ``threading.Event``: its ``set`` takes a lock that the thread which the signal interrupts may hold in ``wait``,
    for ever. Putting into a ``SimpleQueue`` is reentrant.
    """

    def __init__(self) -> None:
        self._said: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_set = False

    def set(self) -> None:
        """Stop; may be called by a signal's handler."""
        self._is_set = True
        self._said.put(None)

    def is_set(self) -> bool:
        """Whether to stop."""
        return self._is_set

    def wait(self, seconds: float) -> None:
        """Return after ``seconds``, or once told to stop."""
        if not self._is_set:
            with contextlib.suppress(queue.Empty):
                self._said.get(timeout=seconds)


def _wait_for_next(
    directory: Path, marker: str | None, done: set[Found], poll_s: float, stopping: Stopping
) -> Found | None:
    """The next checkpoint, or None when told to stop."""
    while not stopping.is_set():
        found = next_to_publish(scan(directory, marker), done)
        if found is not None:
            return found
        stopping.wait(poll_s)
    return None


def _publish(publisher: Publisher, directory: Path, found: Found, dtype: str, stopping: Stopping) -> bool:
    """Publish one checkpoint and wait until it is decided. False if it is to be tried again."""
    try:
        handle = publisher.publish(open_checkpoint(directory / found.name), found.step, dtype=dtype_of(dtype))
        while not handle.done and not stopping.is_set():
            stopping.wait(0.05)
        if handle.error is not None:
            raise handle.error
    except (InvalidPieces, PiecesChanged) as error:
        click.echo(f"{found.name} is left out: {error}", err=True)
        return True
    except (PublicationFailed, Unreachable) as error:
        # Given up, or not begun: the next round tries again. Anything else would fail the same way for ever.
        click.echo(f"{found.name} is not published yet: {error}", err=True)
        return False
    click.echo(sealed_line(handle) if handle.done else f"{found.name} is not decided yet")
    return True


async def _head_step(store_url: str, run: str) -> int | None:
    """The step of the run's newest version, or None."""
    store = open_store(store_url)
    try:
        head, _ = await read_head(store, run)
        if head.position == GENESIS:
            return None
        return (await read_manifest(store, run, head.position)).step
    except ObjectNotFound:
        return None
    finally:
        await store.close()

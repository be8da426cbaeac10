"""``weightcast trainer``: any trainer that writes checkpoints becomes a publisher, without a line of its code."""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
import signal
import time
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path

import click

from trainer_agent.checkpoint import INDEX_FILE, open_checkpoint
from trainer_agent.errors import InvalidPieces, PiecesChanged, PublicationFailed, Unreachable
from trainer_agent.handle import Handle
from trainer_agent.notes import Newest, Notes, done_before, notes_path, read_notes, write_notes
from trainer_agent.publisher import Publisher
from trainer_agent.watching import Found, next_to_publish, scan
from weight_store.errors import ObjectNotFound
from weight_store.opening import open_store
from weight_store.position import GENESIS, Position
from weight_store.reading import read_head, read_manifest
from weight_store.store import Store
from weightcast.commands._seconds import Seconds
from weightcast.commands._trainer_options import dtype_of, publishing_options
from weightcast.commands.publish import sealed_line

_ATTACH_S = 1.0
"""Between two looks at whether to stop, while the run is not ours yet."""
_SILENT_LOOKS = 5
"""A start may take as long as that without a word."""
_SILENT_S = 10.0
"""And so may a publication."""


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
@click.option(
    "--poll", "poll_s", default=1.0, show_default=True, type=Seconds(min=0.05), help="Seconds between two looks."
)
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

    The step is the last number in a sub-directory's name. What was published is noted in a hidden file of DIRECTORY,
    so that a watcher which is started later publishes nothing twice; where it cannot write, it leaves out what has at
    most the step of the run's head. Stop with Ctrl-C or SIGTERM.
    """
    if marker is not None and marker != Path(marker).name:
        raise click.BadParameter("is the name of a file in the checkpoint's directory", param_hint="--marker")
    stopping = Stopping()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    watch = Watch(directory, marker, run, store, poll_s, stopping)
    watch.look_back()
    click.echo(
        f"watching {directory}: {len(watch.done)} checkpoints are published already; one is complete once it has "
        f"{marker or INDEX_FILE}"
    )
    first = watch.wait_for_next()
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
        if not _attach(publisher, first, stopping):
            return
        # What an earlier watcher left undecided is decided by now, and may have been sealed since this one looked.
        watch.look_back()
        while (found := watch.wait_for_next()) is not None:
            watch.begin(found)
            version = _publish(publisher, directory, found, dtype, stopping)
            if version is None:
                stopping.wait(poll_s)
            else:
                watch.finish(found, version)


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


@dataclass
class Watch:
    """A watched directory: what is in it, and what of it was published, by this watcher or by one before it."""

    directory: Path
    marker: str | None
    run: str
    store_url: str
    poll_s: float
    stopping: Stopping
    done: set[Found] = field(default_factory=set)
    _newest: Newest | None = None

    @property
    def _path(self) -> Path:
        return notes_path(self.directory, self.run)

    def look_back(self) -> None:
        """Find out what needs no publishing any more."""
        notes = read_notes(self._path)
        self._newest = asyncio.run(_look_at_newest(self.store_url, self.run, notes))
        self.done = done_before(scan(self.directory, self.marker), notes, self._newest)

    def wait_for_next(self) -> Found | None:
        """The next checkpoint, or None when told to stop."""
        while not self.stopping.is_set():
            found = next_to_publish(scan(self.directory, self.marker), self.done)
            if found is not None:
                return found
            self.stopping.wait(self.poll_s)
        return None

    def begin(self, found: Found) -> None:
        """``found`` may be published from now on."""
        self._write(found)

    def finish(self, found: Found, version: int) -> None:
        """``found`` was published as ``version``, or left out (0)."""
        self.done.add(found)
        if self._newest is not None:
            self._newest = replace(self._newest, version=max(version, self._newest.version))
        self._write(None)

    def _write(self, pending: Found | None) -> None:
        self.done &= set(scan(self.directory, self.marker))
        if self._newest is not None:
            done = tuple(astuple(item) for item in sorted(self.done))
            last = None if pending is None else astuple(pending)
            notes = Notes(run_id=self._newest.run_id, version=self._newest.version, done=done, pending=last)
            write_notes(self._path, notes)


def _attach(publisher: Publisher, first: Found, stopping: Stopping) -> bool:
    """Wait until the run is ours. False when told to stop."""
    said, looks = "", 0
    while not stopping.is_set():
        try:
            publisher.attach(_ATTACH_S)
        except Unreachable as error:
            looks += 1
            if looks >= _SILENT_LOOKS and str(error) != said:
                said = str(error)
                click.echo(f"{first.name} is not published yet: {error}", err=True)
        else:
            return True
    return False


def _publish(publisher: Publisher, directory: Path, found: Found, dtype: str, stopping: Stopping) -> int | None:
    """Publish one checkpoint and wait until it is decided: its version, 0 if it is left out, or None while neither."""
    try:
        handle = publisher.publish(open_checkpoint(directory / found.name), found.step, dtype=dtype_of(dtype))
        _wait(handle, found.name, stopping)
        if handle.error is not None:
            raise handle.error
    except (InvalidPieces, PiecesChanged) as error:
        click.echo(f"{found.name} is left out: {error}", err=True)
        return 0
    except (PublicationFailed, Unreachable) as error:
        # Given up, or not begun: the next round tries again. Anything else would fail the same way for ever.
        click.echo(f"{found.name} is not published yet: {error}", err=True)
        return None
    click.echo(sealed_line(handle) if handle.done else f"{found.name} is not decided yet")
    return handle.version if handle.done else None


def _wait(handle: Handle, name: str, stopping: Stopping, silent_s: float = _SILENT_S) -> None:
    """Wait for the decision, or to be told to stop; say for what, once that has taken ``silent_s``."""
    said_s = time.monotonic() + silent_s
    while not handle.done and not stopping.is_set():
        stopping.wait(0.05)
        if time.monotonic() >= said_s and not handle.done:
            why = f": {handle.trouble}" if handle.trouble else ""
            click.echo(f"{name} is not published yet: it is undecided after {silent_s:g} s{why}", err=True)
            said_s = math.inf


async def _look_at_newest(store_url: str, run: str, notes: Notes | None) -> Newest | None:
    """What the bucket says of the run's newest versions, or None if there is no such run."""
    store = open_store(store_url)
    try:
        try:
            head, _ = await read_head(store, run)
        except ObjectNotFound:
            return None
        known = notes.version if notes is not None and notes.run_id == head.run_id else None
        return Newest(head.run_id, head.position.version, tuple(await _steps(store, run, head.position, known)))
    finally:
        await store.close()


async def _steps(store: Store, run: str, position: Position, known: int | None) -> list[int]:
    """Those of the versions after ``known``, as far as retention left them; None: of the newest."""
    steps: list[int] = []
    while position != GENESIS and (position.version > known if known is not None else not steps):
        try:
            manifest = await read_manifest(store, run, position)
        except ObjectNotFound:
            if not steps:
                raise
            break
        steps.append(manifest.step)
        position = manifest.parent
    return steps

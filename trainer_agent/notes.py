"""What a watcher of checkpoints leaves for the one after it: which of them it has published, and which one it was at.

The head alone does not tell: after a trainer has resumed from an older checkpoint, directories with higher steps may
have been published before, and one with a lower step may be another one by now.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from trainer_agent.watching import Found, already_sealed
from weight_store.errors import FormatError
from weight_store.records import Count, Record, Uuid

_log = logging.getLogger(__name__)

MAX_BYTES = 16 << 20
"""Some hundred thousand checkpoints side by side."""


Item = tuple[Count, str, int]
"""A :class:`~trainer_agent.watching.Found`: step, name, stamp."""


class Notes(Record):
    """Of run ``run_id``, whose newest version was ``version``. ``done``: published, or left out for what it holds;
    ``pending``: may have become the version after.
    """

    FORMAT: ClassVar[str] = "weightcast.watcher-notes"

    run_id: Uuid
    version: Count
    done: tuple[Item, ...] = ()
    pending: Item | None = None


@dataclass(frozen=True, slots=True)
class Newest:
    """A run's newest version (0: none yet), and the steps of all after the one that notes tell of, the last one's
    first; without notes the newest one's step alone.
    """

    run_id: str
    version: int
    steps: tuple[int, ...]


def done_before(found: Iterable[Found], notes: Notes | None, newest: Newest | None) -> set[Found]:
    """What needs no publishing any more. Without notes of this run: what has at most the newest version's step."""
    if newest is None:
        return set()
    if notes is None or notes.run_id != newest.run_id:
        return already_sealed(found, newest.steps[0] if newest.steps else None)
    done, by_hand = {Found(*item) for item in notes.done}, list(newest.steps)
    pending = None if notes.pending is None else Found(*notes.pending)
    if pending is not None and pending.step in by_hand:
        by_hand.remove(pending.step)
        done.add(pending)
    return {item for item in found if item in done or item.step in by_hand}


def notes_path(directory: Path, run: str) -> Path:
    """Where they lie: beside what they tell of."""
    return directory / f".weightcast-{run}.json"


def read_notes(path: Path) -> Notes | None:
    """None, and a line in the log if they cannot be read, unless there are any."""
    try:
        with path.open("rb") as file:
            return Notes.parse(file.read(MAX_BYTES), key=str(path))
    except FileNotFoundError:
        return None
    except (OSError, FormatError) as error:
        _log.warning("what was published is taken from the head alone: %s", error)
        return None


def write_notes(path: Path, notes: Notes) -> None:
    """Replace them at once. Where that is not possible there are none, and a line in the log."""
    new = path.with_suffix(".tmp")
    try:
        with new.open("wb") as file:
            file.write(notes.to_bytes())
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError as error:
        _log.warning("a watcher started later will take what was published from the head alone: %s", error)

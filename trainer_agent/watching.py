"""Which checkpoint directory is published next. The decision is pure; ``scan`` only lists."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from trainer_agent.checkpoint import INDEX_FILE

_STEP = re.compile(r"(\d{1,18})(?!.*\d)")


@dataclass(frozen=True, slots=True, order=True)
class Found:
    """A settled sub-directory. Written again, it has another ``stamp`` and is another one."""

    step: int
    name: str
    stamp: int


def step_of(name: str) -> int | None:
    """The step in a directory's name: its last number (``step_100``, ``checkpoint-100``, ``global_step100/hf``)."""
    match = _STEP.search(name)
    return int(match.group(1)) if match else None


def scan(directory: Path, marker: str | None) -> list[Found]:
    """Sub-directories that are complete: those with the file ``marker``, or, without one, with a safetensors index,
    which writers of checkpoints write last. ``stamp`` is that file's modification time in nanoseconds.
    """
    found: list[Found] = []
    for path in directory.iterdir():
        step = step_of(path.name)
        if step is None:
            continue
        try:
            stamp = (path / (marker or INDEX_FILE)).stat().st_mtime_ns
        except (FileNotFoundError, NotADirectoryError):
            continue
        found.append(Found(step, path.name, stamp))
    return found


def already_sealed(found: Iterable[Found], head_step: int | None) -> set[Found]:
    """At the start: what an earlier watcher has published, as far as the head's step tells."""
    return set() if head_step is None else {item for item in found if item.step <= head_step}


def next_to_publish(found: Iterable[Found], done: Collection[Found]) -> Found | None:
    """The lowest step that was not published, or None. A directory written again counts as new: a resumed trainer."""
    return min((item for item in found if item not in done), default=None)

"""Putting complete files in place of others. Every call is restartable, and made under the exclusive gate."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import numpy as np

from rollout_agent import presence
from rollout_agent.disk import Disk, copy_file
from rollout_agent.filetable import FileTable, WeightFile
from rollout_agent.places import Places, is_weights_name


def all_there(disk: Disk, places: Places, table: FileTable) -> bool:
    """Whether each file of ``table`` is, complete, in ``new/`` or already in place."""
    waiting = set(disk.names(places.new))
    return all(
        disk.size((places.new if file.name in waiting else places.model) / file.name) == file.size
        for file in table.files
    )


def all_new(disk: Disk, places: Places, table: FileTable) -> bool:
    """Whether each file of ``table`` is, complete, in ``new/``."""
    return all(disk.size(places.new / file.name) == file.size for file in table.files)


def finish(
    disk: Disk, places: Places, table: FileTable, exclusive: Callable[[str], AbstractContextManager[None]]
) -> bool:
    """Move what is still in ``new/`` into place; False, and nothing is moved, unless every file is there.

    ``exclusive`` takes the gate. Files are known by their sizes here: they are to be hashed before they are shown.
    """
    if not all_there(disk, places, table):
        return False
    names = {file.name for file in table.files}
    if not names.isdisjoint(disk.names(places.new)) or _stale(disk, places, names):
        with exclusive("a version in new files"):
            move_in(disk, places, table, disk.names(places.new))
    # Also when there was nothing left to move: whoever moved it may have ended before this.
    sync_moved(disk, places)
    return True


def sync_moved(disk: Disk, places: Places) -> None:
    """Make it durable that files were moved."""
    disk.sync_dir(places.model)
    disk.sync_dir(places.new)


def move_in(disk: Disk, places: Places, table: FileTable, moved: Collection[str]) -> None:
    """Move those files of ``table`` that are in ``moved`` from ``new/`` into place, and remove those of earlier tables.

    ``DiskFailed`` if one of them is not there.
    """
    presence.hide(disk, places)
    names = {file.name for file in table.files}
    for name in sorted(names.intersection(moved)):
        disk.rename(places.new / name, places.model / name)
    for name in _stale(disk, places, names):
        disk.remove(places.model / name)


def copy_in(disk: Disk, places: Places, source: Path, table: FileTable, names: Collection[str]) -> None:
    """Copy those files of a checkpoint that are in ``names`` into place."""
    presence.hide(disk, places)
    for file in table.files:
        if file.name not in names:
            continue
        disk.allocate(places.new / file.name, file.size)
        for _ in copy_file(disk, source / file.name, places.new / file.name):
            pass  # nothing else can be done before the weights are there
        disk.rename(places.new / file.name, places.model / file.name)


def make_blank(disk: Disk, places: Places, table: FileTable, names: Collection[str]) -> None:
    """Put files of zeros, complete but for their weights, in place of those in ``names``: to be repaired by group."""
    presence.hide(disk, places)
    for file in table.files:
        if file.name in names:
            disk.allocate(places.new / file.name, file.size)
            write_head(disk, places.new / file.name, file)
            disk.rename(places.new / file.name, places.model / file.name)


def write_head(disk: Disk, path: Path, file: WeightFile) -> None:
    """Write the first bytes of a weight file, which say where its tensors lie."""
    mapped = disk.map(path, writable=True)
    try:
        mapped.change(partial(np.copyto, mapped.data[: len(file.head)], np.frombuffer(file.head, np.uint8)))
    finally:
        mapped.close()


def _stale(disk: Disk, places: Places, names: Iterable[str]) -> list[str]:
    return [name for name in disk.names(places.model) if is_weights_name(name) and name not in set(names)]

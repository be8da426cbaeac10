"""Which files a sync failed for, known also to the agent that comes after one that was killed there.

On Linux a failed sync leaves pages clean that never reached the disk: the next one reports success, and only a power
loss tells. So files whose sync did not succeed are written anew, never synced again. Since an agent may end between the
failure and that, a note stands beside the files from before they are synced until they are durable or replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollout_agent import presence
from rollout_agent.disk import Disk
from rollout_agent.state import Syncing, load, seal


@contextmanager
def noted(disk: Disk, note: Path) -> Iterator[None]:
    """Files are synced inside the block: ``note`` stays if that fails or the process ends in it."""
    # Not synced: in another boot whatever can be read is on the disk.
    presence.put(disk, note, seal(Syncing(boot_id=disk.boot_id())))
    try:
        yield
    except GeneratorExit:  # given up between two files, of which none failed
        disk.remove(note)
        raise
    disk.remove(note)


def is_in_doubt(disk: Disk, note: Path) -> bool:
    """Whether a sync of the files that ``note`` is about failed, or its process ended in it, in this boot."""
    if disk.size(note) is None:
        return False
    found = load(disk, note, Syncing)
    return found is None or found.boot_id == disk.boot_id()

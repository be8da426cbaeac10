"""Files of a version made beside the ones held: started from what is there, resumed after a crash."""

from __future__ import annotations

from rollout_agent import syncing
from rollout_agent.disk import Disk
from rollout_agent.filetable import FileTable
from rollout_agent.installing import write_head
from rollout_agent.places import Places
from rollout_agent.weights import Weights, misfits


def prepare(disk: Disk, places: Places, table: FileTable, present: Weights | None, *, resume: bool) -> Weights:
    """Make ``new/`` hold files of ``table`` and map them; their weights are anything, often nearly right.

    ``resume`` keeps files that an earlier attempt left, unless it may have failed to sync them; others are copied from
    ``present`` as far as it has the tensors. Raises ``DiskFull`` before any weight is fetched; ``new/`` is empty then.
    """
    names = {file.name for file in table.files}
    if syncing.is_in_doubt(disk, places.new_syncing):
        clear(disk, places)
    for name in disk.names(places.new):
        if name not in names:
            disk.remove(places.new / name)
    todo = set(misfits(disk, places.new, table)) if resume else names
    try:
        for file in table.files:
            if file.name not in todo:
                continue
            disk.allocate(places.new / file.name, file.size)
            write_head(disk, places.new / file.name, file)
    except BaseException:
        clear(disk, places)
        raise
    weights = Weights(disk, places.new, table)
    if present is not None:
        weights.copy_from(present, [tensor for file in table.files if file.name in todo for tensor in file.tensors])
    return weights


def clear(disk: Disk, places: Places) -> None:
    """Empty ``new/``."""
    for name in disk.names(places.new):
        disk.remove(places.new / name)

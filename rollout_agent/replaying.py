"""From a committed log to stores into weight files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rollout_agent.changelog import changes, scan
from rollout_agent.disk import Disk
from rollout_agent.errors import DiskFailed
from rollout_agent.statedir import StateDir
from rollout_agent.weights import Weights


@contextmanager
def stores_of(disk: Disk, records: StateDir, path: Path, weights: Weights) -> Iterator[list[Callable[[], None]]]:
    """For each group in a log a call that stores into ``weights`` what the log says of it; to be made inside the block.

    Any part of these stores, in any order, is made good by doing all of them again. Raises ``DiskFailed`` if the log is
    not the one that was committed.
    """
    mapped = disk.map(path, writable=False)
    try:
        log = scan(mapped.data)
        layout = records.layout(log.head.to.layout) if log else None
        if log is None or layout is None:
            raise DiskFailed(f"{path} is no longer the log that was committed: the disk lost or changed it")
        found = changes(mapped.data, log)
        yield [partial(weights.apply, layout.groups[index], change) for index, change in found]
    finally:
        mapped.close()

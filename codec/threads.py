"""Running independent parts on all cores: the heavy loops of the codec release the GIL."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

R = TypeVar("R")


def in_order(jobs: Sequence[Callable[[], R]], *, threads: bool) -> Iterator[R]:
    """The results of ``jobs`` in their order, each as soon as it and those before it are there.

    With ``threads`` later jobs go on meanwhile; without, each is done when its result is asked for. What a job raises
    is raised here; jobs that have not begun by then are left out.
    """
    if not threads or len(jobs) < 2:
        for job in jobs:
            yield job()
        return
    with ThreadPoolExecutor(min(len(jobs), cores()), thread_name_prefix="weightcast-codec") as pool:
        futures = [pool.submit(job) for job in jobs]
        try:
            for future in futures:
                yield future.result()
        finally:
            for future in futures:
                future.cancel()


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

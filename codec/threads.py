"""Running independent parts on all cores: the heavy loops of the codec release the GIL."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
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


def helped(
    items: Sequence[T], whole: Callable[[T], R], ahead: Callable[[T], R], rest: Callable[[T, R], None]
) -> list[R]:
    """The results for ``items``: this thread does ``whole`` of one after the other, and other cores help.

    They do ``ahead`` of later items, of which this thread then does only the ``rest``: what has to be done in order.
    What any of them raises is raised here; what has not begun by then is left out.
    """
    helpers = min(len(items), cores()) - 1
    if helpers < 1:
        return [whole(item) for item in items]
    with ThreadPoolExecutor(helpers, thread_name_prefix="weightcast-codec") as pool:
        futures = [pool.submit(ahead, item) for item in items[1:]]
        try:
            results = [whole(items[0])]
            for item, future in zip(items[1:], futures, strict=True):
                if future.cancel():  # nobody has begun
                    results.append(whole(item))
                    continue
                results.append(future.result())
                rest(item, results[-1])
            return results
        finally:
            for future in futures:
                future.cancel()


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

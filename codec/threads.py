"""Running independent parts on all cores: the heavy loops of the codec release the GIL."""

from __future__ import annotations

import os
import threading
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


def to_the_end(jobs: Sequence[Callable[[], None]]) -> None:
    """Do all jobs; of several none if interrupted before the first has begun, and else all.

    Several run in threads, which signals do not reach: an interrupt that comes later is raised once all are done, and
    so is what a job raises. Where no thread can be started they are done in this one.
    """
    if len(jobs) < 2:
        for job in jobs:
            job()
        return
    begin, left, raised = threading.Event(), list(reversed(jobs)), list[BaseException]()
    # Not Thread.join() and is_alive(): until Python 3.13 a join that is interrupted takes a running thread for ended.
    ends = [threading.Event() for _ in range(min(len(jobs), cores()))]

    def work(end: threading.Event) -> None:
        begin.wait()
        while True:
            try:
                job = left.pop()
            except IndexError:  # none is left
                break
            try:
                job()
            except Exception as error:  # noqa: BLE001 - raised once the others are done
                raised.append(error)
        end.set()

    try:
        ends = ends[: _start(work, ends)]
    except BaseException:
        left.clear()
        begin.set()
        raise
    while not begin.is_set() or not all(end.is_set() for end in ends):
        try:
            begin.set()
            for end in ends:
                end.wait()
        except BaseException as error:  # noqa: BLE001 - nothing is left half done behind the caller's back
            raised.insert(0, error)
    work(threading.Event())
    if raised:
        raise raised[0]


def _start(work: Callable[[threading.Event], None], ends: Sequence[threading.Event]) -> int:
    """How many threads could be started, each with its end."""
    for i, end in enumerate(ends):
        try:
            threading.Thread(target=work, args=(end,), name=f"weightcast-codec-store-{i}", daemon=True).start()
        except RuntimeError:  # the system allows no more
            return i
    return len(ends)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

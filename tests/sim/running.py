"""Many schedules, on every core, for a while."""

from __future__ import annotations

import gc
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing import get_context

from tests.sim.simulation import Failed, Result, simulate


@dataclass
class Share:
    """What one process did."""

    schedules: int = 0
    failed: int = 0
    cpu_s: float = 0.0
    totals: Counter[str] = field(default_factory=Counter)

    def add(self, other: Share) -> None:
        """Count another's."""
        self.schedules += other.schedules
        self.failed += other.failed
        self.cpu_s += other.cpu_s
        self.totals += other.totals

    def __str__(self) -> str:
        told = ", ".join(f"{count} {name}" for name, count in self.totals.items())
        rate = 60 * self.schedules / max(self.cpu_s, 1e-9)
        return f"{self.schedules} schedules, {rate:.0f} in a minute of one core: {told}; {self.failed} broke a promise"


BATCH = 100
"""Schedules of one process. What it leaves in cycles, 1.5 MB a schedule, goes with it: collecting that takes longer."""


def run_batch(first: int, step: int, until_s: float) -> Share:
    """Run the seeds ``first``, ``first + step``, ... until the monotonic clock says so; print every failure at once."""
    gc.disable()
    share, cpu_s = Share(), time.process_time()
    while share.schedules < BATCH and time.monotonic() < until_s:
        try:
            found = simulate(first + step * share.schedules)
        except Failed as failure:
            share.failed += 1
            print(failure, flush=True)
        else:
            share.totals.update({name: getattr(found, name) for name in Result.TOTALS})
        share.schedules += 1
    share.cpu_s = time.process_time() - cpu_s
    return share


def run_all(first: int, seconds: float, jobs: int) -> Share:
    """Run schedules in ``jobs`` processes at a time, for ``seconds``; no seed twice."""
    total = Share()
    # Forked from one process that has imported everything and runs nothing.
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(jobs, mp_context=context, max_tasks_per_child=1) as pool:
        pool.submit(int).result()  # importing takes a while
        until_s = time.monotonic() + seconds
        running = {pool.submit(run_batch, first + number, jobs, until_s): first + number for number in range(jobs)}
        while running:
            for batch in wait(running, return_when=FIRST_COMPLETED).done:
                following = running.pop(batch) + jobs * BATCH
                total.add(batch.result())
                if time.monotonic() < until_s:
                    running[pool.submit(run_batch, following, jobs, until_s)] = following
    return total

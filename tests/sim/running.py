"""Many schedules, on every core, for a while."""

from __future__ import annotations

import gc
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context

from tests.sim.simulation import Failed, Result, simulate


@dataclass
class Share:
    """What one core did."""

    schedules: int = 0
    failed: int = 0
    cpu_s: float = 0.0
    totals: Counter[str] = field(default_factory=Counter)

    def add(self, other: Share) -> None:
        """Count another core's."""
        self.schedules += other.schedules
        self.failed += other.failed
        self.cpu_s += other.cpu_s
        self.totals += other.totals

    def __str__(self) -> str:
        told = ", ".join(f"{count} {name}" for name, count in self.totals.items())
        rate = 60 * self.schedules / max(self.cpu_s, 1e-9)
        return f"{self.schedules} schedules, {rate:.0f} in a minute of one core: {told}; {self.failed} broke a promise"


def run_share(first: int, step: int, seconds: float) -> Share:
    """Run the seeds ``first``, ``first + step``, ... for ``seconds``; print every failure at once."""
    gc.collect()
    gc.freeze()  # what was imported is not looked at again after every schedule
    share, started_s, cpu_s = Share(), time.monotonic(), time.process_time()
    while time.monotonic() - started_s < seconds:
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
    """Run schedules in ``jobs`` processes; no seed twice."""
    total = Share()
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        shares = [pool.submit(run_share, first + number, jobs, seconds) for number in range(jobs)]
        for share in shares:
            total.add(share.result())
    return total

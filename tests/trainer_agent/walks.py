"""``python -m tests.trainer_agent.walks``: random walks of a training job's side, or one again by its seed."""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from tests.trainer_agent.walking import Broken, walk

_BATCH = 100
"""Walks of one process. What it leaves in cycles goes with it."""


def _batch(first: int, step: int, until_s: float) -> Counter[str]:
    found: Counter[str] = Counter()
    while found["walks"] < _BATCH and time.monotonic() < until_s:
        seed = first + step * found["walks"]
        found["walks"] += 1
        try:
            done = walk(seed)
        except Broken as broken:
            found["broken"] += 1
            print(broken, flush=True)
        else:
            model = done.world.model
            found.update(steps=done.steps, killed=done.crashes, sealed=len(model.sealed))
            found.update(aborted=sum(kind == "abort" for kind in model.decided.values()))
    return found


def walk_all(first: int, seconds: float, jobs: int) -> Counter[str]:
    """Walk the seeds from ``first`` on, in ``jobs`` processes at a time, for ``seconds``."""
    total: Counter[str] = Counter()
    until_s = time.monotonic() + seconds
    with ProcessPoolExecutor(jobs, mp_context=get_context("forkserver"), max_tasks_per_child=1) as pool:
        while time.monotonic() < until_s:
            batches = [pool.submit(_batch, first + number, jobs, until_s) for number in range(jobs)]
            for batch in batches:
                total += batch.result()
            first += jobs * _BATCH
    return total


def main() -> int:
    """Returns 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.trainer_agent.walks", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to go on (default 60)")
    parser.add_argument("--first", type=int, help="first seed (default: anywhere)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one for each core)")
    parser.add_argument("--seed", type=int, help="walk this one alone, and say each step")
    options = parser.parse_args()
    if options.seed is not None:
        try:
            walk(options.seed, lambda line: print(line, flush=True))
        except Broken as broken:
            print(broken)
            return 1
        return 0
    first = options.first if options.first is not None else random.randrange(1 << 40)
    print(f"seeds from {first} on, for {options.seconds:g} s, in {options.jobs} processes", flush=True)
    total = walk_all(first, options.seconds, options.jobs)
    print(", ".join(f"{count} {name}" for name, count in total.items()))
    return 1 if total["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())

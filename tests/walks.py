"""Random walks for a while, on every core, or one again by its seed: what the walks of each part share."""

from __future__ import annotations

import argparse
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

BATCH = 100
"""Walks of one process. What it leaves in cycles goes with it."""

Says = Callable[[str], None]
WalkOne = Callable[[int, Says], Counter[str]]
"""Walks from a seed, says each step, and counts what happened; raises :class:`Broken`. A function of a module."""


class Broken(AssertionError):
    """A walk that found a promise broken; its text says what led there and how to walk it again."""


def nothing_said(line: str) -> None:
    """For walks that nobody watches."""


def _batch(walk: WalkOne, first: int, step: int, until_s: float) -> Counter[str]:
    found: Counter[str] = Counter()
    while found["walks"] < BATCH and time.monotonic() < until_s:
        seed = first + step * found["walks"]
        found["walks"] += 1
        try:
            found += walk(seed, nothing_said)
        except Broken as broken:
            found["broken"] += 1
            print(broken, flush=True)
    return found


def walk_all(walk: WalkOne, first: int, seconds: float, jobs: int) -> Counter[str]:
    """Walk the seeds from ``first`` on, in ``jobs`` processes at a time, for ``seconds``."""
    total: Counter[str] = Counter()
    until_s = time.monotonic() + seconds
    with ProcessPoolExecutor(jobs, mp_context=get_context("forkserver"), max_tasks_per_child=1) as pool:
        while time.monotonic() < until_s:
            batches = [pool.submit(_batch, walk, first + number, jobs, until_s) for number in range(jobs)]
            for batch in batches:
                total += batch.result()
            first += jobs * BATCH
    return total


def options_of(prog: str, description: str | None, alone: str) -> argparse.Namespace:
    """What the command line says; ``alone``: what ``--seed`` does."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to go on (default 60)")
    parser.add_argument("--first", type=int, help="first seed (default: anywhere)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one for each core)")
    parser.add_argument("--seed", type=int, help=alone)
    options = parser.parse_args()
    if options.first is None:
        options.first = random.randrange(1 << 40)
    return options


def main(walk: WalkOne, prog: str, description: str | None) -> int:
    """Returns 1 if a promise was broken."""
    options = options_of(prog, description, "walk this one alone, and say each step")
    if options.seed is not None:
        try:
            walk(options.seed, lambda line: print(line, flush=True))
        except Broken as broken:
            print(broken)
            return 1
        return 0
    print(f"seeds from {options.first} on, for {options.seconds:g} s, in {options.jobs} processes", flush=True)
    total = walk_all(walk, options.first, options.seconds, options.jobs)
    print(", ".join(f"{count} {name}" for name, count in total.items()))
    return 1 if total["broken"] else 0

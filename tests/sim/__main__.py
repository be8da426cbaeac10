"""``python -m tests.sim``: run schedules for a while, or one again by its seed."""

from __future__ import annotations

import argparse
import os
import random
import sys

from tests.sim.running import run_all
from tests.sim.simulation import Failed, simulate


def main() -> int:
    """Returns 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to go on (default 60)")
    parser.add_argument("--first", type=int, help="first seed (default: anywhere)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one for each core)")
    parser.add_argument("--seed", type=int, help="run this schedule alone, and print what happened in it")
    options = parser.parse_args()
    if options.seed is not None:
        return _one(options.seed)
    first = options.first if options.first is not None else random.randrange(1 << 40)
    return _many(first, options.seconds, options.jobs)


def _one(seed: int) -> int:
    try:
        print(simulate(seed))
    except Failed as failure:
        print(failure)
        return 1
    return 0


def _many(first: int, seconds: float, jobs: int) -> int:
    print(f"seeds from {first} on, for {seconds:g} s, in {jobs} processes", flush=True)
    total = run_all(first, seconds, jobs)
    print(total)
    return 1 if total.failed else 0


if __name__ == "__main__":
    sys.exit(main())

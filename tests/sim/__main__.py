"""``python -m tests.sim``: run schedules for a while, or one again by its seed."""

from __future__ import annotations

import sys

from tests.sim.running import run_all
from tests.sim.simulation import Failed, simulate
from tests.walks import options_of


def main() -> int:
    """Returns 1 if a promise was broken."""
    options = options_of("python -m tests.sim", __doc__, "run this schedule alone, and print what happened in it")
    if options.seed is not None:
        return _one(options.seed)
    return _many(options.first, options.seconds, options.jobs)


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

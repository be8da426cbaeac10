"""``python -m tests.sim``: run schedules for a while, or one again by its seed."""

from __future__ import annotations

import argparse
import random
import sys
import time

from tests.sim.simulation import Failed, Result, simulate


def main() -> int:
    """Returns 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to go on (default 60)")
    parser.add_argument("--first", type=int, help="first seed (default: anywhere)")
    parser.add_argument("--seed", type=int, help="run this schedule alone, and print what happened in it")
    options = parser.parse_args()
    if options.seed is not None:
        return _one(options.seed)
    return _many(options.first if options.first is not None else random.randrange(1 << 40), options.seconds)


def _one(seed: int) -> int:
    try:
        print(simulate(seed))
    except Failed as failure:
        print(failure)
        return 1
    return 0


def _many(first: int, seconds: float) -> int:
    print(f"seeds from {first} on, for {seconds:g} s")
    start_s, results, failed = time.monotonic(), list[Result](), 0
    for seed in range(first, first + (1 << 40)):
        if time.monotonic() - start_s >= seconds:
            break
        try:
            results.append(simulate(seed))
        except Failed as failure:
            failed += 1
            print(failure, flush=True)
    spent_s = time.monotonic() - start_s
    totals = {name: sum(getattr(found, name) for found in results) for name in Result.TOTALS}
    told = ", ".join(f"{count} {name}" for name, count in totals.items())
    print(f"{len(results) + failed} schedules in {spent_s:.0f} s: {told}; {failed} broke a promise")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""``python -m tests.soak``: real processes under real faults for a while, or one seed again.

With ``--steady`` nobody is killed, and what grows without end is found. The same seed gives the same faults at about
the same times, not the same order of events.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from tests.soak.soaking import soak
from tests.soak.steady import steady
from tests.soak.without import NAMES, environment

_SOAK_S = 180.0
"""Of faults in one soak; then all come to rest and the next one begins."""


def main() -> int:
    """Returns 1 if something was found; logs and files of that soak are kept."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long to begin new ones (default 600)")
    parser.add_argument("--seed", type=int, help="this one alone")
    parser.add_argument("--steady", action="store_true", help="look for leaks: one long soak in which nobody is killed")
    parser.add_argument(
        "--without",
        choices=NAMES,
        default="",
        metavar="MECHANISM",
        help=f"switch it off, until that is found: one of {', '.join(NAMES)}",
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 31)
    until_s = time.monotonic() + options.seconds
    failed = False
    off = environment(options.without) if options.without else None
    chaos = partial(soak, environment=off, hasty=off is not None)
    while True:
        root = Path(tempfile.mkdtemp(prefix="weightcast-soak-"))
        length_s = options.seconds if options.steady else min(_SOAK_S, options.seconds)
        print(f"seed {seed}: {length_s:g} s of {'use' if options.steady else 'faults'}, in {root}", flush=True)
        work = steady if options.steady else chaos
        found = asyncio.run(work(seed, length_s, root, say=partial(print, flush=True)))
        failed = failed or bool(found)
        if not found:
            shutil.rmtree(root)
        seed += 1
        if options.seed is not None or time.monotonic() > until_s:
            return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

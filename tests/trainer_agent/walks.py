"""``python -m tests.trainer_agent.walks``: random walks of a training job's side, or one again by its seed."""

from __future__ import annotations

import sys
from collections import Counter

from tests.trainer_agent.walking import walk
from tests.walks import Says, main


def counted(seed: int, says: Says) -> Counter[str]:
    """One walk, and what happened in it."""
    done = walk(seed, says)
    model = done.world.model
    aborted = sum(kind == "abort" for kind in model.decided.values())
    return Counter(steps=done.steps, killed=done.crashes, sealed=len(model.sealed), aborted=aborted)


if __name__ == "__main__":
    sys.exit(main(counted, "python -m tests.trainer_agent.walks", __doc__))

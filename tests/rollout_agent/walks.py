"""``python -m tests.rollout_agent.walks``: random walks of one replica for a while, or one again by its seed."""

from __future__ import annotations

import asyncio
import logging
import random
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rollout_agent import gate
from tests.rollout_agent.crashing import in_one_thread
from tests.rollout_agent.inline import Inline
from tests.rollout_agent.walking import Walk
from tests.walks import Says, main, nothing_said


@contextmanager
def quietly(luck: random.Random) -> Iterator[None]:
    """Inside the block there are no threads, nothing is logged, and ``luck`` says what has its turn."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with pytest.MonkeyPatch.context() as patch:
            in_one_thread(patch, luck)
            patch.setattr(gate, "ThreadPoolExecutor", Inline)
            patch.setattr(gate, "_POLL_S", 0.0)
            patch.setattr(gate, "_PATIENCE_S", 0.0)
            yield
    finally:
        logging.disable(level)


def walk(seed: int, says: Says = nothing_said) -> Walk:
    """Walk once. Raises ``Broken`` where a promise is."""
    walking = Walk(seed, says)
    with quietly(random.Random(seed)):
        asyncio.run(walking.walk())
    return walking


def counted(seed: int, says: Says) -> Counter[str]:
    """One walk, and what happened in it."""
    done = walk(seed, says)
    return Counter(steps=done.steps, crashes=done.crashes)


if __name__ == "__main__":
    sys.exit(main(counted, "python -m tests.rollout_agent.walks", __doc__))

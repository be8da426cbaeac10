"""Random schedules of the whole system, faults and all, keep every promise; without a mechanism they do not.

A failure prints its seed, how to run it again, and the last lines of what happened. `make sim SECONDS=600` goes on for
longer.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.errors import Defect
from tests.sim.mutations import MUTATIONS, Mutation
from tests.sim.network import Faults
from tests.sim.simulation import Bias, Failed, simulate

SEEDS = 32
HUNT_SEEDS = 200


@pytest.mark.parametrize("seed", range(1, SEEDS + 1))
def test_a_schedule_keeps_every_promise(seed: int) -> None:
    found = simulate(seed)
    assert found.versions >= 1


@pytest.mark.parametrize("seed", range(8000, 8005))
def test_memory_that_rots_reaches_no_full(seed: int) -> None:
    """A bit flips between the seal of a version and the background upload of its full."""
    simulate(seed, Bias(Faults(), ("arena_rots", "late_joiner"), full_every=1))


@pytest.mark.parametrize("seed", range(8100, 8104))
def test_a_region_far_behind_skips_versions(seed: int) -> None:
    """What it would have read next may be collected by the time it comes back."""
    assert simulate(seed, Bias(kinds=("region_falls_behind",), full_every=2)).jump >= 8


def test_the_same_seed_is_the_same_run() -> None:
    """Also in another process, in which strings hash differently."""
    command = [sys.executable, "-c", "from tests.sim.simulation import simulate; print(simulate(2).digest)"]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(root)}
    other = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True)
    assert simulate(2).digest == other.stdout.strip()
    assert simulate(2).digest != simulate(3).digest


@pytest.mark.parametrize("name", MUTATIONS)
def test_without_a_mechanism_a_promise_breaks(name: str) -> None:
    assert hunt(MUTATIONS[name]), f"the simulation finds nothing although this is off: {name}"


def hunt(mutation: Mutation) -> bool:
    """Whether a schedule breaks the promise without the mechanism: counted in seeds, for slow machines are no worse."""
    with mutation.off():
        for seed in range(1000, 1000 + HUNT_SEEDS):
            try:
                simulate(seed, mutation.bias)
            except Failed as failure:
                if isinstance(failure.__cause__, Defect):
                    raise
                if re.search(mutation.finds, str(failure.__cause__)):
                    return True
    return False

"""Whatever happens to one replica, in whatever order: exactly one version or none, and the head once it is over.

Longer: ``make walks``.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable

import pytest

from tests.rollout_agent import switches
from tests.rollout_agent.walks import walk
from tests.walks import Broken

FIRST = 1000 * int(os.environ.get("WEIGHTCAST_SEED", "0"))
WALKS = 100


def test_walks() -> None:
    total: Counter[str] = Counter()
    for seed in range(FIRST, FIRST + WALKS):
        walked = walk(seed)
        total.update(steps=walked.steps, crashes=walked.crashes, harmed=bool(walked.may_harm), tmpfs=walked.tmpfs)
    assert total["steps"] > 10 * WALKS, total
    assert total["crashes"] > 2 * WALKS, total
    assert min(total["harmed"], total["tmpfs"], WALKS - total["harmed"], WALKS - total["tmpfs"]) > WALKS / 5, total


def test_the_same_seed_is_the_same_walk() -> None:
    for seed in (3, 4):
        assert walk(seed).notes == walk(seed).notes


@pytest.mark.parametrize(
    "switch_off",
    [
        switches.no_log_sync,
        switches.no_weight_sync,
        switches.no_hiding,
        switches.no_boot_id,
        switches.no_removed_assets,
        switches.no_gate,
        switches.no_look_at_patterns,
        switches.any_run,
        switches.whatever_is_new,
        switches.no_telling_check,
        switches.no_telling_recall,
    ],
)
def test_has_teeth(switch_off: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """With a mechanism switched off one of some walks, mostly of the first dozen, finds a violation."""
    switch_off(monkeypatch)
    with pytest.raises(Broken):
        _walk_all(150)


def _walk_all(count: int) -> None:
    for seed in range(count):
        walk(seed)

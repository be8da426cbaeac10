"""Killed parts change nothing but time: versions go on, and every region ends with the trainer's bytes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any


def test_killing_every_part_and_resuming_from_an_older_step_changes_nothing(start_demo: Callable[..., Any]) -> None:
    demo = start_demo("--steps", "6", "--regions", "2", "--warm-up", "3", "--chaos")
    assert demo.wait() == 0, demo.text()
    shown = demo.text()
    assert re.findall(r"chaos after version \d+: (.*)", shown) == [
        "the coordinator is killed and restarted",
        "a rollout agent is killed and restarted",
        "a trainer's sidecar is killed",
        "the trainer is killed and resumes from an older step",
    ]
    told = [(int(version), int(step)) for version, step in re.findall(r"version (\d+): step (\d+)", shown)]
    versions = [version for version, _ in told]
    assert versions == sorted(set(versions)), "versions only grow, and each is told once"
    steps = [step for _, step in told]
    assert steps[-1] == 6
    assert any(later < earlier for earlier, later in itertools.pairwise(steps)), "the step went back"
    assert all(share == "100" or float(share) < 10 for share in re.findall(r"\(([\d.]+)% of BF16\)", shown)[1:])
    assert len(re.findall(r"│ (?:eu-west|us-east) .* 0 │ .* equal ", shown)) == 2, shown
    assert demo.leftovers() == []

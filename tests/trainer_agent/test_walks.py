"""Random walks of a training job's side keep every promise; with a mechanism switched off they do not.

A failure prints its steps, its seed, and how to walk there again. ``python -m tests.trainer_agent.walks --seconds 600``
goes on for longer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from coordinator import decisions, fleet
from tests.sim.clocks import Clock
from tests.sim.mutations import MUTATIONS
from tests.trainer_agent.walking import Walk, walk
from tests.walks import Broken
from trainer_agent import encoding, publication
from trainer_agent.desk import Desk
from trainer_agent.slots import Slots

BATCHES, BATCH = 6, 10
HUNT = 120


@pytest.mark.parametrize("batch", range(BATCHES))
def test_walks_keep_every_promise(batch: int) -> None:
    for seed in range(1 + BATCH * batch, 1 + BATCH * (batch + 1)):
        assert walk(seed).world.model.sealed


def test_the_same_seed_is_the_same_walk() -> None:
    assert walk(7).world.digest == walk(7).world.digest != walk(8).world.digest


def any_copy(patch: pytest.MonkeyPatch) -> None:
    """The copy that waits is not compared with its digests."""
    jobs = Slots.jobs
    patch.setattr(Slots, "jobs", lambda self, slot, base, waiting=None: jobs(self, slot, base))


def damaged_bases(patch: pytest.MonkeyPatch) -> None:
    """The base is not compared with its digests."""
    encode = encoding.encode

    def trusting(job: encoding.Job) -> encoding.Encoded:
        known = b"" if job.base is None else encoding.codec.digest(job.base)
        return encode(replace(job, base_digest=known))

    patch.setattr(encoding, "encode", trusting)


def slots_that_are_read(patch: pytest.MonkeyPatch) -> None:
    """A copy does not wait for a full."""
    patch.setattr(Desk, "_free_slot", lambda self: 0 if self._base_slot is None else 1 - self._base_slot)


def untold_bases(patch: pytest.MonkeyPatch) -> None:
    """The trainer does not hear where the base is that was rebuilt."""

    def nothing(base_slot: int | None) -> Any:
        return publication.Opened(ordinal=-1, version=0)

    patch.setattr(publication, "BaseRebuilt", nothing)


def any_term(patch: pytest.MonkeyPatch) -> None:
    """Coordinators do what launches ask that lost the run."""
    for owner, name, value in MUTATIONS["term check"].patches:
        patch.setattr(owner, name, value)


def clocks_that_are_set(patch: pytest.MonkeyPatch) -> None:
    """What takes time is measured by clocks that tell the time of day."""
    patch.setattr(Clock, "count_s", Clock.time_s)


def fleets_half_heard(patch: pytest.MonkeyPatch) -> None:
    """A coordinator that has just started takes the agents that it has heard of for all."""
    patch.setattr(fleet, "KNOWN_AFTER_S", 0.0)


def dead_sidecars(patch: pytest.MonkeyPatch) -> None:
    """The trainer does not hear that its sidecar will not be started again."""
    patch.setattr(Desk, "_on_end", lambda self, error: None)


def any_run(patch: pytest.MonkeyPatch) -> None:
    """Coordinators do what launches ask that hold a term of another run."""
    check = decisions.check_term
    patch.setattr(decisions, "check_term", lambda head, term, run_id=None: check(head, term))


def answers_for_any_run(patch: pytest.MonkeyPatch) -> None:
    """A sidecar takes what is said of another run for its own."""
    patch.setattr(publication.Publication, "_checked", lambda self, event: event)


ZOMBIES = ("job_becomes_a_zombie", "two_jobs_start", "coordinator_sleeps", "publish_and_go_on")
TEETH: dict[Callable[[pytest.MonkeyPatch], None], tuple[str, ...]] = {
    any_copy: ("copy_rots", "publish_small"),
    damaged_bases: ("base_rots", "publish_small"),
    slots_that_are_read: ("publish_small", "publish_in_a_row", "publish_dense"),
    untold_bases: ("state_rots", "rank_is_denied", "publish_small"),
    any_term: ZOMBIES,
    clocks_that_are_set: ("clock_is_set",),
    fleets_half_heard: ("ask_who_serves", "publish_small"),
    dead_sidecars: ("sidecar_keeps_dying",),
    any_run: ("run_begins_again", "publish_and_go_on"),
    answers_for_any_run: ("run_begins_again", "publish_and_go_on"),
}


@pytest.mark.parametrize("switch", TEETH, ids=lambda switch: switch.__name__)
def test_without_a_mechanism_a_promise_breaks(switch: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        switch(patch)
        for seed in range(HUNT):
            try:
                walk(seed, play=partial(Walk.wander, names=TEETH[switch]))
            except Broken:
                return
    pytest.fail("the walks find nothing")

"""What ``--chaos`` does to a running demo, and when. Pure: the plan is a value, carrying it out is the director's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class Blow(Enum):
    """One thing that happens to a real system, always with SIGKILL."""

    COORDINATOR = "the coordinator is killed and restarted"
    AGENT = "a rollout agent is killed and restarted"
    SIDECAR = "a trainer's sidecar is killed"
    RESUME = "the trainer is killed and resumes from an older step"


@dataclass(frozen=True, slots=True)
class Plan:
    """The blows, each at the first sight of its version, and the step whose checkpoint the trainer resumes from."""

    blows: tuple[tuple[int, Blow], ...] = ()
    checkpoint_step: int | None = None

    def due(self, version: int, done: int) -> Iterator[Blow]:
        """Yield what is due once ``version`` is sealed, given that ``done`` blows have fallen."""
        for at, blow in self.blows[done:]:
            if version < at:
                return
            yield blow


def plan(steps: int) -> Plan:
    """Spread the blows over ``steps`` versions; the resume goes back by at least one step."""
    fifth = steps / 5
    at = [max(1, round(fifth * part)) for part in (1, 2, 3, 4)]
    order = (Blow.COORDINATOR, Blow.AGENT, Blow.SIDECAR, Blow.RESUME)
    return Plan(tuple(zip(at, order, strict=True)), checkpoint_step=max(1, at[3] - 2))

"""The two clocks of a machine: one that counts and one that tells the time. Neither goes as the simulation's does.

What production code measures durations by only ever counts up (``time.monotonic``): it drifts, leaps ahead, and stands
still while its machine is suspended. What it signs requests by tells the time (``time.time``): somebody may set that.
"""

from __future__ import annotations

import random

from tests.sim.loop import SimLoop
from weight_store.skew import correction_s

EPOCH_S = 1_700_000_000.0
REFUSED_S = 900.0
"""How far off a signature's time may be."""


class Clock:
    """One machine's. ``rate``: of its seconds in a true one."""

    def __init__(self, loop: SimLoop, rate: float = 1.0, wrong_s: float = 0.0) -> None:
        self._loop = loop
        self.rate = rate
        self.wrong_s = wrong_s
        self._ahead_s = 0.0
        self._asleep_s: float | None = None

    @classmethod
    def draw(cls, loop: SimLoop, chance: random.Random) -> Clock:
        """Mostly right."""
        if chance.random() < 0.9:
            return cls(loop)
        wrong_s = chance.choice((0.0, 30.0, 1200.0, 7200.0, 80_000.0)) * chance.choice((-1.0, 1.0))
        return cls(loop, chance.uniform(0.95, 1.05), wrong_s)

    def count_s(self) -> float:
        """Seconds from anywhere, only upwards."""
        now_s = self._loop.now_s if self._asleep_s is None else self._asleep_s
        return self.rate * now_s + self._ahead_s

    def leap(self, seconds: float) -> None:
        """Count on from later."""
        self._ahead_s += seconds

    def stop(self) -> None:
        """The machine is suspended."""
        if self._asleep_s is None:
            self._asleep_s = self._loop.now_s

    def go_on(self) -> None:
        """It wakes up, and never counts what it slept."""
        if self._asleep_s is not None:
            self._ahead_s -= self.rate * (self._loop.now_s - self._asleep_s)
            self._asleep_s = None

    def time_s(self) -> float:
        """Unix seconds, as far as this machine knows."""
        return EPOCH_S + self._loop.now_s + self.wrong_s


class Signer:
    """Signs one client's requests, as weight_store.s3_clock does."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._skew_s = 0.0

    @property
    def may_be_wrong(self) -> bool:
        """False where :meth:`is_refused` needs not be asked."""
        return self._clock.wrong_s != 0.0 or self._skew_s != 0.0

    def is_refused(self, server_s: float) -> bool:
        """Whether a server of that time (Unix seconds) refuses what is signed now; then it tells its time with it."""
        now_s = self._clock.time_s()
        if abs(now_s + self._skew_s - server_s) <= REFUSED_S:
            return False
        found_s = correction_s(server_s - now_s)
        self._skew_s = self._skew_s if found_s is None else found_s
        return True

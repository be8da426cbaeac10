"""Messages between processes and what becomes of them: delayed, lost on the way there or back, late, cut off."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from math import log
from typing import Any

from tests.sim.loop import Process

Reply = Callable[[Any], None]
Serve = Callable[[Reply], None]
"""Serves a request that arrived and replies, now or later: with a value, or with an exception to be raised there."""


class NoAnswer(Exception):
    """Nothing came back in time. Whether the request took effect, or still will, is unknown."""


@dataclass(frozen=True)
class Faults:
    """How likely each fault is, for each message or each operation of the store."""

    drop: float = 0.0
    lost_reply: float = 0.0
    late: float = 0.0
    slow: float = 0.0
    unavailable: float = 0.0
    throttled: float = 0.0
    conflict: float = 0.0
    wrong_bytes: float = 0.0
    stale_head: float = 0.0
    lost_part: float = 0.0

    @classmethod
    def draw(cls, chance: random.Random) -> Faults:
        """Some kinds of fault, each at some rate: schedules that have them all hide what few of them show."""
        rates = {field.name: chance.choice((0.0, 0.0, 0.01, 0.03, 0.1)) for field in fields(cls)}
        return replace(cls(), **rates)


class Network:
    """Between nodes named ``store``, ``coordinator-0``, ``trainer-...`` and ``agent-...``."""

    def __init__(self, chance: random.Random, note: Callable[[str], None]) -> None:
        self._chance = chance
        self._note = note
        self.faults = Faults()
        self._cut: set[frozenset[str]] = set()

    def cut(self, one: str, other: str) -> None:
        """Lose everything between two nodes, in both directions."""
        self._cut.add(frozenset((one, other)))

    def heal(self, one: str, other: str) -> None:
        """Undo :meth:`cut`."""
        self._cut.discard(frozenset((one, other)))

    def calm(self) -> None:
        """No faults and no cuts any more."""
        self.faults = Faults()
        self._cut.clear()

    def is_cut(self, one: str, other: str) -> bool:
        """True if messages between the two are lost now."""
        return frozenset((one, other)) in self._cut

    def happens(self, probability: float) -> bool:
        """Draw, but only if there is something to draw: a fault that is off leaves the other draws as they are."""
        return probability > 0 and self._chance.random() < probability

    def latency_s(self) -> float:
        """One way."""
        slow, draw = self.faults.slow, self._chance.random
        if slow > 0 and draw() < slow:
            return self._chance.uniform(0.5, 5.0)
        return 0.002 - log(1.0 - draw()) / 50.0

    async def exchange(self, process: Process, here: str, there: str, serve: Serve, timeout_s: float) -> Any:
        """Send a request and return the reply, or raise it if it is an exception; ``NoAnswer`` after ``timeout_s``."""
        if process.hindered:
            await process.turn()
        loop = process.loop
        answer: asyncio.Future[Any] = loop.create_future()

        def deliver(outcome: Any) -> None:
            if not answer.done():
                answer.set_result(outcome)

        def reply(outcome: Any) -> None:
            lost = self.faults.lost_reply
            if not (self._cut and self.is_cut(here, there)) and not (lost and self.happens(lost)):
                loop.call_later(self.latency_s(), deliver, outcome)

        def arrive() -> None:
            if not (self._cut and self.is_cut(here, there)):
                serve(reply)

        faults = self.faults
        refused = self.happens(0.5) if self._cut and self.is_cut(here, there) else False
        if not refused and not (faults.drop and self.happens(faults.drop)):
            delay_s = self.latency_s()
            if faults.late and self.happens(faults.late):
                delay_s += timeout_s * self._chance.uniform(0.9, 2.0)
            loop.call_later(delay_s, arrive)
        timer = loop.call_later(0.01 if refused else timeout_s, deliver, NoAnswer())
        try:
            outcome = await answer
        finally:
            timer.cancel()
        if process.hindered:
            await process.turn()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

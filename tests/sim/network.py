"""Messages between processes and what becomes of them: delayed, lost on the way there or back, late, cut off."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from tests.sim.loop import Process, SimLoop, Timer

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

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self._latencies = _latencies(chance.getrandbits(32))
        self.faults = Faults()
        self.cuts: set[frozenset[str]] = set()

    def cut(self, one: str, other: str) -> None:
        """Lose everything between two nodes, in both directions."""
        self.cuts.add(frozenset((one, other)))

    def heal(self, one: str, other: str) -> None:
        """Undo :meth:`cut`."""
        self.cuts.discard(frozenset((one, other)))

    def calm(self) -> None:
        """No faults and no cuts any more."""
        self.faults = Faults()
        self.cuts.clear()

    def happens(self, probability: float) -> bool:
        """Draw, but only if there is something to draw: a fault that is off leaves the other draws as they are."""
        return probability > 0 and self.chance.random() < probability

    def latency_s(self) -> float:
        """One way."""
        slow = self.faults.slow
        if slow > 0 and self.chance.random() < slow:
            return self.chance.uniform(0.5, 5.0)
        return next(self._latencies)

    async def exchange(self, process: Process, here: str, there: str, serve: Serve, timeout_s: float) -> Any:
        """Send a request and return the reply, or raise it if it is an exception; ``NoAnswer`` after ``timeout_s``."""
        if process.hindered:
            await process.turn()
        request = _Request(self, process.loop, frozenset((here, there)), serve, timeout_s)
        request.send()
        outcome = await request.answer
        if process.hindered:
            await process.turn()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


class _Request:
    """On its way there and back. There is a timer for its answer, or for the end of the time for that, never both."""

    __slots__ = ("_answering", "_deadline_s", "_loop", "_network", "_serve", "_way", "answer")

    def __init__(self, network: Network, loop: SimLoop, way: frozenset[str], serve: Serve, timeout_s: float) -> None:
        self._network = network
        self._loop = loop
        self._way = way
        self._serve = serve
        self._deadline_s = loop.now_s + timeout_s
        self._answering: Timer | None = None
        self.answer: asyncio.Future[Any] = loop.create_future()

    def send(self) -> None:
        network, loop = self._network, self._loop
        faults, now_s = network.faults, loop.now_s
        if self._way in network.cuts and network.happens(0.5):
            self._answers(now_s + 0.01, NoAnswer())  # refused
            return
        if faults.drop and network.happens(faults.drop):
            self._is_lost()
            return
        arrival_s = now_s + network.latency_s()
        if faults.late and network.happens(faults.late):
            arrival_s += (self._deadline_s - now_s) * network.chance.uniform(0.9, 2.0)
        if arrival_s > self._deadline_s:
            self._is_lost()
        loop.call_at(arrival_s, self._arrive)

    def _arrive(self) -> None:
        if self._way not in self._network.cuts:
            self._serve(self._reply)
        if self._answering is None:
            self._is_lost()

    def _reply(self, outcome: Any) -> None:
        """What the server says, now or later; the way back is as uncertain as that there."""
        network = self._network
        lost = network.faults.lost_reply
        if self.answer.done() or self._way in network.cuts or (lost and network.happens(lost)):
            return
        arrival_s = self._loop.now_s + network.latency_s()
        if arrival_s < self._deadline_s:
            self._answers(arrival_s, outcome)

    def _is_lost(self) -> None:
        """Unless something else is heard in time."""
        if not self.answer.done():
            self._answers(self._deadline_s, NoAnswer())

    def _answers(self, when_s: float, outcome: Any) -> None:
        if self._answering is not None:
            self._answering.cancel()
        self._answering = self._loop.call_at(when_s, _settle, self.answer, outcome)


def _settle(answer: asyncio.Future[Any], outcome: Any) -> None:
    if not answer.done():  # else whoever asked is gone
        answer.set_result(outcome)


def _latencies(seed: int) -> Iterator[float]:
    """Seconds. Drawn many at a time, by a generator of its own: there are two to each request."""
    numbers = np.random.default_rng(seed)
    while True:
        yield from (0.002 + numbers.exponential(0.02, 256)).tolist()

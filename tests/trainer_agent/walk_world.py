"""The world of the trainer's walks: the simulation's, with traps at each effect, and clocks that may be wrong."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from tests.sim.clocks import Clock
from tests.sim.coordinators import SimClient
from tests.sim.errors import Killed
from tests.sim.loop import _PROCESS, Process, SimLoop, is_over
from tests.sim.store import SimStore, retried
from tests.sim.trainers import SimArena
from tests.sim.world import World
from tests.trainer_agent.walk_model import FASTEST
from trainer_agent.errors import ArenaTooSmall
from trainer_agent.state import STATE_FILE
from weight_store.errors import StoreError, StoreRefused
from weight_store.keys import parse_key
from weight_store.retry import RetryingStore

if TYPE_CHECKING:
    pass

T = TypeVar("T")

SMALL, DENSE = 0.012, 0.9
DISTRUST = frozenset({"shard", "receipt", "manifest", "open", "head", "layout", "offer", "asset"})
"""All that a rank reads may reach it with wrong bytes."""


class WalkLoop(SimLoop):
    """What runs in a thread may take a while, and goes on though nobody waits for it any more."""

    slow: Callable[[], float] = staticmethod(lambda: 0.0)

    def run_in_executor(self, executor: Any, call: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        seconds = self.slow()
        if not seconds:
            return super().run_in_executor(executor, call, *args)
        future = self.create_future()
        self.call_later(seconds, self._run_late, _PROCESS.get(), future, call, *args)
        return future

    def _run_late(
        self, process: Process | None, future: asyncio.Future[Any], call: Callable[..., Any], *args: Any
    ) -> None:
        if process is not None and process.paused:
            self.call_later(0.1, self._run_late, process, future, call, *args)
        elif process is None or process.alive:
            ran = super().run_in_executor(None, call, *args)
            error = ran.exception()
            if future.done():
                return
            if error is None:
                future.set_result(ran.result())
            else:
                future.set_exception(error)


@dataclass
class Effects:
    """What one node does to the world, counted: at one of them a trap may spring, before it took effect or after."""

    spring: Callable[[], None]
    count: int = 0
    at: int | None = None
    after: bool = False
    again: Callable[[], int] | None = None
    """How many effects later it springs once more."""

    def set(self, at: int, *, after: bool, again: Callable[[], int] | None = None) -> None:
        """Spring at the ``at``-th effect from now on."""
        self.at, self.after, self.again = self.count + at, after, again

    def passes(self, effect: Callable[[], T]) -> T:
        """Let ``effect`` happen. Raises ``Killed`` if that is what the trap does."""
        self.count += 1
        if self.count != self.at:
            return effect()
        self.at = None if self.again is None else self.count + self.again()
        if self.after:
            effect()
        self.spring()
        raise Killed("in the trap")


class WalkStore(SimStore):
    """Requests that arrive may be the last of their sender; some are refused for good."""

    effects: Effects
    denied: Callable[[str], bool]
    misread: Callable[[], None]
    once: set[str]

    def _perhaps_wrong(self, key: str, data: bytes) -> bytes:
        found = super()._perhaps_wrong(key, data)
        if found is not data:
            self.misread()
        if self._distrust is DISTRUST and (kind := parse_key(key).kind) in self.once:
            self.once.discard(kind)
            return bytes([data[0] ^ 1]) + data[1:]
        return found

    def _outcome(self, what: str, key: str, effect: Callable[[], T]) -> T | StoreError:
        if what in ("put", "begin", "create") and self.denied(key):
            self.note(f"{what} {key} is denied")
            return StoreRefused(f"{key}: AccessDenied", key=key)
        outcome = super()._outcome
        return self.effects.passes(lambda: outcome(what, key, effect))


class WalkClient(SimClient):
    """Whoever asks a coordinator may end before or after it does."""

    effects: Effects

    async def _ask(self, what: str, call: Any, wait_s: float = 0) -> Any:
        self.effects.passes(lambda: None)
        found = await super()._ask(what, call, wait_s)
        self.effects.passes(lambda: None)
        return found


class WalkArena(SimArena):
    """Writes of small files are effects; there may be no room for them."""

    effects: Effects
    is_full = False

    def write(self, name: str, data: bytes) -> None:
        if name != STATE_FILE or is_over():
            super().write(name, data)
            return
        if self.is_full:
            raise ArenaTooSmall(f"no room for {name}")
        write = super().write
        self.effects.passes(lambda: write(name, data))


@dataclass
class WalkWorld(World):
    """See the module."""

    traps: dict[str, Effects] = field(default_factory=dict)
    ends_early: float = 0.0
    """How likely the sidecar of a new rank is killed."""
    misread: Counter[str] = field(default_factory=Counter)
    """How often a node has got wrong bytes."""
    misread_once: set[str] = field(default_factory=set)
    """Kinds of object of which one reading by a rank is wrong."""
    clocks_differ: bool = False
    store_ahead_s: float = 0.0
    """How far the store's clock goes before those of all machines, if these differ as well."""
    denied: set[str] = field(default_factory=set)
    """Nodes that may not write shards, for the store's policy."""

    def effects_of(self, node: str, spring: Callable[[], None]) -> Effects:
        """Those of a node."""
        return self.traps.setdefault(node, Effects(spring))

    def store(self, process: Process, node: str, *, distrust: Collection[str] = ()) -> RetryingStore:
        clock = self.clock(node)
        found = WalkStore(
            self.bucket,
            self.network,
            process,
            node,
            clock,
            self.chance,
            self.note,
            distrust=distrust if isinstance(distrust, frozenset) else frozenset(distrust),
        )
        found.effects = self.effects_of(node, lambda: None)
        found.misread = lambda: self.misread.update((node,))
        found.once = self.misread_once
        found.denied = lambda key: node in self.denied and parse_key(key).kind == "shard"
        return retried(found, clock, process, self.chance)

    def clock(self, node: str) -> Clock:
        if node not in self.clocks:
            self.clocks[node] = self._draw_clock() if self.clocks_differ else Clock(self.loop)
        return self.clocks[node]

    def _draw_clock(self) -> Clock:
        wrong_s = self.chance.choice((0.0, 30.0, 1200.0)) * self.chance.choice((-1.0, 1.0))
        return Clock(self.loop, self.chance.uniform(1 / FASTEST, FASTEST), wrong_s - self.store_ahead_s)

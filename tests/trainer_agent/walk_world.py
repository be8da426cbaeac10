"""The world of the trainer's walks: the simulation's, with launches that publish when told and traps at each effect."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from tests.sim.clocks import Clock
from tests.sim.coordinators import SimClient
from tests.sim.errors import Killed, Violation
from tests.sim.loop import _PROCESS, Process, SimLoop
from tests.sim.model import Model
from tests.sim.store import SimStore, retried
from tests.sim.trainers import Launch, SimArena, SimRank, _together
from tests.sim.world import World
from trainer_agent.desk import Desk
from trainer_agent.errors import ArenaTooSmall, InvalidPieces
from trainer_agent.handle import Handle
from trainer_agent.messages import Attach, Close, Event, Publish
from trainer_agent.patience import Patience
from trainer_agent.state import STATE_FILE
from trainer_agent.worker import Worker
from weight_store.errors import StoreError, StoreRefused
from weight_store.keys import parse_key
from weight_store.manifest import Manifest
from weight_store.retry import RetryingStore

if TYPE_CHECKING:
    from trainer_agent.arena import Arena

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
        if name != STATE_FILE:
            super().write(name, data)
            return
        if self.is_full:
            raise ArenaTooSmall(f"no room for {name}")
        write = super().write
        self.effects.passes(lambda: write(name, data))


class WalkModel(Model):
    """Also looks whether a version is as small as it should be."""

    may_be_full: Callable[[Manifest, Any], bool]

    def _check_content(self, manifest: Manifest, weights: Any) -> None:
        super()._check_content(manifest, weights)
        if self.may_be_full(manifest, weights):
            return
        parent = self._manifest(manifest.parent)
        for rank, ref in enumerate(manifest.receipts):
            receipt = self._receipt(manifest.version, rank, ref, extra_full=False)
            large = [entry for entry in receipt.full if receipt.sizes[entry] > 400]
            if large and parent.layout == manifest.layout:
                raise Violation(f"rank {rank} sent groups {large} of version {manifest.version} whole")


class WalkDesk(Desk):
    """Remembers the handles; looks whether a slot that is given out for a copy is still in use."""

    rank: WalkRank

    def new_handle(self, ordinal: int, step: int) -> Handle:
        handle = super().new_handle(ordinal, step)
        self.rank.handles.append(handle)
        return handle

    def wait_for_slot(self, max_wait_s: float) -> int:
        slot = super().wait_for_slot(max_wait_s)
        worker = self.rank.worker
        if worker is not None and self.rank.sidecar.alive:
            if worker.busy:
                self.rank.world.violation(f"{self.rank.node} copies while {worker.busy} is being published")
            if worker.full is not None and worker.full.slot == slot:
                self.rank.world.violation(f"{self.rank.node} copies into slot {slot}, while a full is read from it")
        return slot


class WalkWorker(Worker):
    """Knows what it is at."""

    busy: list[Publish]
    violation: Callable[[str], None]

    async def publish(self, request: Publish) -> None:
        self.busy.append(request)
        if len(self.busy) > 1:
            self.violation(f"two publications at once: {self.busy}")
        try:
            await super().publish(request)
        finally:
            self.busy.remove(request)


class WalkRank(SimRank):
    """One rank, whose sidecar may be ended at any effect."""

    def __init__(self, world: WalkWorld, launch: WalkLaunch, rank: int) -> None:
        super().__init__(world, launch, rank)
        self.handles: list[Handle] = []
        self.worker: WalkWorker | None = None
        self.effects = world.effects_of(self.node, self._sprung)
        self.arena = arena = WalkArena()
        arena.effects = self.effects
        self.desk = desk = WalkDesk(cast("Arena", arena), self.desk._attach, make_link=self._make_link)
        desk.rank = self
        if world.chance.random() < world.ends_early:
            self.effects.set(1 + int(world.chance.random() ** 2 * 40), after=world.chance.random() < 0.5)
        self.unsure = False
        """Whether bits have flipped since the launch began."""

    def _sprung(self) -> None:
        self.world.note(f"{self.node}'s sidecar is in the trap")
        self.sidecar.kill()

    def make_worker(self, request: Attach, emit: Callable[[Event], None]) -> Worker:
        world, process, effects = cast("WalkWorld", self.world), self.sidecar, self.effects
        client = WalkClient(world, process, self.node)
        client.effects = effects
        self.worker = worker = WalkWorker(
            request,
            cast("Arena", self.arena),
            world.store(process, self.node, distrust=DISTRUST),
            cast("Any", client),
            lambda event: effects.passes(lambda: emit(event)),
            patience=Patience(sleep=process.sleep, fraction=world.chance.random),
            clock=world.clock(self.node).count_s,
            nonce=world.nonce,
        )
        worker.busy, worker.violation = [], world.violation
        return worker


class WalkLaunch(Launch):
    """Publishes when it is told to."""

    def start(self) -> None:
        self.orders: asyncio.Queue[tuple[float, Sequence[str]]] = asyncio.Queue()
        self.ordered = 0
        self.skips: set[int] = set()
        """Ranks that cannot copy what they publish."""
        super().start()

    def publish(self, share: float, names: Sequence[str] = ()) -> None:
        """Change ``share`` of the weights (``names``: of these alone), and publish."""
        self.ordered += 1
        self.orders.put_nowait((share, names))

    @property
    def idle(self) -> bool:
        """Whether all that was ordered is decided."""
        if self.ended:
            return True
        done = all(handle.done for rank in self.walkers for handle in rank.handles)
        return done and self.published == self.ordered and all(len(r.handles) == self.ordered for r in self.walkers)

    @property
    def walkers(self) -> list[WalkRank]:
        """The ranks."""
        return cast("list[WalkRank]", self.ranks)

    async def _train(self) -> None:
        try:
            await super()._train()
        except Exception as error:
            self.world.defect(self.name, error)

    async def _run(self) -> None:
        world = cast("WalkWorld", self.world)
        self.ranks = [WalkRank(world, self, rank) for rank in range(self.world_size)]
        for rank in self.ranks:
            rank.desk.start()
        await _together(self._begin(rank) for rank in self.ranks)
        while True:
            share, names = await self.orders.get()
            await self.process.turn()
            self._change(share, names)
            ordinal, self.published = self.published, self.published + 1
            world.model.publishes(self.name, ordinal, dict(self.weights))
            await _together(self._publish(rank, ordinal) for rank in self.ranks)

    async def _publish(self, rank: SimRank, ordinal: int) -> None:
        if rank.rank not in self.skips:
            await super()._publish(rank, ordinal)
            return
        handle = rank.desk.new_handle(ordinal, self.first_step + ordinal)
        self.handles.append((ordinal, handle))
        rank.desk.fail(handle, InvalidPieces("its pieces changed"))

    async def close(self, grace_s: float) -> None:
        """As a Publisher does at the end of a program; sidecars that do not end in time are a violation."""
        self.ended = self.ended or "closed"
        self.process.kill()
        for rank in self.walkers:
            rank.desk._link.send(Close(grace_s=grace_s))
            rank.link.closed = True
        loop = self.world.loop
        until_s = loop.time() + grace_s + 60.0
        for rank in self.walkers:
            while any(not task.done() for task in rank.sidecar.tasks):
                if loop.time() > until_s:
                    self.world.violation(f"{rank.node}'s sidecar does not end: {rank.sidecar.tasks}")
                    break
                await asyncio.sleep(0.1)
            rank.die()

    def _change(self, share: float, names: Sequence[str]) -> None:
        numbers = self.world.numbers
        for name, bits in self.weights.items():
            if not names or name in names:
                flips = (numbers.random(bits.shape) < share).astype(bits.dtype)
                self.weights[name] = np.asarray(bits ^ flips)


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
        return self.clocks.setdefault(node, Clock(self.loop))

    def walk_launch(self, weights: Any, specs: Any, world_size: int, first_step: int, max_wait_s: float) -> WalkLaunch:
        """Start a training job."""
        found = WalkLaunch(
            world=self,
            name=f"launch-{len(self.launches)}",
            world_size=world_size,
            specs=specs,
            weights=dict(weights),
            first_step=first_step,
            max_wait_s=max_wait_s,
            assets=self.chance.choice((0, 0, 1)),
        )
        self.launches.append(found)
        found.start()
        return found

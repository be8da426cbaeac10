"""Training jobs of the walks: the simulation's, which publish when told, and whose sidecars may end at each effect."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from tests.sim.blocking import Condition
from tests.sim.trainers import Launch, SimLink, SimRank, _together
from tests.trainer_agent.walk_world import DISTRUST, WalkArena, WalkClient, WalkWorld
from trainer_agent.desk import Desk
from trainer_agent.errors import InvalidPieces, SidecarFailed
from trainer_agent.handle import Handle
from trainer_agent.link import Link, ended_too_often, restart_delay_s
from trainer_agent.messages import Attach, Close, Event, Publish
from trainer_agent.patience import Patience
from trainer_agent.worker import Worker

if TYPE_CHECKING:
    from trainer_agent.arena import Arena


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


class WalkLink(SimLink):
    """Gives the sidecar up as the real one does."""

    def __init__(self, rank: SimRank, *, on_end: Callable[[SidecarFailed], None], **callbacks: Any) -> None:
        super().__init__(rank, **callbacks)
        self._on_end = on_end
        self._failures = 0
        self.gave_up = False

    def note_progress(self) -> None:
        self._failures = 0

    def _lost(self) -> None:
        if self.closed or not self._rank.process.alive:
            return
        self._on_loss()
        self._failures += 1
        if restart_delay_s(self._failures) is None:
            self.gave_up = True
            self._on_end(ended_too_often(self._failures))
            return
        asyncio.get_running_loop().call_later(self._rank.world.chance.uniform(0.05, 3.0), self._again)


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
        desk._changed = cast("Any", Condition(world.loop))
        if world.chance.random() < world.ends_early:
            self.effects.set(1 + int(world.chance.random() ** 2 * 40), after=world.chance.random() < 0.5)
        self.unsure = False
        """Whether bits have flipped since the launch began."""

    def _make_link(self, socket_path: Path, **callbacks: Any) -> Link:
        self.link: WalkLink = WalkLink(self, **callbacks)
        return cast("Link", self.link)

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
        self.pauses = 0
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
    def is_of_the_past(self) -> bool:
        """Whether the run is gone that it took over."""
        head = self.world.model.head
        known = {rank.desk._attach.run_id for rank in self.ranks} - {None}
        return bool(known - {None if head is None else head.run_id})

    @property
    def has_begun(self) -> bool:
        """Whether its ranks have agreed on a layout."""
        return bool(self.ranks) and all(rank.desk._layout is not None for rank in self.ranks)

    @property
    def gave_up(self) -> bool:
        """Whether a rank has no sidecar any more."""
        return any(rank.link.gave_up for rank in self.walkers)

    def pause(self) -> None:
        self.pauses += 1
        super().pause()

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
            try:
                await super()._publish(rank, ordinal)
            except SidecarFailed as error:  # training goes on, as it does with a Publisher
                rank.desk.fail(cast("WalkRank", rank).handles[-1], error)
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

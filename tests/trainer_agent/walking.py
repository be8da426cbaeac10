"""A random walk of a training job's side: one launch after the other, against a coordinator or two and a bucket.

Each walk draws everything from its seed. After each step the promises are looked at; at the end the faults stop, the
run's owner publishes, and what is left in the bucket is looked at as well.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

from codec import choice
from tests.sim.collectors import MIN_AGE_S
from tests.sim.coordinators import SimCoordinator
from tests.sim.errors import Violation
from tests.sim.loop import Process, SimLoop
from tests.sim.network import Faults
from tests.sim.simulation import end
from tests.sim.world import SPECS
from tests.trainer_agent.walk_checks import check_bucket, check_handles, check_ranks, check_tidy, explains_full
from tests.trainer_agent.walk_fleet import WalkAgent, check_served
from tests.trainer_agent.walk_jobs import WalkLaunch, WalkRank
from tests.trainer_agent.walk_model import WalkModel
from tests.trainer_agent.walk_steps import OPERATIONS, PATIENCE_S
from tests.trainer_agent.walk_world import SMALL, WalkLoop, WalkWorld
from tests.walks import Broken
from trainer_agent import desk, handle
from weight_store.errors import WeightStoreError
from weight_store.gc import Collector, Wish

STEPS = 6
BOUND_S = 240.0
"""Once the faults have ended, everything is decided by then."""
RATES = (0.03, 0.1, 0.3)
KINDS = (
    *("drop", "lost_reply", "late", "slow", "unavailable", "throttled"),
    *("conflict", "wrong_bytes", "stale_head", "lost_part"),
)


class Walk:
    """One walk. ``says`` is told each step."""

    def __init__(self, seed: int, loop: SimLoop, says: Callable[[str], None] = lambda line: None) -> None:
        self.seed = seed
        self.says = says
        self.notes: list[str] = []
        self.world = world = WalkWorld(seed, loop)
        self.former: list[WalkModel] = []
        """Of runs of this name that were deleted."""
        self.forget_run()
        self.chance = world.chance
        self.first = dict(world._first)
        self.unsure_bases = False
        """Whether history may be gone or wrong for whoever rebuilds a base."""
        self.stale = False
        """Whether a term may have seemed to be still to come, as it never does with a store that is good enough."""
        self.steps = self.crashes = 0
        self.collections = 0
        self.agents: list[WalkAgent] = []
        self.eager = False
        """Whether agents go where the head is whenever they look."""
        self.told: Counter[tuple[str, str]] = Counter()
        """What trainers were told of publications that failed."""

    # ---- the walk

    async def walk(self, play: Callable[[Walk], Awaitable[None]]) -> None:
        """``play``, and what follows once the faults end. Raises ``Broken``."""
        try:
            self._begin()
            await play(self)
            await self.settle()
        except Exception as error:
            told = "\n".join(self.notes)
            raise Broken(
                f"{told}\n{traceback.format_exc()}seed {self.seed}: {type(error).__name__}: {error}\n"
                f"walk it again: python -m tests.trainer_agent.walks --seed {self.seed}"
            ) from error

    def _begin(self) -> None:
        world = self.world
        if self.chance.random() < 0.3:
            world.loop.slow = self._thread_s  # type: ignore[attr-defined]
        if self.chance.random() < 0.25:
            world.clocks_differ, world.store_ahead_s = True, self.chance.choice((0.0, -300.0, 300.0, -1200.0, 7200.0))
        world.ends_early = self.chance.choice((0.0, 0.0, 0.5))
        world.coordinators = [SimCoordinator(world, number) for number in range(self.chance.choice((1, 2)))]
        for number, coordinator in enumerate(world.coordinators):
            world.traps[coordinator.node].spring = lambda number=number: self.stop_coordinator(number)

    async def wander(self, names: Sequence[str] = ()) -> None:
        """Any steps, or (``names``) these."""
        self.start_launch()
        for _ in range(STEPS + self.chance.randrange(STEPS)):
            await self._step(names or tuple(OPERATIONS))

    def _thread_s(self) -> float:
        """How long a call in a thread takes."""
        return self.chance.choice((0.0, 0.0, 0.001, 0.1, 2.0))

    def note(self, line: str) -> None:
        """One more line of the walk."""
        self.notes.append(f"{self.world.loop.now_s:8.2f} {line}")
        self.says(self.notes[-1])
        self.world.note(line)

    async def _step(self, names: Sequence[str]) -> None:
        self.steps += 1
        name = self.chance.choices(names, [OPERATIONS[name][0] for name in names])[0]
        fault = self._draw_fault()
        head = self.world.model.head
        at = None if head is None else (head.launch, head.position.version)
        self.note(f"{self.steps}. {name} (head {at}){f': {fault}' if fault else ''}")
        await OPERATIONS[name][1](self)
        if self.chance.random() < 0.7:
            self.calm()
        self.look()

    def _draw_fault(self) -> str:
        chance, luck = self.chance, self.chance.random()
        if luck < 0.35 and self.ranks:
            rank = chance.choice(self.ranks)
            at, after = 1 + int(chance.random() ** 2 * 40), chance.random() < 0.5
            again = (lambda: 1 + int(chance.random() ** 2 * 40)) if chance.random() < 0.2 else None
            rank.effects.set(at, after=after, again=again)
            self.crashes += 1
            when = f"{'after' if after else 'before'} effect {at}{', and again' if again else ''}"
            return f"{rank.node}'s sidecar is killed {when}"
        if luck < 0.45:
            coordinator = chance.choice(self.world.coordinators)
            at, after = 1 + int(chance.random() ** 2 * 40), chance.random() < 0.5
            self.world.traps[coordinator.node].set(at, after=after)
            return f"{coordinator.node} is killed {'after' if after else 'before'} effect {at}"
        if luck < 0.65:
            kinds = chance.sample(KINDS, chance.choice((1, 1, 2, 3)))
            rates = {kind: chance.choice(RATES) for kind in kinds}
            self.world.network.faults = replace(Faults(), **rates)
            self.unsure_bases |= "wrong_bytes" in rates
            self.stale |= "stale_head" in rates
            return f"{rates}"
        if luck < 0.70 and self.ranks:
            rank = chance.choice(self.ranks)
            rank.arena.is_full = True  # type: ignore[attr-defined]
            return f"no room in the arena of {rank.node}"
        return ""

    def calm(self) -> None:
        """The faults of this step end; those who were killed may still be dead."""
        self.world.network.calm()
        self.world.denied.clear()
        for effects in self.world.traps.values():
            effects.at = None
        for launch in self.launches:
            launch.skips.clear()
        for rank in self.ranks:
            rank.arena.is_full = False  # type: ignore[attr-defined]

    def look(self) -> None:
        """What must hold at any time."""
        self.world.check()
        check_handles(self)
        check_ranks(self)

    # ---- what steps use

    @property
    def model(self) -> WalkModel:
        """Of the run that there is."""
        found = self.world.model
        assert isinstance(found, WalkModel)
        return found

    def forget_run(self) -> None:
        """What there was of it is deleted."""
        world = self.world
        if isinstance(world.model, WalkModel):
            self.former.append(world.model)
            self.unsure_bases = self.stale = True
        model = WalkModel(world.bucket, MIN_AGE_S - 1.0)
        model.may_be_full = lambda *found: explains_full(self, *found)
        model.published, model.leapt = world.model.published, getattr(world.model, "leapt", False)
        world.model = model

    def versions_of(self, launch: str, ordinal: int) -> list[int]:
        """As what a publication was sealed."""
        models = [*self.former, self.model]
        return [v for m in models for v, s in m.sealed.items() if (s.launch, s.ordinal) == (launch, ordinal)]

    @property
    def launch(self) -> WalkLaunch:
        """The newest."""
        found = self.world.launches[-1]
        assert isinstance(found, WalkLaunch)
        return found

    @property
    def launches(self) -> list[WalkLaunch]:
        """All that run, or sleep."""
        return [found for found in self.world.launches if isinstance(found, WalkLaunch) and found.running]

    @property
    def ranks(self) -> list[WalkRank]:
        """Those of all launches that run, or sleep."""
        return [rank for launch in self.launches for rank in launch.walkers]

    def start_launch(self, **given: Any) -> WalkLaunch:
        """From a checkpoint of an earlier publication."""
        chance, known = self.chance, list(self.world.model.published.values())
        drawn = {
            "weights": chance.choice(known[-4:]) if known else self.first,
            "specs": SPECS[0] if chance.random() < 0.7 else SPECS[1],
            "world_size": chance.choice((1, 2, 2)),
            "first_step": chance.choice((0, 0, 7)),
            "max_wait_s": chance.choice((3.0, 30.0, 100.0)),
        }
        drawn["assets"] = chance.choice((0, 0, 1))
        found = WalkLaunch(world=self.world, name=f"launch-{len(self.world.launches)}", **drawn | given)
        found.weights = dict(found.weights)
        self.world.launches.append(found)
        found.start()
        self.note(f"   {found.name} of {found.world_size}")
        return found

    def stop_coordinator(self, number: int) -> None:
        """It is started again later."""
        found = self.world.coordinators[number]
        if found.service is not None:
            found.stop()
            self.later(0.0, 6.0, lambda: found.start() if found.service is None else None)

    def later(self, low_s: float, high_s: float, call: Callable[[], object]) -> None:
        """``call`` somewhen between the two."""
        self.world.loop.call_later(self.chance.uniform(low_s, high_s), call)

    async def until(self, ready: Callable[[], bool], limit_s: float, every_s: float = 0.25) -> bool:
        """Wait until it is so; False if it is not in time."""
        loop = self.world.loop
        until_s = loop.time() + limit_s
        while not ready():
            if loop.time() >= until_s:
                return False
            await asyncio.sleep(every_s)
            self.world.check()
        return True

    async def rest(self) -> None:
        """Wait for what was ordered of the newest launch, not for ever."""
        launch = self.launch
        if not await self.until(lambda: launch.idle, PATIENCE_S):
            self.note("   goes on without an end")

    # ---- the end

    async def settle(self) -> None:
        """The faults end: all is decided, whoever has the run publishes, and nothing is left that nobody needs."""
        self.note("the faults end")
        self.calm()
        for launch in self.launches:
            launch.resume()
        for coordinator in self.world.coordinators:
            coordinator.process.resume()
            if coordinator.service is None:
                coordinator.start()
        for launch in self.launches:
            if launch.is_of_the_past and not launch.has_begun:
                launch.kill()  # of a run that was deleted while it started: some ranks have it, and others never will
        if not self.launches:
            self.start_launch()
        if not await self.until(lambda: all(launch.idle for launch in self.launches), BOUND_S):
            raise Violation(f"never decided: {[r.handles for r in self.ranks if not all(h.done for h in r.handles)]}")
        self.look()
        for launch in self.launches:
            if launch.gave_up:
                launch.kill()
        left = 2 + 10 * len(self.former)  # a receipt that a launch of a former run left behind costs a version
        for attempt in range(left):
            owner = await self._owner()
            owner.max_wait_s = BOUND_S  # a full may be in a pause between two tries
            await self._publish(owner)
            errors = [rank.handles[-1].error for rank in owner.walkers if rank.handles[-1].error is not None]
            if attempt and not errors:
                break
        else:
            raise Violation(f"{owner.name} cannot publish: {errors}")
        await check_served(self, owner)
        await self._ask_zombies(owner)
        check_bucket(self)
        await self._collect_all()

    async def _owner(self) -> WalkLaunch:
        def found() -> WalkLaunch | None:
            head = self.world.model.head
            mine = [launch for launch in self.launches if head is not None and launch.name == head.launch]
            return mine[0] if mine else None

        if not self.launches:
            self.start_launch()
        # Whoever starts takes the run over; one that lost the race for it ends.
        if not await self.until(lambda: found() is not None or not self.launches, BOUND_S):
            self.start_launch()
            if not await self.until(lambda: found() is not None, BOUND_S):
                raise Violation("nobody can take the run over")
        return found() or await self._owner()

    async def _ask_zombies(self, owner: WalkLaunch) -> None:
        for launch in self.launches:
            if launch is owner:
                continue
            await self._publish(launch)
            # A rank that never heard of the run has none.
            errors = [rank.handles[-1].error for rank in launch.walkers if rank.handles]
            codes = {"" if error is None else error.code for error in errors}
            # What began again counts its terms anew: a launch of the former run may be told of either.
            told = {"fenced", "publication-failed"} if launch.is_of_the_past else {"fenced"}
            if not launch.ended and not codes <= told:
                raise Violation(f"{launch.name} is told {codes}, and not that the run is another's")

    async def _publish(self, launch: WalkLaunch) -> None:
        self.note(f"{launch.name} publishes")
        launch.publish(SMALL)
        if not await self.until(lambda: launch.idle, BOUND_S):
            raise Violation(f"never decided: {[rank.handles for rank in launch.walkers]}")
        self.look()

    async def _collect_all(self) -> None:
        for _ in range(2):
            await asyncio.sleep(MIN_AGE_S + 2.0)
            await self.collect(1)
        self.look()
        check_tidy(self)

    async def collect(self, keep: int) -> None:
        """One garbage collection, by a machine of its own."""
        self.collections += 1
        process = Process("gc")
        store = self.world.store(process, "gc", distrust=frozenset({"control", "head", "open", "manifest", "receipt"}))
        collector = Collector(store, self.world.run, min_age_s=MIN_AGE_S, nonce=self.world.nonce, sleep=process.sleep)
        try:
            await collector.collect(Wish(keep_versions=keep), wait=False)
        except WeightStoreError as error:
            self.note(f"   gc ends: {error.code}")


# ---- running


@contextmanager
def quietly() -> Iterator[None]:
    """Inside the block nothing is logged, and tiny groups are coded as large ones are."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with mock.patch.object(choice, "_SMALL_BYTES", 0):
            yield
    finally:
        logging.disable(level)


def walk(
    seed: int,
    says: Callable[[str], None] = lambda line: None,
    play: Callable[[Walk], Awaitable[None]] = Walk.wander,
) -> Walk:
    """Walk once. Raises ``Broken`` where a promise is."""
    loop, enabled = WalkLoop(), gc.isenabled()
    time = SimpleNamespace(monotonic=loop.time)
    # What cycles keep alive would otherwise be closed at moments that differ between runs.
    gc.disable()
    asyncio.set_event_loop(loop)
    walking = Walk(seed, loop, says)
    try:
        with quietly(), mock.patch.object(desk, "time", time), mock.patch.object(handle, "time", time):
            loop.run_until_complete(walking.walk(play))
        return walking
    finally:
        end(walking.world, loop)
        if enabled:
            gc.enable()

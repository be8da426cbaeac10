"""Agents that tell a coordinator what they serve, and questions of trainers that are answered by it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from coordinator.errors import CoordinatorError
from coordinator.wire import AgentReport
from tests.sim.blocking import Blocking
from tests.sim.coordinators import SimClient
from tests.sim.errors import Violation
from tests.sim.loop import Process
from tests.trainer_agent.walk_model import FASTEST
from trainer_agent.errors import TrainerError
from weight_store.position import GENESIS, Position

if TYPE_CHECKING:
    from tests.trainer_agent.walk_jobs import WalkLaunch, WalkRank
    from tests.trainer_agent.walking import Walk
    from trainer_agent.handle import Handle

PLACES = (("eu", "a"), ("eu", "b"), ("us", "a"))
TTL_S, BEAT_S = 30.0, 10.0
ANSWER_S = 7.0
"""An answer was true so long ago, at most."""
ASKED_AGAIN = 8
"""Half of the questions reach the coordinator of which the agents know nothing, where there are two."""
LATE_S = 3.0
"""A question may take so much longer than it was given."""


class WalkAgent:
    """Serves whatever the head says, sooner or later, and says so to the first coordinator."""

    def __init__(self, walk: Walk, region: str, name: str) -> None:
        self._walk = walk
        self.region, self.name = region, name
        self.run_id = ""
        self.serving: Position | None = None
        self.beats: list[tuple[float, float]] = []
        """When reports of this run were sent that were answered, and when they were."""
        world = walk.world
        self.process = Process(f"{region}-{name}")
        one = SimpleNamespace(
            chance=world.chance, network=world.network, note=world.note, coordinators=world.coordinators[:1]
        )
        self._client = SimClient(cast("Any", one), self.process, self.process.name)
        self.process.spawn(self._live())

    async def _live(self) -> None:
        chance, loop = self._walk.chance, self._walk.world.loop
        while True:
            self._look(eager=self._walk.eager or chance.random() < 0.5)
            if self.run_id:
                sent_s = loop.time()
                state: Any = "serving" if self.serving else "starting"
                report = AgentReport(
                    run_id=self.run_id, state=state, staged=self.serving, serving=self.serving, ttl_s=TTL_S
                )
                try:
                    await self._client.heartbeat(self._walk.world.run, self.region, self.name, report)
                    self.beats = [*self.beats[-20:], (sent_s, loop.time())]
                except CoordinatorError:
                    pass
            await self.process.sleep(chance.choice((1.0, BEAT_S, BEAT_S)))

    def _look(self, *, eager: bool) -> None:
        head = self._walk.model.head
        if head is None:
            return
        if head.run_id != self.run_id:
            self.run_id, self.serving, self.beats = head.run_id, None, []
        if eager and head.position != GENESIS:
            self.serving = head.position

    def __repr__(self) -> str:
        return f"{self.process.name} ({self.serving}, heard {self.beats[-1:]})"

    def serves(self, version: int) -> bool:
        """Whether it has come to ``version``."""
        return self.serving is not None and self.serving.version >= version

    def is_alive(self, now_s: float) -> bool:
        """Whether a coordinator that heard of it must count it."""
        return any(sent_s > now_s - TTL_S / FASTEST and heard_s < now_s - ANSWER_S for sent_s, heard_s in self.beats)


@dataclass
class Question:
    """Whether a version is served, asked by one rank's trainer."""

    walk: Walk
    launch: WalkLaunch
    rank: WalkRank
    handle: Handle
    regions: tuple[str, ...]
    quorum: float
    timeout_s: float
    answer: bool | None = None
    done: bool = field(default=False, init=False)

    async def ask(self) -> None:
        """Ask, and look at the answer."""
        loop, launch, handle = self.walk.world.loop, self.launch, self.handle
        await launch.process.turn()  # it may sleep by now
        asked_s, pauses, gone = loop.time(), launch.pauses, launch.is_of_the_past
        call = lambda: handle.serving(self.regions, self.quorum, self.timeout_s)  # noqa: E731
        try:
            self.answer = await Blocking(launch.process, call).result()
        except TrainerError as error:
            if handle.error is None and self.rank.desk._failure is None:
                self.walk.world.violation(f"{self.rank.node} asked who serves {handle}, and is told {error}")
        finally:
            self.done = True
        took_s = loop.time() - asked_s
        if took_s > self.timeout_s + LATE_S and launch.pauses == pauses:
            self.walk.world.violation(f"{self.rank.node} waited {took_s:g} s to learn who serves {handle}")
        if self.answer and (gone or not launch.is_of_the_past):
            self._check(loop.time(), gone)

    def _check(self, now_s: float, gone: bool) -> None:
        if gone:
            raise Violation(f"{self.rank.node} is told that {self.handle} is served, of a run that is gone")
        if self.walk.model.leapt:
            return
        head = self.walk.model.head
        agents = [agent for agent in self.walk.agents if head is not None and agent.run_id == head.run_id]
        for region in self.regions or {agent.region for agent in agents if agent.is_alive(now_s)}:
            known = [agent for agent in agents if agent.region == region]
            serving = sum(agent.serves(self.handle.version or 0) for agent in known)
            alive = sum(agent.is_alive(now_s) for agent in known)
            if serving < max(1, math.ceil(round(self.quorum * alive, 9))):
                raise Violation(
                    f"{self.rank.node} is told that {region} serves {self.handle}: {serving} of {alive} agents do"
                )


async def ask_who_serves(walk: Walk) -> None:
    """Something published not long ago, or still undecided; the answer may come after the step."""
    if not walk.agents:
        walk.agents = [WalkAgent(walk, *place) for place in PLACES]
    asked = [(launch, rank, h) for launch in walk.launches for rank in launch.walkers for h in rank.handles[-3:]]
    if not asked:
        return
    chance = walk.chance
    regions = chance.choice(((), ("eu",), ("us",), ("eu", "us"), ("nowhere",)))
    question = Question(
        walk, *chance.choice(asked), regions, chance.choice((0.5, 1.0, 1.0)), chance.choice((0.0, 1.0, 20.0, 45.0))
    )
    walk.note(f"   {question.rank.node} asks for {question.timeout_s:g} s who of {regions} serves {question.handle}")
    question.launch.process.spawn(question.ask())
    if chance.random() < 0.3:
        walk.later(0.0, 3.0, lambda: walk.stop_coordinator(0))
    if chance.random() < 0.3:
        walk.later(0.0, 3.0, question.rank.sidecar.kill)
    if chance.random() < 0.5:
        await walk.until(lambda: question.done or bool(question.launch.ended), 60.0)


async def check_served(walk: Walk, launch: WalkLaunch) -> None:
    """Once the faults have ended, all who asked are told that the last version is served."""
    if not walk.agents:
        return
    walk.eager = True
    rank = walk.chance.choice(launch.walkers)
    for _ in range(ASKED_AGAIN):
        question = Question(walk, launch, rank, rank.handles[-1], (), 1.0, 2 * TTL_S)
        await question.ask()
        if question.answer:
            return
    raise Violation(f"{rank.node} is not told that {question.handle} is served: {walk.agents}")


STEPS = ((1.5, ask_who_serves),)

"""From a seed to a schedule, and from a schedule to a verdict."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

from rollout_agent import replica as replica_module
from tests.sim.agents import Inline, SimAgent
from tests.sim.coordinators import SimCoordinator
from tests.sim.errors import Violation
from tests.sim.loop import Process, SimLoop
from tests.sim.network import Faults
from tests.sim.trainers import Launch
from tests.sim.world import World

CHAOS_S = 240.0
CALM_S = 1500.0
"""Longer than everything that may have to run out first: expiry, long polls, budgets of retries, patience."""


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    seed: int
    digest: str
    steps: int
    versions: int
    aborted: int
    launches: int
    restarts: int
    deleted: int
    virtual_s: float


class Failed(AssertionError):
    """A violation with its seed and the last lines of the trace."""


def simulate(seed: int, prepare: Callable[[World], None] | None = None) -> Result:
    """Run one schedule. Raises :class:`Failed` if a promise was broken."""
    loop = SimLoop()
    enabled = gc.isenabled()
    # What cycles keep alive would otherwise be closed at moments that differ between runs.
    gc.disable()
    asyncio.set_event_loop(loop)
    world = World(seed, loop)
    if prepare is not None:
        prepare(world)
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with mock.patch.object(replica_module, "ThreadPoolExecutor", Inline):
            loop.run_until_complete(_run(world))
        return _result(world)
    except Exception as error:
        raise Failed(_story(world, error)) from error
    finally:
        _end(world, loop)
        logging.disable(disabled)
        if enabled:
            gc.enable()


def _end(world: World, loop: SimLoop) -> None:
    for task in asyncio.all_tasks(loop):
        task.cancel()
    for launch in world.launches:
        launch.ended = launch.ended or "over"
        for rank in launch.ranks:
            rank.link.closed = True
    for agent in world.agents:
        agent.disk.dead = True
    loop.run_until_complete(asyncio.sleep(0))
    asyncio.set_event_loop(None)
    loop.close()


def _result(world: World) -> Result:
    return Result(
        seed=world.seed,
        digest=world.digest,
        steps=world.steps,
        versions=len(world.model.sealed),
        aborted=sum(kind == "abort" for kind in world.model.decided.values()),
        launches=len(world.launches),
        restarts=sum(agent.restarts for agent in world.agents),
        deleted=len(world.model.gone),
        virtual_s=world.loop.time(),
    )


def _story(world: World, error: Exception) -> str:
    lines = "\n".join(world.trace)
    return (
        f"{lines}\n\nseed {world.seed} at {world.loop.time():.2f} s: {error}\n"
        f"Again: .venv/bin/python -m tests.sim --seed {world.seed}"
    )


async def _run(world: World) -> None:
    world.network.faults = Faults.draw(world.chance)
    world.coordinators = [SimCoordinator(world, number) for number in range(world.chance.choice((1, 2, 2)))]
    world.agents = [SimAgent(world, number, tmpfs=world.chance.random() < 0.5) for number in range(2)]
    collecting = Process("gc")
    collecting.spawn(world.collect_for_ever(collecting))
    world.launch()
    chaos = Chaos(world)
    until_s = CHAOS_S * world.chance.uniform(0.3, 1.0)
    while world.loop.time() < until_s:
        await asyncio.sleep(world.chance.expovariate(1 / 8.0))
        chaos.act()
        world.check()
    chaos.calm()
    await _settle(world)
    _final_checks(world)


async def _settle(world: World) -> None:
    """Nothing goes wrong any more: the run's owner can publish, and every agent comes to what it published."""
    deadline_s = world.loop.time() + CALM_S
    owner = _owner(world)
    owner.max_wait_s = 1e9
    wanted = owner.publications = owner.publications + 2
    while not _settled(world, owner, wanted):
        await asyncio.sleep(1.0)
        world.check()
        if not owner.running:
            owner = _owner(world)
            owner.max_wait_s = 1e9
            wanted = owner.publications
        if world.loop.time() > deadline_s:
            raise Violation(f"nothing goes wrong any more, but the run does not come to rest: {_state(world, owner)}")


def _owner(world: World) -> Launch:
    """The launch that has the run, or will; a new one if none of those that run does."""
    head = world.model.head
    running = [launch for launch in world.launches if launch.running]
    for launch in running:
        if head is not None and launch.name == head.launch:
            return launch
    return running[-1] if running else world.launch()


def _settled(world: World, owner: Launch, wanted: int) -> bool:
    head = world.model.head
    if head is None or head.launch != owner.name or not owner.ranks:
        return False
    last = [handle for ordinal, handle in owner.handles if ordinal == wanted - 1]
    if len(last) < owner.world_size or not all(handle.done for handle in last):
        return False
    return all(
        agent.replica is not None
        and agent.replica.position == head.position
        and agent.agent is not None
        and agent.served == head.position.version
        for agent in world.agents
    )


def _state(world: World, owner: Launch) -> str:
    agents = ", ".join(
        f"{agent.node} at {agent.replica.position if agent.replica else None}, "
        f"{agent.agent.status if agent.agent else 'down'}"
        for agent in world.agents
    )
    handles = [(ordinal, handle) for ordinal, handle in owner.handles if not handle.done]
    return f"head {world.model.head}; {owner.name} ({owner.ended}) waits for {handles}; {agents}"


def _final_checks(world: World) -> None:
    for agent in world.agents:
        agent.disk.look(whole=True)
    for launch in world.launches:
        for ordinal, handle in launch.handles:
            if handle.done:
                code = None if handle.error is None else handle.error.code
                world.model.check_outcome(launch.name, ordinal, handle.version, code)
    world.check()


class Chaos:
    """What befalls the world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._chance = world.chance
        kinds = (
            self._coordinator_restarts,
            self._coordinator_sleeps,
            self._sidecar_dies,
            self._sidecar_sleeps,
            self._job_restarts,
            self._job_becomes_a_zombie,
            self._agent_crashes,
            self._agent_crashes_in_the_middle,
            self._agent_sleeps,
            self._network_splits,
            self._store_is_away,
            self._arena_rots,
            self._late_joiner,
            self._disk_fails,
        )
        # Swarm testing: each schedule has some of the kinds only, so that each can go far.
        count = self._chance.randint(3, len(kinds))
        self._kinds = self._chance.sample(kinds, count)

    def act(self) -> None:
        """One of them, now."""
        self._chance.choice(self._kinds)()

    def calm(self) -> None:
        """End of all faults."""
        world = self._world
        world.note("calm")
        world.chaotic = False
        world.network.calm()
        for coordinator in world.coordinators:
            coordinator.process.resume()
            if coordinator.service is None:
                coordinator.start()
        for launch in world.launches:
            launch.resume()
        for agent in world.agents:
            agent.process.resume()
            agent.disk.crash_at = agent.disk.fail_sync_at = agent.disk.full_at = None

    def _later(self, low_s: float, high_s: float, call: Callable[[], None]) -> None:
        def guarded() -> None:
            if self._world.chaotic:
                call()

        self._world.loop.call_later(self._chance.uniform(low_s, high_s), guarded)

    def _coordinator_restarts(self) -> None:
        found = self._chance.choice(self._world.coordinators)
        if found.service is not None:
            found.stop()
            self._later(0.0, 30.0, lambda: found.start() if found.service is None else None)

    def _coordinator_sleeps(self) -> None:
        found = self._chance.choice(self._world.coordinators).process
        found.pause()
        self._world.note(f"{found} sleeps")
        self._later(0.5, 80.0, found.resume)

    def _ranks(self) -> list[tuple[Launch, int]]:
        return [(launch, r) for launch in self._world.launches if launch.running for r in range(len(launch.ranks))]

    def _sidecar_dies(self) -> None:
        if ranks := self._ranks():
            launch, number = self._chance.choice(ranks)
            rank = launch.ranks[number]
            self._world.note(f"{rank.sidecar} is killed")
            rank.sidecar.kill()

    def _sidecar_sleeps(self) -> None:
        if ranks := self._ranks():
            launch, number = self._chance.choice(ranks)
            process = launch.ranks[number].sidecar
            process.pause()
            self._world.note(f"{process} sleeps")
            self._later(0.5, 90.0, process.resume)

    def _job_restarts(self) -> None:
        if len(self._world.launches) < 5:
            self._world.launches[-1].kill()
            self._world.launch()

    def _job_becomes_a_zombie(self) -> None:
        old = self._world.launches[-1]
        if len(self._world.launches) < 5 and old.running:
            old.pause()
            self._world.note(f"{old.name} sleeps")
            self._later(0.5, 60.0, old.resume)
            self._world.launch()

    def _agent_crashes(self) -> None:
        agent = self._chance.choice(self._world.agents)
        if agent.agent is not None:
            agent.crash(power=self._chance.random() < 0.5)

    def _agent_crashes_in_the_middle(self) -> None:
        self._chance.choice(self._world.agents).crash_at_next(self._chance.randint(1, 80))

    def _agent_sleeps(self) -> None:
        found = self._chance.choice(self._world.agents).process
        found.pause()
        self._later(1.0, 200.0, found.resume)

    def _network_splits(self) -> None:
        world = self._world
        nodes = [agent.node for agent in world.agents]
        nodes += [launch.ranks[rank].node for launch, rank in self._ranks()]
        coordinators = [coordinator.node for coordinator in world.coordinators]
        one, other = self._chance.choice([*nodes, *coordinators]), self._chance.choice(["store", *coordinators])
        if one != other:
            world.network.cut(one, other)
            world.note(f"{one} and {other} are cut off from each other")
            self._later(1.0, 100.0, lambda: world.network.heal(one, other))

    def _store_is_away(self) -> None:
        world = self._world
        nodes = [agent.node for agent in world.agents]
        nodes += [launch.ranks[rank].node for launch, rank in self._ranks()]
        nodes += [coordinator.node for coordinator in world.coordinators]
        world.note("the store is away")
        for node in nodes:
            world.network.cut(node, "store")

        def back() -> None:
            for node in nodes:
                world.network.heal(node, "store")

        self._later(1.0, 60.0, back)

    def _arena_rots(self) -> None:
        """A bit flips in the base, which the trainer no longer writes; the other slot's content has no digest yet."""
        if ranks := self._ranks():
            launch, number = self._chance.choice(ranks)
            rank = launch.ranks[number]
            slot = rank.desk._base_slot
            if slot is not None and rank.arena.slots:
                memory = rank.arena.slots[slot]
                memory[self._chance.randrange(len(memory))] ^= 1 << self._chance.randrange(8)
                self._world.note(f"{rank.node}: a bit of slot {slot} flips")

    def _late_joiner(self) -> None:
        world = self._world
        if len(world.agents) < 4:
            world.agents.append(SimAgent(world, len(world.agents), tmpfs=self._chance.random() < 0.5))

    def _disk_fails(self) -> None:
        disk = self._chance.choice(self._world.agents).disk
        if self._chance.random() < 0.5:
            disk.full_at = disk.effects + self._chance.randint(1, 40)
        else:
            disk.fail_sync_at = disk.effects + self._chance.randint(1, 40)


__all__ = ["Failed", "Result", "simulate"]

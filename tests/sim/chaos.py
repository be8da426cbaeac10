"""What befalls the world: processes die, sleep and come back, networks split, stores go away, bits flip."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from tests.sim import faults_clocks, faults_collections, faults_hands, faults_slow
from tests.sim.agents import SimAgent
from tests.sim.network import Faults
from tests.sim.trainers import Launch
from tests.sim.world import World
from trainer_agent.state import STATE_FILE

MODULES = (faults_clocks, faults_collections, faults_hands, faults_slow)
RARELY = 0.03
"""How many schedules have a kind that makes them long."""


class Chaos:
    """What befalls the world."""

    def __init__(self, world: World, wanted: tuple[str, ...]) -> None:
        self.world = world
        self.chance = world.chance
        self.behind: asyncio.Future[None] | None = None
        own = (
            self._coordinator_restarts,
            self._coordinator_sleeps,
            self._sidecar_dies,
            self._sidecar_sleeps,
            self._job_restarts,
            self._job_becomes_a_zombie,
            self._two_jobs_start,
            self._agent_crashes,
            self._agent_crashes_in_the_middle,
            self._agent_sleeps,
            self._network_splits,
            self._store_is_away,
            self._arena_rots,
            self._state_rots,
            self._late_joiner,
            self._disk_fails,
        )
        every: dict[str, Callable[[], None]] = {kind.__name__[1:]: kind for kind in own}
        every |= {kind.__name__: partial(kind, self) for module in MODULES for kind in module.FAULTS}
        # Swarm testing: each schedule has some of the kinds only, so that each can go far.
        some = self.chance.sample(list(every), self.chance.randint(3, len(every)))
        rare = {kind.__name__: partial(kind, self) for module in MODULES for kind in module.RARE}
        some += [name for name in rare if self.chance.random() < RARELY]
        every |= rare
        self._kinds = [every[name] for name in wanted or some]

    def act(self) -> None:
        """One of them, now."""
        self.chance.choice(self._kinds)()

    async def wait(self) -> None:
        """For what takes long, in fair weather: most schedules that are long for no reason find nothing."""
        if self.behind is not None:
            self.world.network.faults = Faults()
            await self.behind

    def calm(self) -> None:
        """End of all faults."""
        world = self.world
        world.note("calm")
        world.chaotic = False
        world.network.calm()
        for coordinator in world.coordinators:
            coordinator.process.resume()
            if coordinator.service is None:
                coordinator.start()
        for clock in world.clocks.values():
            clock.go_on()
            if abs(clock.wrong_s) > faults_clocks.DAY_S:
                clock.wrong_s = 0.0  # nothing can be done about that but to set it
        for collector in world.collectors:
            collector.process.resume()
            if not collector.process.alive:
                collector.start()
        for launch in world.launches:
            launch.resume()
            # What is under way is carried through; who has nothing to do publishes once more.
            launch.publications = launch.published + all(handle.done for _, handle in launch.handles)
        for agent in world.agents:
            agent.process.resume()
            agent.disk.crash_at = agent.disk.fail_sync_at = agent.disk.full_at = None

    def later(self, low_s: float, high_s: float, call: Callable[[], None]) -> None:
        """``call`` somewhen between the two, unless the faults have ended by then."""

        def guarded() -> None:
            if self.world.chaotic:
                call()

        self.world.loop.call_later(self.chance.uniform(low_s, high_s), guarded)

    def _coordinator_restarts(self) -> None:
        found = self.chance.choice(self.world.coordinators)
        if found.service is not None:
            found.stop()
            self.later(0.0, 6.0, lambda: found.start() if found.service is None else None)

    def _coordinator_sleeps(self) -> None:
        found = self.chance.choice(self.world.coordinators).process
        found.pause()
        self.world.note(f"{found} sleeps")
        self.later(0.5, 16.0, found.resume)

    def ranks(self) -> list[tuple[Launch, int]]:
        return [(launch, r) for launch in self.world.launches if launch.running for r in range(len(launch.ranks))]

    def _sidecar_dies(self) -> None:
        if ranks := self.ranks():
            launch, number = self.chance.choice(ranks)
            rank = launch.ranks[number]
            self.world.note(f"{rank.sidecar} is killed")
            rank.sidecar.kill()

    def _sidecar_sleeps(self) -> None:
        if ranks := self.ranks():
            launch, number = self.chance.choice(ranks)
            process = launch.ranks[number].sidecar
            process.pause()
            self.world.note(f"{process} sleeps")
            self.later(0.5, 16.0, process.resume)

    def _job_restarts(self) -> None:
        if len(self.world.launches) < 5:
            self.world.launches[-1].kill()
            self.world.launch()

    def _job_becomes_a_zombie(self) -> None:
        old = self.world.launches[-1]
        if len(self.world.launches) < 5 and old.running:
            old.pause()
            self.world.note(f"{old.name} sleeps")
            self.later(0.5, 8.0, old.resume)
            self.world.launch()

    def _two_jobs_start(self) -> None:
        if len(self.world.launches) < 6:
            self.world.launch()
            self.world.launch()

    def _agent_crashes(self) -> None:
        agent = self.chance.choice(self.world.agents)
        if agent.agent is not None:
            agent.crash(power=self.chance.random() < 0.5)

    def _agent_crashes_in_the_middle(self) -> None:
        self.chance.choice(self.world.agents).crash_at_next(self.chance.randint(1, 80))

    def _agent_sleeps(self) -> None:
        found = self.chance.choice(self.world.agents).process
        found.pause()
        self.later(1.0, 20.0, found.resume)

    def _network_splits(self) -> None:
        world = self.world
        nodes = [agent.node for agent in world.agents]
        nodes += [launch.ranks[rank].node for launch, rank in self.ranks()]
        coordinators = [coordinator.node for coordinator in world.coordinators]
        one, other = self.chance.choice([*nodes, *coordinators]), self.chance.choice(["store", *coordinators])
        if one != other:
            world.network.cut(one, other)
            world.note(f"{one} and {other} are cut off from each other")
            self.later(1.0, 12.0, lambda: world.network.heal(one, other))

    def _store_is_away(self) -> None:
        world = self.world
        nodes = [agent.node for agent in world.agents]
        nodes += [launch.ranks[rank].node for launch, rank in self.ranks()]
        nodes += [coordinator.node for coordinator in world.coordinators]
        world.note("the store is away")
        for node in nodes:
            world.network.cut(node, "store")

        def back() -> None:
            for node in nodes:
                world.network.heal(node, "store")

        self.later(1.0, 8.0, back)

    def _arena_rots(self) -> None:
        """A bit flips in the base, or in the copy that waits, once it has its digests: before, nobody could tell."""
        if ranks := self.ranks():
            launch, number = self.chance.choice(ranks)
            rank = launch.ranks[number]
            waiting = rank.waiting
            slots = [slot for slot in (rank.desk._base_slot, waiting) if slot is not None]
            if slots and rank.arena.slots:
                slot = self.chance.choice(slots)
                memory = rank.arena.slots[slot]
                memory[self.chance.randrange(len(memory))] ^= 1 << self.chance.randrange(8)
                self.world.note(f"{rank.node}: a bit of slot {slot} flips")
                rank.rots = rank.rots or slot == waiting

    def _state_rots(self) -> None:
        """A sidecar dies, and a bit of what it left for the next one flips.

        Not where the copy changed as well: then nobody is left who knows what it was.
        """
        if ranks := [(launch, number) for launch, number in self.ranks() if not launch.ranks[number].rots]:
            launch, number = self.chance.choice(ranks)
            rank = launch.ranks[number]
            rank.sidecar.kill()
            state = rank.arena.files.get(STATE_FILE)
            if state:
                at = self.chance.randrange(len(state))
                flipped = bytes([state[at] ^ 1 << self.chance.randrange(8)])
                rank.arena.write(STATE_FILE, state[:at] + flipped + state[at + 1 :])
                self.world.note(f"{rank.node}: a bit of its state flips")

    def _late_joiner(self) -> None:
        world = self.world
        if len(world.agents) < 4:
            world.agents.append(SimAgent(world, len(world.agents), tmpfs=self.chance.random() < 0.5))

    def _disk_fails(self) -> None:
        disk = self.chance.choice(self.world.agents).disk
        disk.sound = False
        if self.chance.random() < 0.5:
            disk.full_at = disk.effects + self.chance.randint(1, 40)
        else:
            disk.fail_sync_at = disk.effects + self.chance.randint(1, 40)

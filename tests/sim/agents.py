"""Rollout agents on simulated disks."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

from rollout_agent.agent import Agent, Ambient, Pace
from rollout_agent.errors import DiskError, ForeignFiles, RolloutError
from rollout_agent.places import Places
from rollout_agent.replica import Replica
from rollout_agent.state import State, load
from tests.rollout_agent.simdisk import Crash
from tests.rollout_agent.simvolume import Volume
from tests.sim.disks import MODEL, STATE, ObservedDisk
from tests.sim.engines import SimEngine
from tests.sim.errors import Killed, Violation
from tests.sim.loop import Process

if TYPE_CHECKING:
    from tests.sim.world import World

WATCH_S, OFTEN_S = 5.0, 0.3
"""Between two looks of an agent at its files. What they find is hidden and repaired just as well a little later, but an
agent that looks often repairs more of it beside following."""
DISTRUST = frozenset({"head", "manifest", "receipt", "layout", "shard"})


class SimAgent:
    """One agent with its machine. ``tmpfs``: the model directory does not survive a power loss."""

    def __init__(self, world: World, number: int, *, tmpfs: bool) -> None:
        self._world = world
        self.node = f"agent-{number}"
        self._tmpfs = tmpfs
        self._places = Places.of(MODEL, STATE if tmpfs else None)
        self._wanted = frozenset(("layers.0.b",)) if world.chance.random() < 0.15 else frozenset[str]()
        """The tensors that it is told to keep, if not all."""
        self.least = 0
        self.served = 0
        self.restarts = 0
        self._whole = False
        """Whether what was shown must be there again when the process comes back, without asking the store."""
        self._shown = False
        self._bare = False
        """Whether it may have lost what it needs to come back at the version it was."""
        self.disk = ObservedDisk(
            Volume(), check=self._seen, chance=world.chance, volatile=(MODEL,) if tmpfs else ()
        )  # fmt: skip
        self.agent: Agent | None = None
        self.replica: Replica | None = None
        self.engine = SimEngine(self)
        self.process = Process(self.node)
        self.start()

    @property
    def world(self) -> World:
        """Where it lives."""
        return self._world

    def loaded(self, version: int, tensors: dict[str, bytes]) -> None:
        """What an engine has read that was told."""
        self._world.model.check_visible(self.node, version, tensors, 0, self._wanted)

    def _seen(self, version: int, tensors: dict[str, bytes], beside: dict[str, bytes]) -> None:
        self._world.model.check_visible(self.node, version, tensors, self.least, self._wanted)
        self._world.model.check_beside(self.node, version, tensors, beside)
        self.least, self._bare = version, False
        if self.replica is not None and not self._shown:
            # What was found while its records were damaged lasts once it is saved.
            self._shown = not self.replica._holding.unsaved

    @property
    def shows(self) -> bool:
        """Whether it runs and shows a version."""
        return self.agent is not None and not self.disk.dead and self.replica is not None and bool(self.least)

    def handled(self, *, records: bool = False, silently: bool = False) -> None:
        """Somebody has his hands in its files; ``records``: in what it needs to know where it was, too."""
        self.disk.handled(self._world.loop.time(), silently=silently)
        self.engine.disturbed()
        self._whole = self._shown = False
        self._bare = self._bare or records

    def start(self) -> None:
        """Start the process."""
        self.process = Process(self.node)
        self.process.spawn(self._live())

    def crash(self, *, power: bool) -> None:
        """End the process (and its machine) between two effects; it comes back after a while."""
        self.disk.dead = True
        self.process.kill()
        self._come_back(power=power)

    def crash_at_next(self, effects: int) -> None:
        """End it in the middle of one of its next effects on the disk."""
        self.disk.crash_at = self.disk.effects + effects

    def _come_back(self, *, power: bool) -> None:
        world = self._world
        if world.over:
            return
        world.note(f"{self.node} {'loses power' if power else 'is killed'} after effect {self.disk.effects}")
        self.restarts += 1
        self.agent = self.replica = None
        self._shown = self._shown and not (power and self._tmpfs)
        self._whole = self._shown and self.disk.sound
        if self._bare:
            self._forget()
        if power:
            self.engine.power_loss()
            self.engine = SimEngine(self)
        self.disk = self.disk.power_loss() if power else self.disk.kill()
        if power and self._tmpfs and self.disk.size(self._places.pending) is not None:
            # New files went with the memory before their copy was made: back to the checkpoint, and on from there.
            checkpoint = load(self.disk, self._places.checkpoint, State)
            back = checkpoint.version.position.version if checkpoint is not None else 0
            self.least, self.served = min(self.least, back), min(self.served, back)
        self.disk.look(whole=True)
        if world.chaotic and world.chance.random() < 0.15:
            self._rot()
        world.loop.call_later(world.chance.uniform(0.1, 4.0), self.start)

    def _rot(self) -> None:
        """While nobody watches, a bit flips in any file. Engines look again once the agent has looked."""
        chance, names = self._world.chance, self.disk.volume.names
        files = sorted(path for path, inode in names.items() if inode.data)
        if not files:
            return
        path = chance.choice(files)
        data = names[path].data
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        self.disk.blind, self.disk._load, self._whole, self._shown = True, None, False, False
        if path.removeprefix(f"{MODEL}/") not in self.disk.weight_files():
            # Without a log or a record it may come back at an older version, and goes on from there.
            self._bare = True
            self._forget()
        self.engine.disturbed(heard=False)
        self._world.note(f"{self.node}: a bit of {path} flips")

    def _forget(self) -> None:
        """It may come back at any version, and goes on from there."""
        self.least = self.served = 0
        self.engine.disturbed(heard=False)

    async def _live(self) -> None:
        world, process = self._world, self.process
        disk = self.disk
        try:
            await self._follow(process, disk)
        except Crash:
            if not process.alive:
                return  # it was ended from outside, and will come back already
            process.kill()
            self._come_back(power=world.chance.random() < 0.5)
        except (Killed, asyncio.CancelledError):
            raise
        except DiskError as error:
            world.note(f"{self.node} ends: {error.code}")
            process.kill()
            self._come_back(power=False)
        except ForeignFiles as error:
            if not self._bare:
                world.violation(f"{self.node} gave up: {error}")
            self._begin_anew(process)
        except RolloutError as error:
            world.violation(f"{self.node} gave up: {error}")
        except Exception as error:
            world.defect(f"{self.node}: {error!r}", error)

    def _begin_anew(self, process: Process) -> None:
        """Nothing says any more whose files these are; somebody takes them away, as the agent asks for."""
        self._world.note(f"{self.node}: its directory is emptied")
        process.kill()
        self.disk.volume = Volume(boot=self.disk.volume.boot)
        self._come_back(power=False)

    async def _follow(self, process: Process, disk: ObservedDisk) -> None:
        world = self._world
        replica = await Replica.open(
            run=world.run,
            model_dir=MODEL,
            state_dir=STATE if self._tmpfs else None,
            store=world.store(process, self.node, distrust=DISTRUST),
            disk=disk,
            threads=1,
            include=sorted(self._wanted),
            file_bytes=5000,
        )
        if self._whole and (replica.position is None or replica.position.version < self.least):
            raise Violation(f"{self.node} came back at {replica.position}, after it had shown version {self.least}")
        disk.blind = False
        self.replica = replica
        self.agent = Agent(
            replica,
            world.run,
            "eu-west" if self.node.endswith("0") else "us-east",
            self.node,
            client=cast("Any", world.client(process, self.node)),
            engine=self.engine,
            pace=Pace(poll_s=6.0, longest_retry_s=5.0, heartbeat_s=20.0, watch_s=world.watch_s),
            ambient=Ambient(clock=world.clock(self.node).count_s, sleep=process.sleep, draw=world.chance.random),
        )
        await self.agent.follow()

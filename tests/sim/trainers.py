"""Training jobs: the real Desk and sidecar of every rank, with shared memory and the socket between them simulated."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from tests.rollout_agent.training import Spec, Training, Weights, group_bits
from tests.sim.blocking import Blocking, Condition
from tests.sim.loop import Process, is_over
from trainer_agent.arena import SLOTS, Arena
from trainer_agent.desk import Desk
from trainer_agent.errors import StillUndecided, TrainerError
from trainer_agent.handle import Handle
from trainer_agent.link import Link
from trainer_agent.messages import MAX_LINE_BYTES, Attach, Event, Message, parse_event
from trainer_agent.patience import Patience
from trainer_agent.placement import place_groups, slot_bytes
from trainer_agent.sidecar import Connection
from trainer_agent.state import STATE_FILE, unseal
from trainer_agent.worker import Worker
from weight_store.memory import MemoryStore

if TYPE_CHECKING:
    from tests.sim.world import World

T = TypeVar("T")

ASSETS = Path(__file__).parent / "assets"
"""Directories with the files beside the weights: two with another config each."""
SOCKET_S = 0.0005
START_S = 900.0


class SimArena:
    """Shared memory: it outlives the sidecar and dies with the trainer."""

    def __init__(self) -> None:
        self.path = Path("/arena")
        self.socket_path = self.path / "socket"
        self.files: dict[str, bytes] = {}
        self.slots: list[bytearray] = []

    def write(self, name: str, data: bytes) -> None:
        if not is_over():
            self.files[name] = data

    def read(self, name: str) -> bytes | None:
        return self.files.get(name)

    def allocate_slots(self, nbytes: int) -> None:
        self.slots = [bytearray(nbytes) for _ in range(SLOTS)]

    def map(self, name: str) -> bytearray:
        return self.slots[int(name.removeprefix("slot"))]


class SimLink:
    """Keeps a sidecar running, like trainer_agent.link, over a socket that keeps order."""

    def __init__(
        self,
        rank: SimRank,
        *,
        on_connect: Callable[[], None],
        on_event: Callable[[Event], None],
        on_loss: Callable[[], None],
    ) -> None:
        self._rank = rank
        self._on_connect = on_connect
        self._on_event = on_event
        self._on_loss = on_loss
        self._reader: asyncio.StreamReader | None = None
        self.pid = None
        self.closed = False

    def start(self) -> None:
        rank = self._rank
        process = rank.sidecar = Process(f"{rank.node}-sidecar")
        reader = self._reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        writer = _Writer(process, self._deliver)
        connection = Connection(reader, cast("asyncio.StreamWriter", writer), rank.make_worker)
        serving = process.spawn(connection.serve())
        serving.add_done_callback(lambda done: self._ended(process))  # type: ignore[func-returns-value]
        self._on_connect()

    def send(self, message: Message) -> None:
        if self._reader is not None:
            asyncio.get_running_loop().call_later(SOCKET_S, self._reader.feed_data, message.to_line())

    def note_progress(self) -> None:
        pass

    def close(self, timeout_s: float) -> None:
        self.closed = True

    def _deliver(self, line: bytes) -> None:
        if not self.closed and self._rank.process.alive:
            self._on_event(parse_event(line))

    def _ended(self, process: Process) -> None:
        if self.closed or not self._rank.process.alive:
            return
        process.kill()
        self._reader = None
        loop = asyncio.get_running_loop()
        loop.call_later(2 * SOCKET_S, self._lost)

    def _lost(self) -> None:
        if self.closed or not self._rank.process.alive:
            return
        self._on_loss()
        asyncio.get_running_loop().call_later(self._rank.world.chance.uniform(0.05, 3.0), self._again)

    def _again(self) -> None:
        if not self.closed and self._rank.process.alive:
            self.start()


@dataclass
class _Writer:
    """The sidecar's end of the socket."""

    process: Process
    deliver: Callable[[bytes], None]

    def is_closing(self) -> bool:
        return not self.process.alive

    def write(self, line: bytes) -> None:
        if self.process.alive:
            asyncio.get_running_loop().call_later(SOCKET_S, self.deliver, line)


class SimRank:
    """One rank of a launch."""

    def __init__(self, world: World, launch: Launch, rank: int) -> None:
        self.world = world
        self.rank = rank
        self.node = f"{launch.name}-rank{rank}"
        self.process = launch.process
        self.sidecar = Process(f"{self.node}-sidecar")
        self.arena = SimArena()
        self.rots = False
        attach = Attach(
            arena="/arena",
            run=world.run,
            store="memory://",
            coordinator="http://coordinator",
            rank=rank,
            world_size=launch.world_size,
            launch=launch.name,
            full_every=world.full_every,
            assets_dir=str(ASSETS / str(launch.assets)) if rank == 0 else None,
        )
        self.desk = Desk(cast("Arena", self.arena), attach, make_link=self._make_link)
        self.desk._changed = cast("Any", Condition(world.loop))

    def _make_link(self, socket_path: Path, *, on_end: Any, **callbacks: Any) -> Link:
        self.link = SimLink(self, **callbacks)
        return cast("Link", self.link)

    def make_worker(self, request: Attach, emit: Callable[[Event], None]) -> Worker:
        """The sidecar's worker, on this world."""
        world, process = self.world, self.sidecar
        return Worker(
            request,
            cast("Arena", self.arena),
            world.store(process, self.node, distrust=frozenset({"shard"})),
            cast("Any", world.client(process, self.node)),
            emit,
            patience=Patience(sleep=process.sleep, fraction=world.chance.random),
            clock=world.clock(self.node).count_s,
            nonce=world.nonce,
        )

    @property
    def waiting(self) -> int | None:
        """The slot of the copy that is being published, if its digests are known."""
        state, pending = unseal(self.arena.files.get(STATE_FILE, b"")), self.desk._pending
        if state is None or state.waiting is None or pending is None:
            return None
        return state.waiting.slot if state.waiting.ordinal == pending.handle.ordinal else None

    async def blocking(self, call: Callable[[], T]) -> T:
        """What a call of the desk's comes to that may block."""
        found: T = await Blocking(self.process, call).result()
        return found

    def die(self) -> None:
        """The trainer's process is gone, and with it what it started."""
        self.link.closed = True
        self.sidecar.kill()


@dataclass
class Launch:
    """One start of the training job. ``weights``: those of the checkpoint it starts from."""

    world: World
    name: str
    world_size: int
    specs: tuple[Spec, ...]
    weights: Weights
    first_step: int
    max_wait_s: float
    assets: int
    steps_s: tuple[float, ...] = (0.0, 0.5, 3.0)
    publications: int = 1 << 30
    published: int = 0
    process: Process = field(init=False)
    ranks: list[SimRank] = field(default_factory=list)
    handles: list[tuple[int, Handle]] = field(default_factory=list)
    ended: str = ""

    def start(self) -> None:
        """Start all ranks."""
        self.process = Process(self.name)
        self.world.note(f"{self.name} starts with {self.world_size} ranks at step {self.first_step}")
        self.process.spawn(self._train())

    def kill(self) -> None:
        """kill -9 of the whole job."""
        self.world.note(f"{self.name} is killed")
        self.ended = self.ended or "killed"
        self.process.kill()
        for rank in self.ranks:
            rank.die()

    def pause(self) -> None:
        """The machine sleeps."""
        for process in (self.process, *(rank.sidecar for rank in self.ranks)):
            process.pause()

    def resume(self) -> None:
        """And wakes up."""
        for process in (self.process, *(rank.sidecar for rank in self.ranks)):
            process.resume()

    @property
    def running(self) -> bool:
        """Whether more may come from it."""
        return not self.ended

    async def _train(self) -> None:
        try:
            await self._run()
        except TrainerError as error:
            self.ended = self.ended or error.code
            self.world.note(f"{self.name} ends: {error.code}")
            for rank in self.ranks:
                rank.die()

    async def _run(self) -> None:
        self.ranks = [SimRank(self.world, self, rank) for rank in range(self.world_size)]
        for rank in self.ranks:
            rank.desk.start()
        await _together(self._begin(rank) for rank in self.ranks)
        chance = self.world.chance
        for ordinal in itertools.count():
            while ordinal >= self.publications:
                await self.process.sleep(1.0)
            await self.process.sleep(chance.choice(self.steps_s))
            self.published = ordinal + 1
            self._step()
            self.world.model.publishes(self.name, ordinal, dict(self.weights))
            await _together(self._publish(rank, ordinal) for rank in self.ranks)

    def _step(self) -> None:
        """Change about a hundredth of the weights by one unit in the last place; sometimes most of them."""
        chance = self.world.numbers
        share = 0.9 if chance.random() < 0.1 else 0.012
        for name, bits in self.weights.items():
            flips = (chance.random(bits.shape) < share).astype(bits.dtype)
            self.weights[name] = np.asarray(bits ^ flips)

    async def _begin(self, rank: SimRank) -> None:
        deadline_s = self.world.loop.time() + START_S
        run_id, term = await rank.blocking(lambda: rank.desk.wait_attached(deadline_s))
        shapes = Training(
            MemoryStore(), name=self.world.run, specs=self.specs, world=self.world_size, run_id=run_id, term=term,
            aliases={}, weights=self.weights,
        )  # fmt: skip
        offer = shapes._offer(rank.rank, self.world_size)
        layout = await rank.blocking(lambda: rank.desk.settle(offer, deadline_s))
        rank.arena.allocate_slots(slot_bytes(place_groups(layout.owned(rank.rank))))
        self.layout = layout

    async def _publish(self, rank: SimRank, ordinal: int) -> None:
        await self.process.sleep(self.world.chance.uniform(0, 0.05))
        handle = rank.desk.new_handle(ordinal, self.first_step + ordinal)
        self.handles.append((ordinal, handle))
        try:
            slot = await rank.blocking(lambda: rank.desk.wait_for_slot(self.max_wait_s))
        except StillUndecided as error:
            rank.desk.fail(handle, error)
            return
        for placed in place_groups(self.layout.owned(rank.rank)):
            raw = group_bits(placed.group, self.weights).tobytes()
            rank.arena.slots[slot][placed.start : placed.start + len(raw)] = raw
        rank.desk.publish(handle, slot, 0.0)


async def _together(works: Iterable[Any]) -> None:
    """All ranks meet again after each of these; the first one that fails ends the job."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()

"""From a seed to a schedule, and from a schedule to a verdict."""

from __future__ import annotations

import asyncio
import gc
import logging
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar
from unittest import mock

from codec import choice
from rollout_agent import gate
from rollout_agent import replica as replica_module
from tests.rollout_agent.inline import Inline
from tests.sim.agents import SimAgent
from tests.sim.chaos import Chaos
from tests.sim.collectors import SimCollector
from tests.sim.coordinators import SimCoordinator
from tests.sim.errors import Violation
from tests.sim.loop import SimLoop
from tests.sim.network import Faults
from tests.sim.trainers import Launch
from tests.sim.world import World
from trainer_agent import desk
from trainer_agent.handle import Handle

WARM_S = 60.0
CALM_S = 300.0
"""Longer than everything that may have to run out first: expiry, long polls, budgets of retries, patience."""
CLEAN_S = 60.0
"""Longer than the minimum age and a collection or two."""
FAULTS, MANY_FAULTS = (2, 8), (30, 60)
"""A short schedule finds most of what a long one does, many times as quickly; some states only a long one comes to."""


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    TOTALS: ClassVar[tuple[str, ...]] = ("steps", "versions", "aborted", "launches", "restarts", "deleted")

    seed: int
    digest: str
    steps: int
    versions: int
    aborted: int
    launches: int
    restarts: int
    deleted: int
    jump: int
    virtual_s: float


class Failed(AssertionError):
    """A violation with its seed and the last lines of the trace."""


@dataclass(frozen=True)
class Bias:
    """Where to look: faults and kinds of chaos to use, instead of those that the seed draws.

    ``early``: the faults begin before there is a version. ``long``: there are many.
    """

    faults: Faults | None = None
    kinds: tuple[str, ...] = ()
    tmpfs: bool | None = None
    full_every: int | None = None
    part_bytes: int | None = None
    watch_s: float | None = None
    early: bool = False
    long: bool = False


def simulate(seed: int, bias: Bias = Bias()) -> Result:
    """Run one schedule. Raises :class:`Failed` if a promise was broken."""
    loop = SimLoop()
    enabled = gc.isenabled()
    # What cycles keep alive would otherwise be closed at moments that differ between runs.
    gc.disable()
    asyncio.set_event_loop(loop)
    world = World(seed, loop)
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            mock.patch.object(replica_module, "ThreadPoolExecutor", Inline),
            mock.patch.object(gate, "ThreadPoolExecutor", Inline),
            # Tiny groups are coded as large ones are: trying every method for them would be a tenth of all the work.
            mock.patch.object(choice, "_SMALL_BYTES", 0),
            mock.patch.object(desk, "time", SimpleNamespace(monotonic=loop.time)),
        ):
            loop.run_until_complete(_run(world, bias))
        return _result(world)
    except Exception as error:
        raise Failed(_story(world, error)) from error
    finally:
        end(world, loop)
        logging.disable(disabled)
        if enabled:
            gc.enable()


def end(world: World, loop: SimLoop) -> None:
    """Let nothing of it go on, and close the loop."""
    world.over = True
    for launch in world.launches:
        launch.ended = launch.ended or "over"
        for rank in launch.ranks:
            rank.link.closed = True
    for agent in world.agents:
        agent.disk.dead = True
    while tasks := loop.running():
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.wait(tasks, timeout=1.0))
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
        jump=world.jump,
        virtual_s=world.loop.time(),
    )


def _story(world: World, error: Exception) -> str:
    lines = "\n".join(world.trace)
    return (
        f"{lines}\n\nseed {world.seed} at {world.loop.time():.2f} s: {error}\n"
        f"Again: .venv/bin/python -m tests.sim --seed {world.seed}"
    )


async def _run(world: World, bias: Bias) -> None:
    if bias.full_every is not None:
        world.full_every = bias.full_every
    if bias.part_bytes is not None:
        world.bucket.part_bytes = bias.part_bytes
    if bias.watch_s is not None:
        world.watch_s = bias.watch_s
    faults = bias.faults or Faults.draw(world.chance)
    # Most schedules come to a first version undisturbed: what may befall that is soon found.
    world.network.faults = faults if world.chance.random() < 0.1 or bias.early else Faults()
    world.coordinators = [SimCoordinator(world, number) for number in range(world.chance.choice((1, 2, 2)))]
    world.agents = [
        SimAgent(world, number, tmpfs=world.chance.random() < 0.5 if bias.tmpfs is None else bias.tmpfs)
        for number in range(world.chance.choice((1, 2)))
    ]
    world.collectors = [SimCollector(world, number) for number in range(world.chance.choice((1, 1, 2)))]
    world.launch()
    chaos = Chaos(world, bias.kinds)
    while not world.model.sealed and world.loop.time() < WARM_S:  # noqa: ASYNC110 - a model has no events
        await asyncio.sleep(0.25)
    world.network.faults = faults
    pause_s = world.chance.choice((0.3, 1.0, 3.0))
    for _ in range(world.chance.randint(*(MANY_FAULTS if world.chance.random() < 0.05 or bias.long else FAULTS))):
        await asyncio.sleep(world.chance.expovariate(1 / pause_s))
        chaos.act()
        world.check()
    await chaos.wait()
    chaos.calm()
    await _settle(world)
    await _clean(world)
    _final_checks(world)


async def _settle(world: World) -> None:
    """Nothing goes wrong any more: the run's owner can publish, and every agent comes to what it published."""
    deadline_s = world.loop.time() + CALM_S
    owner = None
    while owner is None or not _settled(world, owner):
        await asyncio.sleep(0.25)
        world.check()
        current = _owner(world)
        if current is not owner:
            owner = current
        if not owner.published or _is_idle_in_vain(world, owner):
            owner.publications = owner.published + 1
        if world.loop.time() > deadline_s:
            raise Violation(f"nothing goes wrong any more, but the run does not come to rest: {_state(world, owner)}")


async def _clean(world: World) -> None:
    """Nobody pays for ever for parts of uploads whose writer died or whose answer was lost."""
    deadline_s = world.loop.time() + CLEAN_S
    while left := [upload for upload in world.bucket.uploads.list() if world.model.is_waste(upload.key)]:
        await asyncio.sleep(1.0)
        world.check()
        if world.loop.time() > deadline_s:
            raise Violation(f"an upload of {left[0].key} is never cleaned up")


def _last(owner: Launch) -> list[Handle]:
    return [handle for ordinal, handle in owner.handles if ordinal == owner.publications - 1]


def _is_idle_in_vain(world: World, owner: Launch) -> bool:
    """Whether it waits, although a rank left out or gave up what it published last, or the run is another's by now."""
    last = _last(owner)
    if owner.published < owner.publications:
        return False
    head = world.model.head
    is_over = head is None or head.launch != owner.name
    return (is_over and all(handle.done for handle in last)) or any(handle.error is not None for handle in last)


def _owner(world: World) -> Launch:
    """The launch that has the run, or will; a new one if none runs. Who lost it learns that when it publishes."""
    head = world.model.head
    running = [launch for launch in world.launches if launch.running]
    for launch in running:
        if head is not None and launch.name == head.launch:
            return launch
    return running[-1] if running else world.launch()


def _settled(world: World, owner: Launch) -> bool:
    head = world.model.head
    if head is None or head.launch != owner.name or not owner.ranks:
        return False
    last = _last(owner)
    if len(last) < owner.world_size or not all(handle.done for handle in last):
        return False
    return all(
        agent.replica is not None
        and not agent.disk.dead  # it has just crashed, and the process is about to learn that
        and agent.agent is not None
        and agent.served == head.position.version
        and agent.replica.position == head.position
        and agent.disk.entered() is not None
        for agent in world.agents
    )


def _state(world: World, owner: Launch) -> str:
    agents = ", ".join(
        f"{agent.node} at {agent.replica.position if agent.replica and not agent.disk.dead else None}, "
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

"""Engines that are told of versions: they read straight from the directory, at their own pace, agent or no agent."""

from __future__ import annotations

import asyncio
import contextvars
from typing import TYPE_CHECKING

from rollout_agent.engine import Staged
from rollout_agent.errors import EngineRefused, EngineSilent
from tests.rollout_agent.training import read_model
from tests.sim.errors import Violation

if TYPE_CHECKING:
    from tests.sim.agents import SimAgent

PATIENCE_S = 30.0
"""How long an engine at the gate waits for the repair of files that somebody had his hands in."""


class SimEngine:
    """The engine of one agent's machine, until that loses power. It loads once at a time, as often as it is told."""

    def __init__(self, agent: SimAgent) -> None:
        self._agent = agent
        self._one = asyncio.Lock()
        self._gone = False
        self._promised = True
        """Whether nobody had his hands in the files since it began to read them."""
        self._heard = True
        """Whether its answer reaches an agent that knows what it was told."""

    def power_loss(self) -> None:
        """It ends with its machine."""
        self._gone = True

    def disturbed(self, *, heard: bool = True) -> None:
        """Somebody had his hands in the files, or bits flipped: what it reads now is nobody's promise."""
        self._promised = False
        self._heard = self._heard and heard

    async def load(self, staged: Staged) -> None:
        """What the agent calls. Sometimes the agent's patience ends, and the engine goes on."""
        agent = self._agent
        process, chance, chaotic = agent.process, agent.world.chance, agent.world.chaotic
        if chaotic and chance.random() < 0.05:
            await process.sleep(chance.uniform(0.0, 1.0))
            raise EngineRefused("out of memory")
        # In no process's context: this goes on when the agent is killed.
        loading = asyncio.get_running_loop().create_task(self._load(staged), context=contextvars.Context())
        patience_s = chance.uniform(0.1, 2.0) if chaotic and chance.random() < 0.05 else None
        done, _ = await asyncio.wait((loading,), timeout=patience_s)
        await process.turn()
        if not done:
            raise EngineSilent("no answer")

    async def _load(self, staged: Staged) -> None:
        agent = self._agent
        async with self._one:
            self._promised = self._heard = True
            try:
                found = await self._read(staged)
                if self._gone or not self._heard:
                    return
                if self._promised:
                    agent.loaded(staged.version, read_model(found))
                if staged.version < agent.served:
                    raise Violation(f"{agent.node} serves version {staged.version} after {agent.served}")
                if agent.served:
                    agent.world.jump = max(agent.world.jump, staged.version - agent.served)
                agent.served = staged.version
            except Violation as violation:
                agent.world.violation(str(violation))

    async def _read(self, staged: Staged) -> dict[str, bytes]:
        """Half a file at a time, with pauses."""
        agent = self._agent
        loop, chance = agent.world.loop, agent.world.chance
        mark = agent.disk.entered()
        until_s = loop.time() + (PATIENCE_S if agent.disk.distrusted else 0.0)
        while mark is None and loop.time() < until_s and not self._gone:
            await asyncio.sleep(0.2)  # the gate is shut until the agent has repaired what it finds
            mark = agent.disk.entered()
        if self._gone:
            return {}
        if (mark is None or mark.position.version != staged.version) and self._promised:
            raise Violation(f"{agent.node} told its engine of version {staged.version} while it holds {mark}")
        found: dict[str, bytes] = {}
        pause_s = chance.choice((0.1, 0.1, 0.4, 2.0))
        for name in agent.disk.weight_files():
            for half in (0, 1):
                await asyncio.sleep(chance.uniform(0.0, pause_s))
                inode = agent.disk.inode(name)
                if self._gone or not self._promised:
                    return found
                if inode is None:
                    raise Violation(f"{name} went away while an engine was loading version {staged.version}")
                middle = len(inode.data) // 2
                found[name] = bytes(inode.data[:middle] if half == 0 else found[name] + inode.data[middle:])
        return found

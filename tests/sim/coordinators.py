"""Coordinators that come and go, and a client that reaches one of them over the simulated network."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from coordinator.ambient import Ambient, Settings
from coordinator.errors import CoordinatorError, CoordinatorUnreachable, InternalFault
from coordinator.problems import from_store_error
from coordinator.service import Coordinator
from coordinator.wire import (
    AgentAnswer,
    AgentReport,
    HeadAnswer,
    LayoutAnswer,
    OfferReport,
    OpenRequest,
    ProgressReport,
    ReceiptReport,
    RunAnswer,
    TermAnswer,
    TermRequest,
    VersionAnswer,
    WaitAnswer,
    WithdrawalReport,
)
from tests.sim.errors import Killed
from tests.sim.loop import Process
from tests.sim.network import NoAnswer, Reply
from weight_store.errors import WeightStoreError

if TYPE_CHECKING:
    from tests.sim.world import World

SETTINGS = Settings(expire_after_s=10.0, poll_s=6.0, idle_poll_s=10.0)
TIMEOUT_S = 5.0
DISTRUST = frozenset({"head", "open", "manifest", "receipt", "offer", "layout"})
"""Of these a coordinator may get wrong bytes, and act on none of them."""


class SimCoordinator:
    """One replica of the coordinator at a fixed address; what it remembers dies with its process."""

    def __init__(self, world: World, number: int) -> None:
        self._world = world
        self.node = f"coordinator-{number}"
        self.process = Process(self.node)
        self.service: Coordinator | None = None
        self.start()

    def start(self) -> None:
        """Start it empty."""
        self.process.kill()
        self.process = process = Process(self.node)
        world = self._world
        ambient = Ambient(
            clock=world.clock(self.node).count_s,
            sleep=process.sleep,
            nonce=world.nonce,
            run_id=lambda: f"00000000-0000-4000-8000-{world.chance.getrandbits(48):012x}",
            offload=_inline,
        )
        self.service = Coordinator(
            world.store(process, self.node, distrust=DISTRUST), settings=SETTINGS, ambient=ambient
        )
        process.spawn(self.service.registry.run_forever())
        world.note(f"{self.node} starts")

    def stop(self) -> None:
        """Kill it."""
        self._world.note(f"{self.node} is killed")
        self.process.kill()
        self.service = None

    def serve(self, call: Callable[[Coordinator], Coroutine[Any, Any, Any]], reply: Reply) -> None:
        """Handle a request that arrived, as the routes do; nobody answers while it is down."""
        if self.service is not None:
            self.process.spawn(self._handle(self.service, call, reply))

    async def _handle(
        self, service: Coordinator, call: Callable[[Coordinator], Coroutine[Any, Any, Any]], reply: Reply
    ) -> None:
        await self.process.turn()
        outcome: Any
        try:
            outcome = await call(service)
        except CoordinatorError as error:
            outcome = error
        except WeightStoreError as error:
            outcome = from_store_error(error)
        except (Killed, asyncio.CancelledError):
            raise
        except Exception as error:
            self._world.defect(f"{self.node}: {error!r}", error)
            outcome = InternalFault(repr(error))
        await self.process.turn()
        reply(outcome)


async def _inline(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


class SimClient:
    """What agents use of CoordinatorClient. Each request goes to one of the coordinators, as behind one address."""

    def __init__(self, world: World, process: Process, node: str) -> None:
        self._world = world
        self._process = process
        self._node = node

    async def close(self) -> None:
        """Nothing to close."""

    async def takeover(self, run: str, request: TermRequest) -> TermAnswer:
        return await self._ask("takeover", lambda c: c.take_over(run, request), request.wait_s)

    async def report_offer(self, run: str, term: int, rank: int, report: OfferReport) -> LayoutAnswer:
        return await self._ask("offer", lambda c: c.report_offer(run, term, rank, report))

    async def layout(self, run: str, term: int, world_size: int, *, wait_s: float = 0) -> LayoutAnswer:
        return await self._ask("layout", lambda c: c.layout(run, term, world_size, wait_s), wait_s)

    async def open_version(self, run: str, request: OpenRequest) -> VersionAnswer:
        return await self._ask("open", lambda c: c.open_version(run, request))

    async def report_receipt(self, run: str, version: int, rank: int, report: ReceiptReport) -> VersionAnswer:
        return await self._ask("receipt", lambda c: c.report_receipt(run, version, rank, report))

    async def report_progress(self, run: str, version: int, rank: int, report: ProgressReport) -> VersionAnswer:
        return await self._ask("progress", lambda c: c.report_progress(run, version, rank, report))

    async def withdraw(self, run: str, version: int, rank: int, report: WithdrawalReport) -> VersionAnswer:
        return await self._ask("withdraw", lambda c: c.withdraw(run, version, rank, report))

    async def run(self, run: str) -> RunAnswer:
        return await self._ask("run", lambda c: c.run(run))

    async def version(self, run: str, version: int, *, wait_s: float = 0) -> VersionAnswer:
        return await self._ask("version", lambda c: c.version(run, version, wait_s), wait_s)

    async def head(self, run: str, *, after: int | None = None, wait_s: float = 0) -> HeadAnswer:
        return await self._ask("head", lambda c: c.head(run, after, wait_s), wait_s)

    async def heartbeat(self, run: str, region: str, agent: str, report: AgentReport) -> AgentAnswer:
        return await self._ask("heartbeat", lambda c: c.heartbeat(run, region, agent, report))

    async def wait(
        self,
        run: str,
        version: int,
        *,
        state: Any = "serving",
        regions: Sequence[str] = (),
        quorum: float = 1.0,
        timeout_s: float = 0,
    ) -> WaitAnswer:
        return await self._ask("wait", lambda c: c.wait(run, version, state, regions, quorum, timeout_s), timeout_s)

    async def _ask(self, what: str, call: Callable[[Coordinator], Coroutine[Any, Any, Any]], wait_s: float = 0) -> Any:
        world = self._world
        target = world.chance.choice(world.coordinators)
        try:
            found = await world.network.exchange(
                self._process, self._node, target.node, lambda reply: target.serve(call, reply), TIMEOUT_S + wait_s
            )
        except NoAnswer:
            raise CoordinatorUnreachable(f"{target.node} does not answer") from None
        except CoordinatorError as error:
            world.note(f"{self._node} {what} at {target.node}: {error.code}")
            # A new one each time, as the client makes it from a problem body.
            raise type(error)(str(error)) from None
        world.note(f"{self._node} {what} at {target.node}")
        return found

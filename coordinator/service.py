"""The coordinator without HTTP: one method a route, runs by name, and the loop that tends them.

It owns no truth. Whatever it holds in memory it can lose: heartbeats come again, everything else is in the bucket.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from coordinator import events
from coordinator.ambient import Ambient, Settings
from coordinator.decisions import View
from coordinator.errors import (
    CoordinatorError,
    TermPending,
    TooBusy,
    UnknownRun,
    UnknownVersion,
    VersionAborted,
    VersionUndecided,
    WrongRun,
)
from coordinator.events import EventId
from coordinator.feed import feed
from coordinator.fleet import Agent, Stage, reached, region_answers
from coordinator.history import History
from coordinator.layouts import Collecting
from coordinator.registry import Registry
from coordinator.runs import Run
from coordinator.terms import check_not_retired
from coordinator.waking import Shared
from coordinator.wire import (
    AgentAnswer,
    AgentReport,
    HeadAnswer,
    LayoutAnswer,
    OfferReport,
    OpenRequest,
    ProgressReport,
    ReceiptReport,
    RegionAnswer,
    RunAnswer,
    TermAnswer,
    TermRequest,
    VersionAnswer,
    WaitAnswer,
    WithdrawalReport,
)
from weight_store.errors import ObjectNotFound
from weight_store.head import Head
from weight_store.keys import RUNS_PREFIX
from weight_store.position import Position
from weight_store.store import Store

_PARALLEL = 16
_ABSENT = f"{RUNS_PREFIX}_absent"
"""No run can have this name, so "not found" proves that the store answers and may be read."""


class Coordinator:
    """Serves all runs of one bucket. Any number of coordinators may share a bucket."""

    def __init__(self, store: Store, *, settings: Settings | None = None, ambient: Ambient | None = None) -> None:
        self.settings = settings or Settings()
        self._store = store
        self._ambient = ambient or Ambient()
        self.registry = Registry(store, self._ambient, self.settings)
        self._streams = 0
        self._answers = Shared(self._ask_store)

    def __repr__(self) -> str:
        return f"Coordinator({self._store!r}, {self.registry!r})"

    def _run(self, name: str) -> tuple[Run, History]:
        return self.registry.get(name)

    # Trainers

    async def take_over(self, name: str, request: TermRequest) -> TermAnswer:
        """Give the run to a launch (``takeover``), or wait until rank 0 of that launch has done so."""
        run, _ = self._run(name)
        if request.takeover:
            head = await run.take_over(request.launch, request.expected_term)
            await run.settle()  # what the term before left undecided is fenced at once
        else:
            head = await self._await_launch(run, request)
        return TermAnswer(run=name, run_id=head.run_id, term=head.term, launch=head.launch, position=head.position)

    async def _await_launch(self, run: Run, request: TermRequest) -> Head:
        deadline_s = self._ambient.clock() + request.wait_s
        while True:
            left_s = deadline_s - self._ambient.clock()
            try:
                view = await run.wait_for(lambda view: _is_settled(view.head, request.launch), max(left_s, 0))
                if view.head.launch == request.launch:
                    return view.head
                check_not_retired(view.head, request.launch)
            except UnknownRun:
                await self._ambient.sleep(max(0.0, min(left_s, self.settings.poll_s)))
            if self._ambient.clock() >= deadline_s or self.registry.closed:
                raise TermPending(
                    f"launch {request.launch} does not own run {run.name}: rank 0 has not taken it over yet, "
                    "or a later launch did"
                )

    async def report_offer(self, name: str, term: int, rank: int, report: OfferReport) -> LayoutAnswer:
        """Take note of one rank's offer; the answer has the layout if it was the last one."""
        run, _ = self._run(name)
        collecting = await run.collecting(term, report.world_size)
        await collecting.fetch([rank])
        return await self._layout(run, collecting, report.world_size)

    async def layout(self, name: str, term: int, world_size: int, wait_s: float) -> LayoutAnswer:
        """Return the layout of a term, waiting for the offers of all ranks; ``LayoutRefused`` if there is none."""
        run, _ = self._run(name)
        deadline_s = self._ambient.clock() + wait_s
        with run.watched():
            while True:
                collecting = await run.collecting(term, world_size)
                await collecting.look()
                answer = await self._layout(run, collecting, world_size)
                left_s = deadline_s - self._ambient.clock()
                if answer.layout or left_s <= 0 or run.stirred.closed:
                    return answer
                await run.stirred.wait(min(left_s, self.settings.poll_s))

    async def _layout(self, run: Run, collecting: Collecting, world_size: int) -> LayoutAnswer:
        view = await run.fresh()
        await collecting.resolve(view.current)
        if isinstance(collecting.outcome, CoordinatorError):
            # A new exception each time: one that is raised again and again would collect tracebacks.
            raise type(collecting.outcome)(str(collecting.outcome))
        if collecting.outcome:
            run.stirred.notify()
        return LayoutAnswer(layout=collecting.outcome, world_size=world_size, missing=collecting.missing)

    async def open_version(self, name: str, request: OpenRequest) -> VersionAnswer:
        """Open the version of a publication, or find it; the same answer for every rank."""
        run, history = self._run(name)
        version = await run.open(request)
        return await self._answer(run, history, version)

    async def report_receipt(self, name: str, version: int, rank: int, report: ReceiptReport) -> VersionAnswer:
        """Take note of a durable receipt; the answer tells whether the version is decided."""
        run, history = self._run(name)
        await run.receive(version, rank, report)
        return await self._answer(run, history, version)

    async def report_progress(self, name: str, version: int, rank: int, report: ProgressReport) -> VersionAnswer:
        """Take note that a rank still works on a version, so that it does not expire yet."""
        run, history = self._run(name)
        await run.note_progress(version, rank, report)
        return await self._answer(run, history, version)

    async def withdraw(self, name: str, version: int, rank: int, report: WithdrawalReport) -> VersionAnswer:
        """Give a version up that a rank cannot contribute to, unless its receipt is there or it is decided."""
        run, history = self._run(name)
        await run.withdraw(version, rank, report)
        return await self._answer(run, history, version)

    # Versions

    async def version(self, name: str, version: int, wait_s: float) -> VersionAnswer:
        """Return one version; with ``wait_s``, once it is decided or the time is over."""
        run, history = self._run(name)
        await run.wait_for(lambda view: version != view.slot.version or view.slot.opened is None, wait_s)
        return await self._answer(run, history, version)

    async def versions(self, name: str, limit: int, before: int | None) -> list[VersionAnswer]:
        """Return up to ``limit`` versions below ``before``, newest first, as far as the bucket still has them."""
        run, history = self._run(name)
        view = await run.fresh()
        newest = events.newest(view).version
        first = newest if before is None else min(newest, before - 1)
        found: list[VersionAnswer] = []
        for version in range(first, max(0, first - limit), -1):
            try:
                found.append(await history.answer(version, view, self._ambient.clock()))
            except UnknownVersion:
                break
        return found

    async def manifest(self, name: str, version: int) -> tuple[bytes, Position]:
        """Return a sealed version's manifest as stored, and its position."""
        run, history = self._run(name)
        await run.fresh()
        answer = await self._answer(run, history, version)
        if answer.state == "undecided":
            raise VersionUndecided(f"version {version} of run {name} has no manifest yet")
        if answer.position is None:
            raise VersionAborted(f"version {version} of run {name} was given up: {answer.reason}")
        return await run.bucket.manifest_bytes(answer.position), answer.position

    async def _answer(self, run: Run, history: History, version: int) -> VersionAnswer:
        view = run.view or await run.fresh()
        if version > view.slot.version:
            view = await run.fresh()
        return await history.answer(version, view, self._ambient.clock())

    # Readers

    async def runs(self) -> list[RunAnswer]:
        """Return every run of the bucket, in order of name."""
        limit = asyncio.Semaphore(_PARALLEL)

        async def one(name: str) -> RunAnswer | None:
            async with limit:
                try:
                    return await self.run(name)
                except UnknownRun:
                    return None  # its creation was cut short between marker and head

        found = await asyncio.gather(*(one(name) for name in await self.registry.listed()))
        return [run for run in found if run is not None]

    async def run(self, name: str) -> RunAnswer:
        """Return head, undecided version and regions of one run."""
        run, _ = self._run(name)
        view = await run.fresh()
        return RunAnswer(
            run=name,
            run_id=view.head.run_id,
            term=view.head.term,
            launch=view.head.launch,
            position=view.head.position,
            undecided=view.slot.version if view.slot.opened else None,
            regions=await self._regions(run),
        )

    async def head(self, name: str, after: int | None, wait_s: float) -> HeadAnswer:
        """Return the head; with ``after``, once its version is larger or the time is over."""
        run, _ = self._run(name)
        view = await run.wait_for(lambda view: after is None or view.head.position.version > after, wait_s)
        return HeadAnswer(
            run=name,
            run_id=view.head.run_id,
            term=view.head.term,
            position=view.head.position,
            step=view.current.step if view.current else 0,
        )

    async def heartbeat(self, name: str, region: str, agent_id: str, report: AgentReport) -> AgentAnswer:
        """Take an agent's report; it counts until its time to live is over."""
        run, _ = self._run(name)
        view = run.view or await run.fresh()
        if report.run_id != view.head.run_id:
            view = await run.fresh()
        if report.run_id != view.head.run_id:
            raise WrongRun(
                f"agent {agent_id} holds weights of run {report.run_id}, but {name} is now run {view.head.run_id}: "
                "start it with an empty model directory"
            )
        before = run.agents.get(region, agent_id)
        if before is None:
            run.agents.check_room(region, self.registry.agents, self.settings.room)
        run.agents.put(Agent(region, agent_id, report, self._ambient.clock()))
        if before is None or (before.report.staged, before.report.serving) != (report.staged, report.serving):
            run.stirred.notify()
        return AgentAnswer(id=agent_id, region=region, age_s=0.0, report=report)

    async def regions(self, name: str) -> tuple[RegionAnswer, ...]:
        """Return the regions of a run: live agents and targets."""
        run, _ = self._run(name)
        await run.fresh()
        return await self._regions(run)

    async def _regions(self, run: Run) -> tuple[RegionAnswer, ...]:
        return region_answers(run.agents.values(), await run.bucket.control(), self._ambient.clock())

    async def wait(
        self, name: str, version: int, stage: Stage, regions: Sequence[str], quorum: float, timeout_s: float
    ) -> WaitAnswer:
        """Wait until the regions have come to ``stage`` of ``version``. ``VersionAborted`` if it never will.

        A coordinator that has just started does not take the agents that it has heard of so far for all.
        """
        run, history = self._run(name)
        deadline_s = self._ambient.clock() + timeout_s
        with run.watched():
            view = await run.fresh()
            while True:
                await self._check_not_aborted(history, version, view)
                now_s = self._ambient.clock()
                progress, complete_s = history.regions(version, now_s), run.agents.complete_s
                known = stage == "sealed" or now_s >= complete_s
                done = known and version <= view.head.position.version and reached(progress, stage, regions, quorum)
                if done or now_s >= deadline_s or run.stirred.closed:
                    return WaitAnswer(reached=done, version=version, regions=progress, run_id=view.head.run_id)
                await run.stirred.wait((deadline_s if known else min(deadline_s, complete_s)) - now_s)
                view = run.view or view

    async def _check_not_aborted(self, history: History, version: int, view: View) -> None:
        if version >= view.slot.version:
            return
        try:
            answer = await history.answer(version, view, self._ambient.clock())
        except UnknownVersion:
            return  # deleted by retention: what replicas have by now is later
        if answer.state == "aborted":
            raise VersionAborted(f"version {version} of run {answer.run} was given up: {answer.reason}")

    async def events(self, name: str, after: EventId | None) -> AsyncIterator[str]:
        """Start a stream of server-sent events from ``after`` on; ``UnknownRun`` or ``TooBusy`` before it starts."""
        if self._streams >= self.settings.max_streams:
            raise TooBusy(f"{self._streams} event streams are open already: poll the head instead, or close some")
        run, history = self._run(name)
        view = await run.fresh()
        return self._counted(feed(run, view, history, self._ambient.clock, self.settings.keep_alive_s, after))

    async def _counted(self, stream: AsyncIterator[str]) -> AsyncIterator[str]:
        self._streams += 1
        try:
            async for text in stream:
                yield text
        finally:
            self._streams -= 1

    async def ready(self) -> None:
        """Return if the store answers; raises its ``StoreError`` otherwise. Who asks meanwhile shares the answer."""
        await self._answers()

    async def _ask_store(self) -> None:
        # Not opening.check_reachable: that module brings every adapter along, and a simulation needs none.
        with contextlib.suppress(ObjectNotFound):
            await self._store.get(_ABSENT, max_bytes=1)


def _is_settled(head: Head, launch: str) -> bool:
    """Whether ``launch`` has the run, or can never have it again."""
    return head.launch == launch or launch in head.retired

"""The runs that this coordinator has heard of, and the loop that tends them whether or not anybody asks."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from coordinator.ambient import Ambient, Settings
from coordinator.cache import Recent
from coordinator.errors import BadRequest, CoordinatorError, TooBusy, UnknownRun
from coordinator.history import History
from coordinator.runs import Run
from weight_store.errors import FormatError, WeightStoreError
from weight_store.keys import RUNS_PREFIX, check_run
from weight_store.store import Store

logger = logging.getLogger(__name__)

MAX_RUNS = 10_000
_LIST_AGAIN_S = 5.0


class Registry:
    """Runs by name, made on demand and dropped again if the bucket does not have them; at most ``MAX_RUNS``."""

    def __init__(self, store: Store, ambient: Ambient, settings: Settings) -> None:
        self._store = store
        self._ambient = ambient
        self._settings = settings
        self._runs: dict[str, tuple[Run, History]] = {}
        self._failing: Recent[str, str] = Recent(1000)
        self._listed_s = float("-inf")
        self.closed = False

    def __repr__(self) -> str:
        return f"{len(self._runs)} runs"

    def get(self, name: str) -> tuple[Run, History]:
        """Return a run and its history, whether or not the bucket has it; ``BadRequest`` for an impossible name."""
        if name not in self._runs:
            try:
                check_run(name)
            except FormatError as error:
                raise BadRequest(str(error)) from None
            if len(self._runs) >= MAX_RUNS:
                self._drop_absent()
            if len(self._runs) >= MAX_RUNS:
                raise TooBusy(f"this coordinator tends {MAX_RUNS} runs already: use another prefix for new ones")
            run = Run(name, self._store, self._ambient, self._settings)
            if self.closed:
                run.close()
            self._runs[name] = (run, History(run))
        return self._runs[name]

    def _drop_absent(self) -> None:
        """Forget names that somebody asked for and the bucket does not have."""
        for name, (run, _) in list(self._runs.items()):
            if run.idle:
                del self._runs[name]

    @property
    def agents(self) -> int:
        """Agents of all runs, as far as they are not known to be gone."""
        return sum(len(run.agents) for run, _ in self._runs.values())

    async def listed(self) -> list[str]:
        """Return the names of all runs of the bucket, in order. The one LIST there is; no decision rests on it."""
        found: list[str] = []
        async for entry in self._store.list(RUNS_PREFIX):
            with contextlib.suppress(FormatError):
                found.append(check_run(entry.key.removeprefix(RUNS_PREFIX)))
            if len(found) == MAX_RUNS:
                break
        return found

    def stop_waiting(self) -> None:
        """End every long poll and stream, now and from now on, so that the server can stop."""
        self.closed = True
        for run, _ in self._runs.values():
            run.close()

    async def tick(self) -> None:
        """Tend once what is due: discover runs, decide, expire, finish heads. Never raises for one run's trouble."""
        await self._discover()
        now_s = self._ambient.clock()
        due = [run for run, _ in list(self._runs.values()) if run.due(now_s)]
        await asyncio.gather(*(self._tend(run) for run in due))

    async def run_forever(self) -> None:
        """Call :meth:`tick` every ``poll_s``; a run whose store hangs delays no other."""
        tending: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                await self._discover()
                now_s = self._ambient.clock()
                tending = {name: task for name, task in tending.items() if not task.done()}
                for name, (run, _) in list(self._runs.items()):
                    if name not in tending and run.due(now_s):
                        tending[name] = asyncio.create_task(self._tend(run), name=f"tend {name}")
                await self._ambient.sleep(self._settings.poll_s)
        finally:
            for task in tending.values():
                task.cancel()
            await asyncio.gather(*tending.values(), return_exceptions=True)

    async def _discover(self) -> None:
        """Find runs that a stopped coordinator left behind."""
        now_s = self._ambient.clock()
        if now_s - self._listed_s < self._settings.idle_poll_s:
            return
        self._listed_s = now_s
        try:
            for name in await self.listed():
                self.get(name)
        except (CoordinatorError, WeightStoreError) as error:
            self._listed_s = now_s - self._settings.idle_poll_s + _LIST_AGAIN_S
            self._complain("", f"cannot list the runs: {error}")

    async def _tend(self, run: Run) -> None:
        try:
            await run.tend()
        except UnknownRun:
            if run.idle:
                self._runs.pop(run.name, None)
        except (CoordinatorError, WeightStoreError) as error:
            self._complain(run.name, f"run {run.name} waits: {error}")
        else:
            if self._failing.get(run.name):
                logger.info("run %s goes on", run.name)
                self._failing.put(run.name, "")

    def _complain(self, name: str, sentence: str) -> None:
        """Log a trouble when it begins or changes, not every second."""
        if self._failing.get(name) != sentence:
            logger.warning("%s", sentence)
            self._failing.put(name, sentence)

"""The loop of a rollout agent: wait for an announcement, catch up, hand over to the engine, report; for ever.

The coordinator only makes it quicker: its long poll is a hint, the bucket's head is the truth, and a heartbeat that is
lost costs nothing. Whatever fails, the agent keeps what it has and tries again with growing, jittered pauses.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from coordinator.client import CoordinatorClient
from coordinator.errors import CoordinatorError
from coordinator.wire import AgentReport, ReplicaState
from rollout_agent.announcing import Announcements
from rollout_agent.engine import Engine, Staged
from rollout_agent.errors import EngineAbsent, EngineLoading, EngineRefused, EngineSilent, RolloutError, RunError
from rollout_agent.refusal import Refusal, times_refused
from rollout_agent.replica import Replica
from weight_store.errors import ObjectNotFound, WeightStoreError
from weight_store.keys import head_key
from weight_store.position import Position

_LOG = logging.getLogger(__name__)

_TTL_S = 30.0
_MAX_ERROR = 1000


@dataclass(frozen=True, slots=True)
class Pace:
    """How often things are done, in seconds. Pauses are drawn from half to all of their length."""

    poll_s: float = 1.0
    first_retry_s: float = 0.5
    longest_retry_s: float = 30.0
    first_save_retry_s: float = 5.0
    longest_save_retry_s: float = 600.0
    first_tell_again_s: float = 1.0
    longest_tell_again_s: float = 60.0
    heartbeat_s: float = _TTL_S / 3
    watch_s: float = 1.0
    """Between two looks at whether somebody touched the files."""
    scrub_s: float = 0.0
    """In which every group is hashed once, one at a time, evenly spread; longer if it takes more than
    ``scrub_bytes_per_s``; 0: never."""
    scrub_bytes_per_s: float = 50e6

    def retry_s(self, failures: int, draw: float) -> float:
        """Pause after ``failures`` failures in a row; ``draw`` in [0, 1)."""
        return _growing(self.first_retry_s, self.longest_retry_s, failures) * (0.5 + draw / 2)

    def save_retry_s(self, failures: int, draw: float) -> float:
        """The same for checkpoints, each of which may write the whole model."""
        return _growing(self.first_save_retry_s, self.longest_save_retry_s, failures) * (0.5 + draw / 2)

    def tell_again_s(self, refusals: int, took_s: float, draw: float) -> float:
        """Pause after ``refusals`` of one version; at least as long as the last one took, which held others up."""
        return max(took_s, _growing(self.first_tell_again_s, self.longest_tell_again_s, refusals) * (0.5 + draw / 2))

    def scrub_pause_s(self, hashed_bytes: int, total_bytes: int) -> float:
        """Pause after hashing ``hashed_bytes`` of ``total_bytes`` (0: there is nothing to hash yet)."""
        if not hashed_bytes:
            return self.longest_retry_s
        return max(hashed_bytes / self.scrub_bytes_per_s, self.scrub_s * hashed_bytes / max(1, total_bytes))

    def wait_s(self, draw: float) -> float:
        """Pause between two looks at the head."""
        return self.poll_s * (0.5 + draw / 2)


def _growing(first_s: float, longest_s: float, failures: int) -> float:
    return float(min(longest_s, first_s * 2.0 ** min(failures - 1, 30)))


@dataclass(frozen=True, slots=True)
class Ambient:
    """Time and chance, so that a simulation can supply its own."""

    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    draw: Callable[[], float] = random.random


@dataclass(frozen=True, slots=True)
class Status:
    """What the agent would say about itself."""

    state: ReplicaState = "starting"
    staged: Position | None = None
    serving: Position | None = None
    error: str = ""
    unsaved: str = ""
    """Why there is no new checkpoint; versions are followed all the same."""
    apply_s: float = 0.0


@dataclass
class Agent:
    """Keeps ``replica`` on its run's head and ``engine`` on the replica. ``client`` None: follow the bucket alone."""

    replica: Replica
    run: str
    region: str
    agent_id: str
    client: CoordinatorClient | None = None
    engine: Engine | None = None
    pace: Pace = Pace()
    ambient: Ambient = Ambient()
    status: Status = Status()
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _stepped: asyncio.Event = field(default_factory=asyncio.Event)
    _untold: asyncio.Event = field(default_factory=asyncio.Event)
    _refused: Refusal | None = None
    _noted: set[str] = field(default_factory=set)
    _upsets: int = 0
    """Those of the replica's upsets that are known here: an engine that refused a version before may take it now."""
    _handing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while an engine is told of a version: it may be loading straight from the files."""

    async def follow(self) -> None:
        """Follow for ever; cancel to stop. Raises only ``RunError``: what no waiting can put right."""
        work = [self._report_for_ever(), self._save_for_ever(), self._watch_for_ever(), self._tell_for_ever()]
        if self.pace.scrub_s:
            work.append(self._scrub_for_ever())
        beside = [asyncio.create_task(item) for item in work]
        announcements = self._announcements()
        failures = 0
        try:
            while True:
                for task in beside:
                    if task.done():
                        task.result()  # a defect there ends the agent, as one here does
                try:
                    await self.step()
                    failures = 0
                    await self._announced(announcements)
                except RunError:
                    raise
                except EngineLoading as waits:
                    _LOG.info("%s", waits)
                except (RolloutError, WeightStoreError) as error:
                    if isinstance(error, ObjectNotFound) and error.key == head_key(self.run):
                        self._wait_for(f"run {self.run!r} is not in the bucket yet")
                        await self._pause()
                        continue
                    failures += 1
                    pause_s = self.pace.retry_s(failures, self.ambient.draw())
                    _LOG.warning("%s; trying again in %.1f s", error, pause_s)
                    self._say(state="failed", error=str(error))
                    await self.ambient.sleep(pause_s)
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            if announcements is not None:
                await announcements.close()

    async def step(self) -> None:
        """Catch up once and hand over; what is due to be checkpointed is left to :meth:`follow`."""
        await self._ask_again()
        before, start_s = self.replica.position, self.ambient.clock()
        if before is None:
            self._say(state="fetching")
        position = await self.replica.catch_up()
        if position is None:
            self._wait_for(f"run {self.run!r} has no version yet")
            return
        if position != before:
            apply_s = self.ambient.clock() - start_s
            _LOG.info("version %d (step %s) staged in %.2f s", position.version, self.replica.step, apply_s)
            self._say(state="staged", staged=position, error="", apply_s=apply_s)
        try:
            async with self._handing:
                await self._hand_over(position)
        finally:
            self._stepped.set()

    async def _ask_again(self) -> None:
        """Get an answer from an engine that owes one, to this agent or an earlier one: it may be reading the files."""
        async with self._handing:
            told, held = self.replica.telling, self.replica.position
            if told is None or held is None:
                return
            if self.engine is None:
                _LOG.warning("an engine was told of version %d and never answered; this agent has none", told.version)
                self.replica.told()
                return
            await self._hand_over(held)

    async def _hand_over(self, position: Position) -> None:
        """Tell the engine, unless it serves this version or refused it just now.

        Raises ``EngineSilent`` if it does not answer.
        """
        if self.engine is not None and self.replica.upsets != self._upsets:
            _LOG.warning("weights were repaired or restored; the engine is asked to load version %d", position.version)
            self._refused = None
        self._upsets = self.replica.upsets
        serving, error = self.replica.serving, ""
        if self.engine is not None and (serving != position or self.replica.telling is not None):
            if not self._refuses(position):
                serving = await self._load(position, self.engine)
            error = self._refused.error if self._refused is not None else ""
        state: ReplicaState = "serving" if serving == position else "staged"
        self._say(state=state, staged=position, serving=serving, error=error)

    async def _load(self, position: Position, engine: Engine) -> Position | None:
        owing = self.replica.telling is not None
        inherit = await self.replica.tells(position)
        staged = Staged(self.run, position.version, self.replica.step or 0, Path(self.replica.model_dir), inherit)
        former, self._refused = self._refused, None
        start_s = self.ambient.clock()
        try:
            await engine.load(staged)
        except EngineSilent as error:
            raise EngineSilent(f"version {position.version} stays until its engine answers: {error}") from None
        except EngineRefused as error:
            if owing and not isinstance(error, EngineAbsent):
                # Perhaps because it is loading: what it was told before has no answer yet.
                why = f"version {position.version} stays until its engine confirms it or ends"
                raise EngineSilent(f"{why}; told again it said: {error}") from None
            times, now_s = times_refused(former, position), self.ambient.clock()
            pause_s = self.pace.tell_again_s(times, now_s - start_s, self.ambient.draw())
            _LOG.warning("version %d stays staged: %s; telling again in %.1f s", position.version, error, pause_s)
            self._refused = Refusal(position, str(error), times, now_s + pause_s)
        else:
            self._confirm(position)
        self.replica.told()
        return self.replica.serving

    def _refuses(self, position: Position) -> bool:
        """Whether the engine has just refused ``position``."""
        found = self._refused
        return found is not None and found.position == position and found.stands(self.ambient.clock())

    def _confirm(self, position: Position) -> None:
        if self.replica.upsets != self._upsets or self.replica.position != position:
            _LOG.warning("weights were repaired while the engine loaded version %d", position.version)
            return
        self.replica.confirm(position)
        _LOG.info("version %d is serving", position.version)

    async def _announced(self, announcements: Announcements | None) -> None:
        """Return when the head may have moved: told by the coordinator, or after a while."""
        held = self.replica.position
        if announcements is None or held is None:
            await self._pause()
        else:
            await announcements.wait(held)

    def _announcements(self) -> Announcements | None:
        if self.client is None:
            return None
        sleep, heard = self.ambient.sleep, self._noted.clear
        return Announcements(self.client, self.run, pause=self._pause, sleep=sleep, note=self._note, heard=heard)

    async def _pause(self) -> None:
        await self.ambient.sleep(self.pace.wait_s(self.ambient.draw()))

    # ---- checkpoints

    async def _save_for_ever(self) -> None:
        """Make checkpoints as they fall due, beside following, which never waits for one nor for its retries."""
        failures = 0
        while True:
            await self._stepped.wait()
            self._stepped.clear()
            try:
                await self.replica.checkpoint()
            except RolloutError as error:
                failures += 1
                pause_s = self.pace.save_retry_s(failures, self.ambient.draw())
                _LOG.warning("no checkpoint: %s; versions go on; trying again in %.0f s", error, pause_s)
                self._say(unsaved=str(error))
                await self.ambient.sleep(pause_s)
                self._stepped.set()
            else:
                failures = 0
                self._say(unsaved="")

    # ---- files that change by themselves or by other hands

    async def _watch_for_ever(self) -> None:
        """Repair what somebody edited before an engine loads it."""
        failures = 0
        while True:
            pause_s = self.pace.retry_s(failures, self.ambient.draw()) if failures else self.pace.watch_s
            await self.ambient.sleep(max(pause_s, self.pace.watch_s))
            try:
                await self._look()
            except (RolloutError, WeightStoreError) as error:
                failures += 1
                _LOG.warning("damage is not repaired yet: %s", error)
                self._say(state="failed", error=str(error))
            else:
                failures = 0

    async def _scrub_for_ever(self) -> None:
        """Hash group after group, evenly spread: rot leaves no other trace."""
        number = 0
        while True:
            hashed_bytes = 0
            async with self._handing:
                try:
                    hashed_bytes = await self.replica.scrub(number)
                except RolloutError as error:
                    _LOG.warning("the scrub met: %s", error)
            number += 1
            await self.ambient.sleep(self.pace.scrub_pause_s(hashed_bytes, self.replica.nbytes))

    async def _look(self) -> None:
        if self._handing.locked():
            # The engine may be reading the files as they are; only if it waits for a repair it gets one now: because it
            # found them wrong, or because somebody removed what would let it in.
            if self.replica.position is None or await self.replica.doubted():
                await self.replica.check()
            return
        async with self._handing:
            await self.replica.check()
        position = self.replica.position
        if position is not None and self._is_untold(position):
            self._untold.set()

    async def _tell_for_ever(self) -> None:
        """Tell the engine of a version that it does not serve, where following is not the cause.

        In a task of its own: following may wait for the store, and looking goes on while the engine loads.
        """
        while True:
            await self._untold.wait()
            self._untold.clear()
            async with self._handing:
                position = self.replica.position
                try:
                    if position is not None and self._is_untold(position):
                        await self._hand_over(position)
                except RolloutError as error:
                    _LOG.warning("the engine is not told yet: %s", error)
                    self._say(error=str(error))

    def _is_untold(self, position: Position) -> bool:
        """Whether the engine should load ``position``, which it does not serve and has not just refused as it is."""
        if self.engine is None or self.replica.serving == position or self.replica.telling is not None:
            return False  # one that owes an answer is asked again before the next version is
        return self.replica.upsets != self._upsets or not self._refuses(position)

    # ---- reports

    def _wait_for(self, why: str) -> None:
        if why != self.status.error:
            _LOG.info("%s: waiting for it", why)
        self._say(state="starting", error=why)

    def _say(self, **changes: object) -> None:
        status = replace(self.status, **changes)  # type: ignore[arg-type]
        if status != self.status:
            self.status = status
            self._changed.set()

    async def _report_for_ever(self) -> None:
        while True:
            self._changed.clear()
            await self._report()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.pace.heartbeat_s):
                    await self._changed.wait()

    async def _report(self) -> None:
        if self.client is None or self.replica.run_id is None:
            return
        report = AgentReport(
            run_id=self.replica.run_id,
            state=self.status.state,
            staged=self.status.staged,
            serving=self.status.serving,
            error=(self.status.error or self.replica.waits or self.status.unsaved)[:_MAX_ERROR],
            fetched_bytes=self.replica.fetched_bytes,
            apply_s=self.status.apply_s,
            ttl_s=_TTL_S,
        )
        try:
            await self.client.heartbeat(self.run, self.region, self.agent_id, report)
        except CoordinatorError as error:
            self._note(error)

    def _note(self, error: CoordinatorError) -> None:
        """Say once what is wrong with the coordinator, until it answers; following the bucket goes on without it."""
        if error.code not in self._noted:
            self._noted.add(error.code)
            _LOG.warning("%s; following the bucket alone", error)

"""One run: carries decisions out against the bucket and remembers only what the bucket can tell again.

The loop is always the same: read a view, ask a pure decision, write its step, ask again with what the bucket says
then. A lock keeps the requests of one process from racing each other; safety does not depend on it, since another
coordinator may act at any moment.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from coordinator import decisions
from coordinator.ambient import Ambient, Settings
from coordinator.bucket import RunBucket
from coordinator.cache import Recent
from coordinator.decisions import (
    CreateOpen,
    Done,
    Evidence,
    Reread,
    Step,
    View,
)
from coordinator.errors import BadRequest, ReceiptMissing, TooBusy, UnknownRun
from coordinator.fleet import Fleet
from coordinator.gathering import gather_receipts, gather_signs
from coordinator.layouts import Collecting, check_layout
from coordinator.telling import told
from coordinator.tray import Tray
from coordinator.waking import Broadcast, Shared
from coordinator.wire import OfTerm, OpenRequest, ProgressReport, ReceiptReport, WithdrawalReport
from weight_store.errors import FormatError, ObjectNotFound, PreconditionFailed, StoreUnavailable
from weight_store.head import Head
from weight_store.layout import Layout
from weight_store.store import Store
from weight_store.version import Withdrawal

logger = logging.getLogger(__name__)

_ROUNDS = 20
"""Reading and writing anew this often without an end means that others write all the time, or no write is answered."""
_ACTIVE_S = 30.0
"""A run that somebody asked about this recently is looked at every ``poll_s``."""
_AT_REST_S = 3600.0
"""What is large of a run that nobody asked about for so long is forgotten: there may be many of them, for months."""


@dataclass(frozen=True, slots=True)
class Times:
    """What this coordinator saw of one version, for people (monotonic seconds, and durations)."""

    opened_s: float | None = None
    sealed_s: float | None = None
    encode_s: float = 0.0
    upload_s: float = 0.0


class Run:
    """A run by name. ``changed`` fires when the view moves, ``stirred`` also when an agent or a receipt reports."""

    def __init__(self, name: str, store: Store, ambient: Ambient, settings: Settings) -> None:
        self.name = name
        self.bucket = RunBucket(store, name, ambient)
        self.changed = Broadcast()
        self.stirred = Broadcast()
        self.agents = Fleet(ambient.clock())
        self.view: View | None = None
        self._etag = ""  # of the head in ``view``
        self._ambient = ambient
        self._settings = settings
        self._lock = asyncio.Lock()
        self._shared = Shared(self._read)
        self._times: Recent[int, Times] = Recent(1024)
        self._tray: Tray | None = None
        self._collecting: Recent[tuple[int, int], Collecting] = Recent(4)
        self._approved: Recent[tuple[str, str, int], bool] = Recent(16)
        self._watchers = 0
        self._asked_s = ambient.clock()
        self._tended_s = float("-inf")

    def __repr__(self) -> str:
        return f"Run({self.name!r}, watchers={self._watchers}, agents={len(self.agents)})"

    # Reading

    async def fresh(self) -> View:
        """What the bucket says, read after this call began; ``UnknownRun`` if there is no such run."""
        self._asked_s = self._ambient.clock()
        found = await self._shared()
        if found is None:
            raise UnknownRun(f"there is no run {self.name!r} in this bucket: a trainer creates it when it starts")
        return self.view or found[0]

    async def _read(self) -> tuple[View, str] | None:
        found = await self.bucket.view()
        if found is not None:
            self._observe(*found)
        elif self.view is None:
            self.agents = Fleet()  # whoever follows the run that may begin here will be heard
        return found

    def _observe(self, view: View, etag: str) -> None:
        """Keep the newest view, note when things were first seen, and wake those who wait."""
        known = self.view
        if known is not None and known.head.run_id != view.head.run_id:
            logger.warning("run %s was replaced: %s -> %s", self.name, known.head.run_id, view.head.run_id)
            self._forget()
            known = None
        if known is not None and view.progress <= known.progress:
            if view.progress == known.progress:
                self._etag = etag
            return
        self.view, self._etag = view, etag
        now_s = self._ambient.clock()
        opened, sealed = view.undecided, view.head.position.version
        if opened is not None:
            self._note(opened.version, opened_s=now_s)
            if self._tray is None or self._tray.opened.version != opened.version:
                self._tray = Tray(opened, alive_s=now_s, shared_s=now_s)
        else:
            self._tray = None
        if sealed:
            self._note(sealed, sealed_s=now_s)
        self._wake()

    def _forget(self) -> None:
        self._times, self._tray = Recent(1024), None
        self._collecting, self._approved = Recent(4), Recent(16)
        self.agents = Fleet()

    def _note(self, version: int, *, opened_s: float | None = None, sealed_s: float | None = None) -> None:
        times = self.times(version)
        if times.opened_s is None and opened_s is not None:
            times = replace(times, opened_s=opened_s)
        if times.sealed_s is None and sealed_s is not None:
            times = replace(times, sealed_s=sealed_s)
        self._times.put(version, times)

    def _wake(self) -> None:
        self.changed.notify()
        self.stirred.notify()

    def times(self, version: int) -> Times:
        """What is known about the timing of a version."""
        return self._times.get(version) or Times()

    def waiting_for(self, version: int) -> list[int]:
        """Ranks without a receipt, if ``version`` is undecided."""
        return self._tray.missing() if self._tray and self._tray.opened.version == version else []

    # Waiting

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While inside, the bucket is looked at every ``poll_s`` for changes made elsewhere."""
        self._watchers += 1
        try:
            yield
        finally:
            self._watchers -= 1
            self._asked_s = self._ambient.clock()

    async def wait_for(self, ready: Callable[[View], bool], timeout_s: float) -> View:
        """Return the first view for which ``ready``, or the newest one after ``timeout_s``."""
        deadline_s = self._ambient.clock() + timeout_s
        with self.watched():
            view = await self.fresh()
            while not ready(view) and not self.changed.closed:
                left_s = deadline_s - self._ambient.clock()
                if left_s <= 0:
                    break
                await self.changed.wait(left_s)
                view = self.view or view
        return view

    # Deciding

    async def take_over(self, launch: str, expected_term: int | None = None) -> Head:
        """Make ``launch`` the owner of the run, creating it if need be; idempotent. See ``decisions.take_over``."""
        run_id = self._ambient.run_id()
        async with self._lock:
            found = await self._read()
            for _ in range(_ROUNDS):
                view, nonce = found[0] if found else None, self._ambient.nonce()
                step = decisions.take_over(view, launch, run_id, nonce, expected_term)
                if found and isinstance(step, Done):
                    return found[0].head
                found = await self._write(step, found) or await self._read()
        raise self._too_busy()

    async def open(self, request: OpenRequest) -> int:
        """Return the version of a publication, opening it if need be; idempotent for all ranks.

        A thousand ranks ask at once: they share reads, and only who must write takes the lock.
        """
        found: tuple[View, str] | None = None
        for _ in range(_ROUNDS):
            view = found[0] if found else await self.fresh()
            step, found = decisions.open_version(view, request, self._ambient.nonce()), None
            if isinstance(step, Done):
                return step.version
            async with self._lock:
                if self.view is not view:
                    continue  # something else was seen while we waited for the lock
                seen = (view, self._etag)
                if isinstance(step, CreateOpen):
                    await self._approve(view, request)
                found = await self._write(step, seen)
        raise self._too_busy()

    async def _approve(self, view: View, request: OpenRequest) -> None:
        before = view.current.layout if view.current else ""
        key = (before, request.layout, request.world_size)
        if not self._approved.get(key):
            await check_layout(self.bucket, view.current, request.layout, request.world_size)
            self._approved.put(key, True)

    async def receive(self, version: int, rank: int, report: ReceiptReport) -> None:
        """Take note that a receipt is in the bucket; decide the version if it was the last one."""
        tray = await self._find_tray(version, rank, report)
        times = self.times(version)
        encode_s, upload_s = max(times.encode_s, report.encode_s), max(times.upload_s, report.upload_s)
        self._times.put(version, replace(times, encode_s=encode_s, upload_s=upload_s))
        if tray is None:
            return
        last = tray.missing() == [rank]
        reading = [self.fresh()] if last else []  # the decision needs one: side by side
        await asyncio.gather(self._probe(tray, [rank], report.sha256), *reading)
        if rank not in tray.receipts:
            raise ReceiptMissing(
                f"the receipt of rank {rank} at version {version} is not in the bucket: write it, then report it"
            )
        if not tray.missing():
            await self.settle(probe=False, seen=(self.view, self._etag) if last and self.view else None)

    async def note_progress(self, version: int, rank: int, report: ProgressReport) -> None:
        """Take note that a rank still works on ``version``; now and then tell other coordinators by the bucket."""
        tray = await self._find_tray(version, rank, report)
        if tray is None or rank in tray.receipts:
            return
        if tray.note_sign(self._ambient.clock(), self._settings.expire_after_s):
            await self._look_for_signs(tray)  # the next number: one that exists would tell nobody anything
            number = tray.shared_n
            await self.bucket.write_sign(version, number)
            tray.shared_n = max(tray.shared_n, number + 1)

    async def withdraw(self, version: int, rank: int, report: WithdrawalReport) -> None:
        """Give an undecided version up for a rank that cannot send its shard, unless its receipt is there after all."""
        tray = await self._find_tray(version, rank, report)
        if tray is None:
            return
        await self._probe(tray, [rank])
        if rank not in tray.receipts:
            tray.withdrawals.setdefault(rank, Withdrawal(report.code, report.sentence))
            await self.settle(probe=False)

    async def _find_tray(self, version: int, rank: int, report: OfTerm) -> Tray | None:
        """The tray of ``version`` if it is undecided. ``Fenced``, ``UnknownTerm``, ``WrongRun`` or ``BadRequest``."""
        view = self.view
        if view is None or view.undecided is None or view.slot.version != version or _is_of_another(view, report):
            view = await self.fresh()
        decisions.check_term(view.head, report.term, report.run_id)
        tray = self._tray
        if tray is None or tray.opened.version != version:
            return None
        if rank >= tray.opened.world_size:
            raise BadRequest(f"rank {rank} is outside the world of {tray.opened.world_size} of version {version}")
        return tray

    async def _look_for_signs(self, tray: Tray) -> None:
        if await gather_signs(self.bucket, tray):
            tray.alive_s = self._ambient.clock()

    async def _probe(self, tray: Tray, ranks: list[int], reported: str = "") -> None:
        if await gather_receipts(self.bucket, tray, ranks, reported):
            tray.alive_s = self._ambient.clock()
            self.stirred.notify()

    async def settle(self, *, probe: bool = True, seen: tuple[View, str] | None = None) -> View:
        """Decide what can be decided and finish the head's move; with ``probe`` look for receipts not reported.

        ``seen``: a view that was read just now, and its head's ETag.
        """
        async with self._lock:
            found = seen or await self._read_existing()
            for _ in range(_ROUNDS):
                view = found[0]
                evidence = await self._evidence(view, probe)
                nonce = self._ambient.nonce()
                if evidence.layout is None:
                    step = decisions.settle(view, evidence, nonce)
                else:  # sealing parses and hashes every receipt
                    step = await self._ambient.offload(decisions.settle, view, evidence, nonce)
                if isinstance(step, Done):
                    return view
                found = await self._write(step, found) or await self._read_existing()
        raise self._too_busy()

    async def _evidence(self, view: View, probe: bool) -> Evidence:
        opened, tray = view.undecided, self._tray
        if opened is None or tray is None or tray.opened != opened:
            return Evidence()
        expire_after_s = self._settings.expire_after_s
        if probe and opened.term == view.head.term:
            # Before a version expires every rank gets a last look.
            last = self._ambient.clock() - tray.alive_s >= expire_after_s
            await self._probe(tray, tray.to_probe(opened.world_size if last else self._settings.max_probes))
            if last and tray.missing():
                await self._look_for_signs(tray)
        quiet_s = self._ambient.clock() - tray.alive_s
        layout: Layout | None = None
        trouble = ""
        if not tray.missing():
            try:
                layout = await self.bucket.layout(opened.layout)
            except (FormatError, ObjectNotFound) as error:  # for good, as far as we can tell: until it expires
                trouble = f"the layout cannot be read: {error}"
        return Evidence(dict(tray.receipts), dict(tray.withdrawals), layout, trouble, quiet_s, expire_after_s)

    async def _read_existing(self) -> tuple[View, str]:
        found = await self._read()
        if found is None:
            raise UnknownRun(f"there is no run {self.name!r} in this bucket: a trainer creates it when it starts")
        return found

    async def _write(self, step: Step, found: tuple[View, str] | None) -> tuple[View, str] | None:
        """Write, and return what the bucket says then if the store acknowledged it; None if only a reading tells."""
        if isinstance(step, Done | Reread):
            return None
        try:
            etag, position = await self.bucket.write(step, found[1] if found else "")
        except PreconditionFailed:
            logger.info("run %s: somebody else wrote first (%s)", self.name, type(step).__name__)
            return None
        except StoreUnavailable as error:
            logger.warning("run %s: no answer to %s, reading back: %s", self.name, type(step).__name__, error)
            return None
        logger.info("run %s: %s", self.name, told(step))
        view = decisions.after(found[0], step, position) if found else None
        if view is None:
            return None
        self._observe(view, etag)
        return view, etag

    def _too_busy(self) -> TooBusy:
        return TooBusy(
            f"run {self.name}: {_ROUNDS} attempts to write were overtaken by others or got no answer; try again later"
        )

    # Layouts

    async def collecting(self, term: int, world_size: int) -> Collecting:
        """The offers of a term; ``Fenced`` or ``UnknownTerm`` if it is not the run's."""
        view = await self.fresh()
        decisions.check_term(view.head, term)
        known = self._collecting.get((term, world_size))
        return known or self._collecting.put(
            (term, world_size), Collecting(self.bucket, view, term, world_size, self._ambient)
        )

    # Tending

    def close(self) -> None:
        """Wake all who wait, and let nobody wait from now on."""
        self.changed.close()
        self.stirred.close()

    @property
    def idle(self) -> bool:
        """True if nobody waits for the run and none was found in the bucket."""
        return self.view is None and self._watchers == 0 and not self._lock.locked()

    def due(self, now_s: float) -> bool:
        """Whether :meth:`tend` should look at the bucket now."""
        undecided = self.view is not None and self.view.slot.opened is not None
        busy = undecided or self._watchers > 0 or now_s - self._asked_s < _ACTIVE_S
        return busy or now_s - self._tended_s >= self._settings.idle_poll_s

    async def tend(self) -> None:
        """Do for the run what nobody may ask for any more: decide, expire, finish the head, forget dead agents."""
        self._tended_s = self._ambient.clock()
        if self.agents.drop_dead(self._tended_s):
            self.stirred.notify()
        await self.settle()
        if not self._watchers and self._tended_s - self._asked_s >= _AT_REST_S:
            self.bucket.forget_layouts()
            self._collecting = Recent(4)


def _is_of_another(view: View, report: OfTerm) -> bool:
    return report.run_id not in (None, view.head.run_id)

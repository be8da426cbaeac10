"""Carries one publication through the table of session.py: asks, rebuilds, sends, waits, and tells how it ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from coordinator import errors as remote
from coordinator.wire import OpenRequest, ProgressReport, ReceiptReport, VersionAnswer
from trainer_agent.decisions import is_skipped, is_superseded, settled
from trainer_agent.errors import PublicationFailed
from trainer_agent.messages import BaseRebuilt, Failed, Opened, Sealed
from trainer_agent.patience import EXPECTED, TRANSIENT
from trainer_agent.rebuilding import earlier_fulls, rebuild_base
from trainer_agent.session import (
    FINAL,
    UNWANTED,
    Interrupted,
    Observed,
    Phase,
    Progress,
    Rebuilt,
    Refused,
    Sent,
    SessionEvent,
    advance,
)
from trainer_agent.shard import SentShard, envelope_of, find_receipt, send_shard
from trainer_agent.signs import Decided, giving_signs
from trainer_agent.state import Waiting
from trainer_agent.withdrawing import withdraw
from weight_store.errors import ObjectNotFound, PreconditionFailed, StoreRefused, WeightStoreError
from weight_store.position import Position
from weight_store.receipt import FullRef
from weight_store.records import sha256_hex

if TYPE_CHECKING:
    from trainer_agent.worker import Worker

T = TypeVar("T")

_log = logging.getLogger(__name__)

_NAMED_GROUPS = 3
DECISION_WAIT_S = 20.0
"""How long one long poll for the decision lasts: less than what proxies cut after."""


@dataclass(slots=True)
class Publication:
    """One publication of one rank. ``resumed``: an earlier sidecar may have sent it already."""

    worker: Worker
    progress: Progress
    waiting: Waiting
    resumed: bool
    sent: SentShard | None = None
    receipt_sha256: str = ""
    sent_at_s: float = 0.0
    failures: int = 0
    reported: bool = field(default=False, init=False)

    async def carry_through(self) -> None:
        """Act and advance until the publication is decided; then tell the trainer."""
        self.worker.movement.begin()
        while self.progress.phase not in FINAL:
            event = await self._act()
            known = self.progress.version
            self.progress = advance(self.progress, event)
            if known is None and self.progress.version is not None:
                self.worker.emit(Opened(ordinal=self.progress.ordinal, version=self.progress.version))
        if self.progress.phase is Phase.SEALED:
            await self._finish()
        elif self.progress.failure is not None:
            failure = self.progress.failure
            _log.warning("step %d is not published: %s", self.progress.step, failure.message)
            self.worker.emit(Failed(ordinal=self.progress.ordinal, code=failure.code, message=failure.message))

    async def _act(self) -> SessionEvent:
        actions = {
            Phase.OPENING: self._open,
            Phase.REBUILDING: self._rebuild,
            Phase.SENDING: self._send,
            Phase.AWAITING: self._await_decision,
            Phase.WITHDRAWING: self._withdraw,
        }
        try:
            return self._checked(await actions[self.progress.phase]())
        except Decided:
            return Interrupted()
        except EXPECTED as error:
            return Refused(error.code, str(error))

    def _checked(self, event: SessionEvent) -> SessionEvent:
        """What is said of a version of another run by this name says nothing of ours."""
        if isinstance(event, Observed) and event.answer.run_id != self.worker.run_id:
            raise remote.WrongRun(self.worker.another_run)
        return event

    @property
    def _answer(self) -> VersionAnswer:
        if self.progress.answer is None:
            raise PublicationFailed("the version is not known yet")
        return self.progress.answer

    async def _withdraw(self) -> SessionEvent:
        version, failure = self.progress.version, self.progress.failure
        if version is None or failure is None:
            raise PublicationFailed("there is nothing to withdraw from")
        _log.error("this rank cannot send its shard of version %d: %s", version, failure.message)
        return await withdraw(self.worker, version, failure)

    # -- opening --

    async def _open(self) -> SessionEvent:
        worker, progress = self.worker, self.progress
        if progress.version is not None:
            return await self._observe(progress.version)
        return Observed(await worker.patience(f"opening step {progress.step}", self._ask_version))

    async def _ask_version(self) -> VersionAnswer:
        worker, progress = self.worker, self.progress
        request = OpenRequest(
            term=worker.term,
            run_id=worker.run_id,
            step=progress.step,
            ordinal=progress.ordinal,
            layout=worker.layout_sha256,
            world_size=worker.config.world_size,
        )
        while True:
            try:
                return await worker.coordinator.open_version(worker.config.run, request)
            except remote.VersionUndecided:
                if not await self._wait_for_undecided():
                    raise

    async def _wait_for_undecided(self) -> bool:
        """Wait for the decision of the version that is in the way; False if there is none (any more)."""
        worker, progress = self.worker, self.progress
        run, coordinator = worker.config.run, worker.coordinator
        version = (await coordinator.run(run)).undecided
        if version is None:
            return False
        undecided = await coordinator.version(run, version)
        if undecided.state == "undecided":
            if is_superseded(undecided, worker.term, progress.ordinal):
                raise PublicationFailed(
                    f"it came too late: the other ranks already publish step {undecided.step} as version {version}"
                )
            if is_skipped(undecided, worker.term, progress.ordinal, worker.config.rank):
                sentence = f"it gave step {undecided.step} up and has gone on to step {progress.step}"
                await withdraw(worker, version, Refused(PublicationFailed.code, sentence))
        await coordinator.version(run, version, wait_s=DECISION_WAIT_S)
        return True

    async def _observe(self, version: int, wait_s: float = 0) -> Observed:
        run, coordinator = self.worker.config.run, self.worker.coordinator
        what = f"version {version}"
        return Observed(await self.worker.patience(what, lambda: coordinator.version(run, version, wait_s=wait_s)))

    # -- base and shard --

    async def _rebuild(self) -> SessionEvent:
        worker, parent = self.worker, self._answer.parent
        slot = 1 - self.progress.slot
        if worker.full_slot == slot:
            await worker.drop_full()
        try:
            base = await self._signed_for(
                rebuild_base(
                    worker.store,
                    worker.config.run,
                    parent,
                    worker.known_layout,
                    worker.config.rank,
                    worker.slots,
                    slot,
                    worker.movement.applied,
                )
            )
        except TRANSIENT as error:
            return await self._interrupted(f"rebuilding version {parent.version}", error)
        except StoreRefused:
            raise
        except (WeightStoreError, ValueError) as error:
            # The bucket's history is damaged or gone (retention): a full shard needs none of it.
            _log.warning("the base cannot be rebuilt, a full shard is sent instead: %s", error)
            base = None
        fulls = worker.state.fulls
        if base is not None and not fulls:
            fulls = await self._earlier_fulls(parent)
        worker.save(worker.state.model_copy(update={"base": base, "fulls": fulls}))
        worker.emit(BaseRebuilt(base_slot=None if base is None else base.slot))
        return Rebuilt(base)

    async def _earlier_fulls(self, parent: Position) -> tuple[FullRef, ...]:
        worker, config = self.worker, self.worker.config
        sha256, rank = worker.layout_sha256, config.rank
        try:
            return await earlier_fulls(worker.store, config.run, parent, sha256, rank, config.full_every)
        except WeightStoreError as error:
            # Late joiners go on with the full that they have; the next one is not far.
            _log.info("fulls of an earlier launch are left alone: %s", error)
            return ()

    async def _send(self) -> SessionEvent:
        try:
            if self.resumed and await self._sent_before():
                return Sent()
            self.sent = await self._signed_for(self._send_shard())
        except (*TRANSIENT, PreconditionFailed) as error:
            return await self._interrupted(f"uploading version {self._answer.version}", error)
        if self.failures:
            self.worker.patience.tell("")
        self.receipt_sha256 = sha256_hex(self.sent.stored)
        self.sent_at_s = self.worker.clock()
        if self.sent.damaged:
            _log.error(
                "the base in shared memory changed by itself, and %d of its groups were sent whole: something wrote to "
                "%s, or its memory is faulty (%s%s)",
                len(self.sent.damaged),
                self.worker.arena.path,
                "; ".join(map(str, self.sent.damaged[:_NAMED_GROUPS])),
                "; …" if len(self.sent.damaged) > _NAMED_GROUPS else "",
            )
        return Sent()

    async def _send_shard(self) -> SentShard:
        worker, progress = self.worker, self.progress
        assets = await worker.own_assets()
        base = progress.base if progress.source == "delta" else None
        return await send_shard(
            worker.store,
            worker.encoder,
            worker.movement.taken(worker.slots.jobs(progress.slot, base, self.waiting)),
            envelope_of(self._answer, worker.config.rank, worker.state.fulls, assets),
            nonce=worker.nonce(),
            clock=worker.clock,
        )

    async def _signed_for(self, work: Coroutine[Any, Any, T]) -> T:
        worker, version = self.worker, self._answer.version
        report = ProgressReport(term=worker.term, run_id=worker.run_id)

        async def sign() -> bool:
            run, rank = worker.config.run, worker.config.rank
            return (await worker.coordinator.report_progress(run, version, rank, report)).state == "undecided"

        return await giving_signs(work, worker.movement, sign, worker.patience.sleep)

    async def _sent_before(self) -> bool:
        worker = self.worker
        try:
            _, stored = await find_receipt(worker.store, worker.config.run, self._answer.version, worker.config.rank)
        except ObjectNotFound:
            return False
        self.receipt_sha256 = sha256_hex(stored)
        self.sent_at_s = worker.clock()
        return True

    async def _interrupted(self, what: str, error: Exception) -> Interrupted:
        self.failures += 1
        await self.worker.patience.pause(what, self.failures, error)
        return Interrupted()

    # -- decision --

    async def _await_decision(self) -> SessionEvent:
        worker, version = self.worker, self._answer.version
        try:
            event = await self._learn(version)
        except remote.CoordinatorError as error:
            if error.code in UNWANTED:
                raise
            # Shard and receipt are in the bucket: once a person has mended what is wrong, the version may be sealed.
            return await self._interrupted(f"version {version}", error)
        if self.failures:
            self.failures = 0
            worker.patience.tell("")
        return event

    async def _learn(self, version: int) -> Observed:
        worker = self.worker
        if self.receipt_sha256 and not self.reported:
            self.reported = True
            try:
                return Observed(await worker.patience(f"receipt of version {version}", self._report))
            except remote.Refused as error:
                # The receipt is in the bucket all the same: what became of the version, it says itself.
                _log.info("receipt of version %d: %s", version, error)
        return await self._observe(version, wait_s=DECISION_WAIT_S)

    async def _report(self) -> VersionAnswer:
        worker, sent = self.worker, self.sent
        report = ReceiptReport(
            term=worker.term,
            run_id=worker.run_id,
            sha256=self.receipt_sha256,
            encode_s=sent.encode_s if sent else 0,
            upload_s=sent.upload_s if sent else 0,
        )
        return await worker.coordinator.report_receipt(
            worker.config.run, self._answer.version, worker.config.rank, report
        )

    async def _finish(self) -> None:
        """The slot becomes the base; first in the state file, so that a restart agrees with what is told here."""
        worker, progress, answer = self.worker, self.progress, self._answer
        seal_s = worker.clock() - self.sent_at_s if self.sent_at_s else 0.0
        digests = await self._sealed_digests()
        if digests is None or answer.position is None:
            worker.save(worker.state.model_copy(update={"base": None}))
        else:
            worker.save(
                settled(worker.state, progress.slot, progress.ordinal, answer.position, digests, answer.full_version)
            )
            await self._consider_full()
        base = worker.state.base
        worker.emit(
            Sealed(
                ordinal=progress.ordinal,
                version=answer.version,
                position=answer.position,
                base_slot=base.slot if base else None,
                full_slot=worker.full_slot,
                changed=answer.changed,
                elements=answer.elements,
                payload_bytes=answer.payload_bytes,
                weight_bytes=answer.weight_bytes,
                encode_s=self.sent.encode_s if self.sent else 0,
                upload_s=self.sent.upload_s if self.sent else 0,
                seal_s=seal_s,
                damaged_groups=len(self.sent.damaged) if self.sent else 0,
            )
        )

    async def _sealed_digests(self) -> str | None:
        """Digests of what was sealed; None if the slot does not hold that (another attempt's receipt counted), or if
        nobody can tell (retention has passed it). Sealed it is all the same.
        """
        worker, sent = self.worker, self.sent
        if sent is not None and sent.ours:
            return sent.receipt.digests
        version, rank = self._answer.version, worker.config.rank
        try:
            receipt, _ = await worker.patience(
                f"receipt of version {version}", lambda: find_receipt(worker.store, worker.config.run, version, rank)
            )
        except WeightStoreError as error:
            _log.warning("the base of the next version is made anew: %s", error)
            return None
        found = await asyncio.to_thread(worker.slots.digests, self.progress.slot)
        return found if found == receipt.digests else None

    async def _consider_full(self) -> None:
        try:
            await self.worker.consider_full()
        except EXPECTED as error:
            _log.warning("no extra full of version %d: %s", self._answer.version, error)

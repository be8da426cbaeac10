"""Mechanisms to switch off, one at a time, each with the faults under which it is needed.

With any of them off the simulation must find a broken promise: a simulation that finds nothing without a mechanism
says nothing about it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import xxhash

from codec import CodecError, decode_group
from coordinator import bucket, decisions
from coordinator.decisions import ReplaceHead, Reread, Step, View
from coordinator.runs import Run
from rollout_agent import changelog, fetching, gate, presence, replaying, updating
from rollout_agent.agent import Agent
from rollout_agent.errors import DamagedObject
from rollout_agent.replica import Replica
from rollout_agent.telling import Telling
from tests.rollout_agent import simdisk
from tests.sim import clocks, collectors, world
from tests.sim.network import Faults
from tests.sim.simulation import Bias
from tests.sim.store import Bucket
from trainer_agent import desk
from trainer_agent.slots import Slots
from weight_store import chain, reading
from weight_store.errors import PreconditionFailed, StoreUnavailable
from weight_store.gc import Collector, plan
from weight_store.gc.plan import Facts, Verdict
from weight_store.head import Head
from weight_store.keys import parse_key
from weight_store.records import MAX_RECORD_BYTES, sha256_hex
from weight_store.retry import RetryingStore
from weight_store.store import Blob, Store
from weight_store.version import Abort


@dataclass(frozen=True)
class Mutation:
    """How to switch a mechanism off (what to put in place of which attribute), where to look then, and the promise that
    breaks: ``finds`` is searched for in the violation, since another one would say nothing about this mechanism.
    """

    patches: tuple[tuple[Any, str, Any], ...]
    bias: Bias
    finds: str

    @contextmanager
    def off(self) -> Iterator[None]:
        """Within the block the mechanism is off."""
        with ExitStack() as stack:
            for owner, name, value in self.patches:
                stack.enter_context(mock.patch.object(owner, name, value))
            yield


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _is_dead_in_any_term(head: Head, slot: decisions.Slot) -> bool:
    return isinstance(slot.decision, Abort)


def _finish_in_any_term(view: View, write_id: str) -> Step | None:
    decision = view.slot.decision
    if decision is None or isinstance(decision, Abort):
        return None if decision is None else Reread()
    return ReplaceHead(view.head.model_copy(update={"position": decision.position, "write_id": write_id}))


async def _take_over_blindly(self: Run, launch: str, expected_term: int | None = None) -> Head:
    """Write and believe it, instead of reading back what became of the write."""
    found = await self._read()
    step = decisions.take_over(
        found[0] if found else None, launch, self._ambient.run_id(), self._ambient.nonce(), expected_term
    )
    if found and not isinstance(step, decisions.CreateHead | ReplaceHead):
        return found[0].head
    await self._write(step, found)
    return step.head


def _plan_from_anything(held: Any, target: Any, position: Any) -> list[chain.Hop]:
    """The newest delta, whatever is held."""
    if held is None or held == position:
        return _PLAN(held, target, position)
    return [chain.Hop(position, "delta", target.payload_bytes)]


_PLAN = chain.plan_chain


def _commit_without_record(self: changelog.LogWriter) -> None:
    self._file.sync()
    self._file.close()


_SYNC = simdisk.SimAppender.sync


def _sync_no_log(self: simdisk.SimAppender) -> None:
    if self.path.suffix != ".log":
        _SYNC(self)


def _scan_without_commit(data: Any) -> changelog.ScannedLog | None:
    return changelog.scan(np.frombuffer(_with_commit(bytes(data)), np.uint8))


def _with_commit(data: bytes) -> bytes:
    """A complete log and the commit that nobody wrote."""
    chained = xxhash.xxh3_128()
    (length,) = changelog._U64.unpack_from(data, 8)
    at = changelog._round_up(16 + length)
    chained.update(data[at : at + 8])
    at, records = at + 8, 0
    while data[at : at + 4] == changelog._GROUP:
        _, _, kind, itemsize, count, _ = changelog._RECORD.unpack_from(data, at)
        start = at + changelog._RECORD.size
        chained.update(data[start : start + 8])
        at, records = start + 8 + changelog._body_bytes(kind, itemsize, count), records + 1
    commit = changelog._COMMIT.pack(changelog._DONE, 0, records, chained.digest())
    return data[:at] + commit + changelog._checksum(commit)


def _decode_unchecked(run: str, receipt: Any, item: Any, payload: bytes, base: Any, take: Any) -> None:
    group = item.group
    try:
        take(group, decode_group(None if item.full else base(group), payload, group.dtype, group.elements))
    except CodecError as error:
        raise DamagedObject(str(error)) from None


@contextmanager
def _no_lock(*_: Any) -> Iterator[None]:
    yield


class _OverwritesDecisions(Bucket):
    def create(self, key: str, data: bytes) -> str:
        self.create_only = not key.endswith("manifest.json")
        return super().create(key, data)


class _IgnoresIfMatch(Bucket):
    def replace(self, key: str, data: bytes, etag: str) -> str:
        return super().replace(key, data, self.get(key).etag)


async def _nothing_at_all(*_: Any) -> None:
    return None


async def _believe_the_refusal(
    self: RetryingStore, key: str, data: bytes, refusal: PreconditionFailed, *, create: bool
) -> str:
    """Also if nothing is there: 409 is not 412."""
    try:
        return await _ETAG_IF_OURS(self, key, data, refusal, create=create)
    except StoreUnavailable:
        raise refusal from None


_ETAG_IF_OURS = RetryingStore._etag_if_ours
_FOLLOW = Replica._follow


async def _follow_by_deltas(self: Replica, head: Head, *, around: bool) -> None:
    """Again from what is held, although deltas of it were gone."""
    await _FOLLOW(self, head, around=False)


_AGED = plan._aged


def _aged_if_an_object(facts: Facts, verdict: Verdict, written_s: float) -> Verdict:
    """What was just begun may be ended."""
    return _AGED(facts, verdict, written_s) if verdict.upload is None else verdict


async def _delete_objects_only(self: Collector, verdict: Verdict) -> None:
    if verdict.upload is None:
        await self._store.delete(verdict.key)


class _ForgetsLayouts(Collector):
    """Deletes layouts too, once no record that is kept names them. See tests/model for how little saves nothing."""

    async def _delete(self, facts: Facts) -> list[Verdict]:
        records = [entry.key for entry in facts.entries if entry.key.endswith(".json")]
        named = b"".join([(await self._store.get(key, max_bytes=1 << 20)).data for key in records])
        verdicts = await super()._delete(facts)
        for entry in facts.entries:
            key = parse_key(entry.key)
            if key.kind == "layout" and key.sha256.encode() not in named:
                await self._store.delete(entry.key)
        return verdicts


_JOBS = Slots.jobs


def _jobs_of_anything(self: Slots, slot: int, base: Any, waiting: Any = None) -> Any:
    return _JOBS(self, slot, base)


async def _read_once(store: Store, key: str, known: Any = (), *, max_bytes: int = MAX_RECORD_BYTES) -> tuple[Blob, str]:
    blob = await store.get(key, max_bytes=max_bytes)
    return blob, sha256_hex(blob.data)


class _Aging(desk._Pending):
    """Held against training is its age, however little of that any step waited."""

    _since_s: float | None = None

    @property  # type: ignore[override]
    def waited_s(self) -> float:
        return desk.time.monotonic() - (self._since_s or 0.0)

    @waited_s.setter
    def waited_s(self, _: float) -> None:
        self._since_s = self._since_s or desk.time.monotonic()


CALM = Faults()

MUTATIONS: Mapping[str, Mutation] = {
    "term check": Mutation(
        (
            (decisions, "check_term", _nothing),
            (decisions, "is_dead", _is_dead_in_any_term),
            (bucket, "is_dead", _is_dead_in_any_term),
            (decisions, "_finish", _finish_in_any_term),
        ),
        Bias(Faults(slow=0.15, late=0.15), ("job_becomes_a_zombie", "coordinator_sleeps", "sidecar_sleeps")),
        "a zombie sealed it",
    ),
    "parent check of the head": Mutation(
        ((world, "Bucket", _IgnoresIfMatch),),
        Bias(Faults(slow=0.15, late=0.15), ("job_becomes_a_zombie", "two_jobs_start", "coordinator_sleeps")),
        "whose parent is|changes its owner",
    ),
    "parent check of a replica": Mutation(
        ((updating, "plan_chain", _plan_from_anything),),
        Bias(CALM, ("agent_crashes", "agent_sleeps")),
        "does not come to rest",
    ),
    "abort register": Mutation(
        ((world, "Bucket", _OverwritesDecisions),),
        Bias(CALM, ("coordinator_sleeps_as_it_decides", "sidecar_sleeps"), long=True),
        "decided twice: (abort, then manifest|manifest, then abort)",
    ),
    "read-back": Mutation(
        ((Run, "take_over", _take_over_blindly),),
        Bias(Faults(slow=0.05), ("two_jobs_start",)),
        "never published|is not what was published|was told that publication",
    ),
    "gate: the mark": Mutation(
        ((presence, "hide", _nothing),),
        Bias(CALM, ("agent_crashes_in_the_middle",)),
        "shows other weights",
    ),
    "gate: the lock": Mutation(
        ((gate, "exclusive", _no_lock),),
        Bias(CALM, ("late_joiner",)),
        "shows (other weights|another config.json)",
    ),
    "files stay for an engine that was told": Mutation(
        ((Telling, "check", _nothing),),
        Bias(Faults(slow=0.03), ("weights_are_edited_as_a_version_comes",), tmpfs=False, watch_s=0.1),
        "shows other weights",
    ),
    "the note that an answer is due": Mutation(
        ((Telling, "recall", _nothing),),
        Bias(CALM, ("agent_crashes",)),
        "shows other weights",
    ),
    "what a step waited for its slot is counted": Mutation(
        ((desk, "_Pending", _Aging),),
        Bias(CALM, ("sidecar_sleeps", "sidecar_dies")),
        "does not come to rest",
    ),
    "commit record": Mutation(
        ((changelog.LogWriter, "commit", _commit_without_record), (replaying, "scan", _scan_without_commit)),
        Bias(CALM, ("agent_crashes_in_the_middle", "agent_crashes")),
        "came back at|shows version .* after",
    ),
    "sync of the commit": Mutation(
        ((simdisk.SimAppender, "sync", _sync_no_log),),
        Bias(CALM, ("agent_crashes",), tmpfs=False),
        "came back at",
    ),
    "digest verification": Mutation(
        ((reading._BlockChecker, "_check", _nothing), (fetching, "_decode", _decode_unchecked)),
        Bias(Faults(wrong_bytes=0.1), ("late_joiner",), early=True),
        "shows other weights",
    ),
    "digests of the copy that waits": Mutation(
        ((Slots, "jobs", _jobs_of_anything),),
        Bias(Faults(slow=0.1), ("arena_rots", "store_is_away")),
        "is not what was published",
    ),
    "afresh after a gap": Mutation(
        ((Replica, "_follow", _follow_by_deltas),),
        Bias(CALM, ("region_falls_behind",), full_every=1),
        "does not come to rest",
    ),
    "signing by the store's time": Mutation(
        ((clocks, "correction_s", lambda _: 0.0),),
        Bias(CALM, ("clock_is_set", "coordinator_restarts")),
        "does not come to rest",
    ),
    "two readings of a coordinator": Mutation(
        ((bucket, "read_agreed", _read_once),),
        Bias(Faults(wrong_bytes=0.1), ("collection_dies",), early=True, long=True),
        "is not the receipt that the manifest names",
    ),
    "a refused create is looked after": Mutation(
        ((RetryingStore, "_etag_if_ours", _believe_the_refusal),),
        Bias(Faults(conflict=0.2), ("late_joiner",), early=True),
        "does not come to rest",
    ),
    "engines look before they load": Mutation(
        ((gate.Visitor, "_is_right", lambda *_: True),),
        Bias(CALM, ("files_are_edited",)),
        "shows (other weights|another)|cannot read the files",
    ),
    "the agent looks for edits": Mutation(
        ((Agent, "_look", _nothing_at_all),),
        Bias(CALM, ("files_are_edited", "weights_rot")),
        "told its engine of version",
    ),
    "uploads of undecided versions stay": Mutation(
        ((plan, "_judge_upload", lambda *_: (True, "unfinished")), (plan, "_aged", _aged_if_an_object)),
        Bias(Faults(slow=0.3), ("sidecar_sleeps", "sidecar_dies"), part_bytes=60),
        "was ended although",
    ),
    "unfinished uploads go": Mutation(
        ((Collector, "_delete_one", _delete_objects_only),),
        Bias(Faults(lost_reply=0.1), ("coordinator_restarts", "sidecar_dies", "agent_sleeps"), part_bytes=60),
        "is never cleaned up",
    ),
    "layouts stay": Mutation(
        ((collectors, "Collector", _ForgetsLayouts),),
        Bias(Faults(slow=0.1), ("collection_sleeps", "job_restarts")),
        "is not there",
    ),
}

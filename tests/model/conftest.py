"""A small world in which every interleaving can be tried: the bucket, coordinators, ranks, and a breadth-first search.

What decides is the real code (``coordinator.decisions`` and ``weight_store.manifest.seal``); only the store and the
loops around it are modelled, and more permissively than they behave:

* The bucket has create-only objects and a head that is replaced by compare-and-set. An object is read at one moment,
  a view at several: the world may move between the reads of head, open and register, and before the write.
* A coordinator is a request being served: take over, open, or settle. It may stop for good at any moment (crash, lost
  request). A lost reply is a write after which nobody waits; a loop that reads again is a new request. So both need
  no state of their own, and a write may come arbitrarily late.
* A rank may write its receipt for any version that was opened, at any time, whatever became of it or its trainer;
  rank 1 may also have encoded against a position that is not the version's parent.
* Any undecided version with a receipt missing may be found expired.

States are tuples of small numbers: each record that occurs is numbered once, and decisions are remembered by number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import pytest

from coordinator import decisions
from coordinator.decisions import (
    CreateHead,
    CreateOpen,
    CreateRegister,
    Done,
    Evidence,
    ReplaceHead,
    Reread,
    Sealing,
    Slot,
    Step,
    View,
)
from coordinator.errors import BucketDamaged, CoordinatorError
from coordinator.wire import OpenRequest
from weight_store.head import Head
from weight_store.layout import Layout
from weight_store.manifest import Manifest
from weight_store.position import GENESIS, Position
from weight_store.receipt import SHARD_MAGIC, Receipt
from weight_store.records import Record, sha256_hex
from weight_store.version import Abort, Open

RANKS = 2
RUN_ID = "00000000-0000-4000-8000-000000000001"
NONCE = "0" * 16
NONE = 0
STRAY = Position(version=0, sha256="f" * 64)
"""What rank 1 encodes against when it is out of step."""
LAYOUT = Layout(
    world_size=RANKS,
    names=("a", "b"),
    dtypes=("BF16",) * 2,
    itemsizes=(2,) * 2,
    shapes=((1,),) * 2,
    piece_tensor=(0, 1),
    piece_offsets=((0,),) * 2,
    piece_sizes=((1,),) * 2,
    group_owner=(0, 1),
    group_start=(0, 1),
)
LAYOUT_SHA256 = sha256_hex(LAYOUT.to_bytes())


class VersionState(NamedTuple):
    """One version number: numbers of its records, 0 where there is none."""

    opened: int = NONE
    register: int = NONE
    receipts: tuple[int, ...] = (NONE,) * RANKS
    aborted_aside: int = NONE  # only where a mutation puts aborts beside the register


class Bucket(NamedTuple):
    head: int
    versions: tuple[VersionState, ...]


class Task(NamedTuple):
    """A request. ``term`` is also the launch that has it; ``ordinal`` counts the publications of a term."""

    kind: str
    term: int = 0
    ordinal: int = 0
    expired: bool = False


class Reading(NamedTuple):
    """A coordinator about to look for an object of ``version`` that was not there when it last could have."""

    task: Task
    head: int
    version: int
    opened: int = NONE


class Writing(NamedTuple):
    """A coordinator about to write; ``head`` is what its compare-and-set expects."""

    step: int
    head: int


Doing = Reading | Writing | None
"""What a coordinator is at: it waits between two accesses to the bucket, or has no request."""

World = tuple[int, tuple[int, ...]]
"""A bucket and what each coordinator is doing, by number and in order: coordinators are interchangeable."""


class Violation(AssertionError):
    """An invariant does not hold; the message has the shortest way there."""


@dataclass(slots=True)
class Numbers:
    """Gives each distinct record a number from 1 on."""

    records: list[Record] = field(default_factory=list)
    known: dict[bytes, int] = field(default_factory=dict)

    def of(self, record: Record) -> int:
        key = record.to_bytes()
        if key not in self.known:
            self.records.append(record)
            self.known[key] = len(self.records)
        return self.known[key]

    def __getitem__(self, number: int) -> Record:
        return self.records[number - 1]


@dataclass(slots=True)
class Mutation:
    """What the modelled store and loop do wrong; the decisions are mutated by patching their module."""

    unconditional_head: bool = False
    overwriting_registers: bool = False
    aborts_aside: bool = False
    trusting_own_write: bool = False


@dataclass(slots=True)
class Model:
    """The transition system. ``publications[i]``: how many publications term ``i + 1`` attempts."""

    publications: tuple[int, ...] = (2, 1)
    versions: int = 3
    coordinators: int = 2
    late_receipts: bool = False
    stray: bool = False
    mutation: Mutation = field(default_factory=Mutation)
    decide: ModuleType = decisions
    numbers: Numbers = field(default_factory=Numbers)
    steps: list[Step] = field(default_factory=list)
    step_numbers: dict[str, int] = field(default_factory=dict)
    memory: dict[tuple[object, ...], object] = field(default_factory=dict)
    buckets: list[Bucket] = field(default_factory=list)
    doings: list[Doing] = field(default_factory=list)

    # The world's moves

    def start(self) -> World:
        bucket = Bucket(NONE, (VersionState(),) * self.versions)
        return self._bucket_number(bucket), (self._doing_number(None),) * self.coordinators

    def moves(self, world: World) -> Iterator[tuple[str, World]]:
        bucket, doing = world
        for label, after, _ in self._once(("ranks", bucket), lambda: self._numbered(bucket, None)):
            yield label, (after, doing)
        for i, at in enumerate(doing):
            if i and at == doing[i - 1]:
                continue
            others = doing[:i] + doing[i + 1 :]
            for label, after, now in self._once((bucket, at), lambda at=at: self._numbered(bucket, at)):
                yield label, (after, tuple(sorted((*others, now))))

    def _numbered(self, bucket: int, doing: int | None) -> list[tuple[str, int, int]]:
        """The moves of one coordinator, or of the ranks if ``doing`` is None; each change of the bucket is checked."""
        before = self.buckets[bucket]
        if doing is None:
            found = [(label, after, None) for label, after in self._ranks(before)]
        else:
            found = list(self._coordinator(before, self.doings[doing]))
        for label, after, _ in found:
            if after != before:
                self._check(label, before, after)
        return [(label, self._bucket_number(after), self._doing_number(now)) for label, after, now in found]

    def _check(self, label: str, before: Bucket, after: Bucket) -> None:
        try:
            check_bucket(self, before, after)
        except Violation as violation:
            raise Violation(f"{violation}: {label}") from None

    def _bucket_number(self, bucket: Bucket) -> int:
        return self._number(self.buckets, bucket)

    def _doing_number(self, doing: Doing) -> int:
        return self._number(self.doings, doing)

    def _number(self, known: list, item: object) -> int:
        def append() -> int:
            known.append(item)
            return len(known) - 1

        return self._once(("number", id(known), item), append)

    def _ranks(self, bucket: Bucket) -> Iterator[tuple[str, Bucket]]:
        for at, state in enumerate(bucket.versions):
            if not state.opened or (state.register and not self.late_receipts):
                continue
            for rank in range(RANKS):
                if state.receipts[rank]:
                    continue
                for number in self._receipts(state.opened, rank):
                    receipts = (*state.receipts[:rank], number, *state.receipts[rank + 1 :])
                    after = _with(bucket, at + 1, state._replace(receipts=receipts))
                    yield f"rank {rank} writes its receipt of version {at + 1}", after

    def _receipts(self, opened: int, rank: int) -> list[int]:
        def make() -> list[int]:
            record = self.numbers[opened]
            assert isinstance(record, Open)
            parents = [record.parent, STRAY] if self.stray and rank == 1 else [record.parent]
            return [self.numbers.of(_receipt(record, rank, parent)) for parent in parents]

        return self._once(("receipts", opened, rank), make)

    def _coordinator(self, bucket: Bucket, doing: Doing) -> Iterator[tuple[str, Bucket, Doing]]:
        if doing is None:
            for task in self._tasks(bucket):
                yield f"{_told(task)}: reads the head", bucket, self._read(bucket, Reading(task, bucket.head, 0))
            return
        yield "a coordinator stops", bucket, None
        if isinstance(doing, Reading):
            yield f"{_told(doing.task)}: finds nothing more", bucket, self._not_there(bucket, doing)
            here = self._read(bucket, doing)
            if here != doing:
                yield f"{_told(doing.task)}: finds what was written meanwhile", bucket, here
        else:
            yield from self._write(bucket, doing)

    def _tasks(self, bucket: Bucket) -> Iterator[Task]:
        """What may be asked now. Launch n comes after launch n - 1; older ones may ask again at any time."""
        term = self._head(bucket.head).term if bucket.head else 0
        for launch in range(1, min(term + 1, len(self.publications)) + 1):
            yield Task("take over", launch)
        if not term:
            return
        yield Task("settle")
        yield Task("settle", expired=True)
        for asking, count in enumerate(self.publications[:term], start=1):
            for ordinal in range(count):
                yield Task("open", asking, ordinal)

    def serve(self, bucket: Bucket, task: Task) -> Bucket:
        """One request by a coordinator that nobody disturbs."""
        doing = self._read(bucket, Reading(task, bucket.head, 0))
        while isinstance(doing, Reading):
            doing = self._not_there(bucket, doing)
        return next(self._write(bucket, doing))[1] if doing else bucket

    # Reading: what is there never changes, so only "not there" depends on when one looks.

    def _read(self, bucket: Bucket, at: Reading) -> Doing:
        if not at.head:
            return self._decide(bucket, at, None)
        if not at.version:
            at = at._replace(version=self._head(at.head).position.version + 1)
        while True:
            state = self._state(bucket, at.version)
            if state is None or not state.opened:
                return at
            if not (state.register or state.aborted_aside):
                return at._replace(opened=state.opened)
            slot = self._slot(at.version, state.opened, state.aborted_aside or state.register)
            if not self._dead(at.head, slot):
                return self._decide(bucket, at, slot)
            at = Reading(at.task, at.head, at.version + 1)

    def _not_there(self, bucket: Bucket, at: Reading) -> Doing:
        return self._decide(bucket, at, self._slot(at.version, at.opened, NONE))

    def _state(self, bucket: Bucket, version: int) -> VersionState | None:
        return bucket.versions[version - 1] if version <= len(bucket.versions) else None

    def _slot(self, version: int, opened: int, register: int) -> Slot:
        def make() -> Slot:
            record = self.numbers[opened] if opened else None
            found = self.numbers[register] if register else None
            decision = Sealing(found, found.position(found.to_bytes())) if isinstance(found, Manifest) else found
            assert record is None or isinstance(record, Open)
            assert decision is None or isinstance(decision, Sealing | Abort)
            return Slot(version, record, decision)

        return self._once(("slot", version, opened, register), make)

    def _dead(self, head: int, slot: Slot) -> bool:
        return self._once(("dead", head, id(slot)), lambda: self.decide.is_dead(self._head(head), slot))

    def _head(self, number: int) -> Head:
        head = self.numbers[number]
        assert isinstance(head, Head)
        return head

    # Deciding and writing

    def _decide(self, bucket: Bucket, at: Reading, slot: Slot | None) -> Writing | None:
        state = self._state(bucket, at.version) if slot else None
        receipts = state.receipts if state and at.task.kind == "settle" else ()
        key = ("decide", at.task, at.head, id(slot), receipts)
        step = self._once(key, lambda: self._ask(bucket, at, slot, receipts))
        return Writing(step, at.head) if step else None

    def _ask(self, bucket: Bucket, at: Reading, slot: Slot | None, receipts: tuple[int, ...]) -> int:
        """The number of the step that the real code asks for; 0 for none."""
        view = None
        if slot is not None:
            head = self._head(at.head)
            view = View(head, self._current(bucket, head), slot)
        try:
            step = self._call(at.task, view, receipts)
        except BucketDamaged as error:
            raise Violation(f"the bucket contradicts itself: {error}") from None
        except CoordinatorError:
            return 0
        if isinstance(step, Done):
            if step.version and slot is not None:
                self._check_answer(at.task, step.version, slot, view)
            return 0
        if isinstance(step, Reread) or (isinstance(step, CreateOpen) and step.opened.version > self.versions):
            return 0
        key = repr(step)
        if key not in self.step_numbers:
            self.steps.append(step)
            self.step_numbers[key] = len(self.steps)
        return self.step_numbers[key]

    def _call(self, task: Task, view: View | None, receipts: tuple[int, ...]) -> Step:
        if task.kind == "take over":
            return self.decide.take_over(view, f"launch-{task.term}", RUN_ID, NONCE)
        if view is None:
            return Done()
        if task.kind == "open":
            request = OpenRequest(term=task.term, step=0, ordinal=task.ordinal, layout=LAYOUT_SHA256, world_size=RANKS)
            return self.decide.open_version(view, request, NONCE)
        held = {rank: self.numbers[number] for rank, number in enumerate(receipts) if number}
        evidence = Evidence(
            receipts={rank: (found, found.to_bytes()) for rank, found in held.items() if isinstance(found, Receipt)},
            layout=LAYOUT if len(held) == RANKS else None,
            age_s=1.0 if task.expired else 0.0,
            expire_after_s=1.0,
        )
        return self.decide.settle(view, evidence, NONCE)

    def _current(self, bucket: Bucket, head: Head) -> Manifest | None:
        if head.position == GENESIS:
            return None
        manifest = self.numbers[bucket.versions[head.position.version - 1].register]
        assert isinstance(manifest, Manifest)
        return manifest

    def _check_answer(self, task: Task, version: int, slot: Slot, view: View | None) -> None:
        current = view.current if view else None
        known = slot.opened if slot.version == version else current
        if known is None or (known.version, known.term, known.ordinal) != (version, task.term, task.ordinal):
            raise Violation(f"{_told(task)} was answered with version {version}, which is another publication")

    def _write(self, bucket: Bucket, at: Writing) -> Iterator[tuple[str, Bucket, Doing]]:
        step = self.steps[at.step - 1]
        match step:
            case CreateHead(head):
                after = bucket if bucket.head else bucket._replace(head=self.numbers.of(head))
                yield "creates the head", after, None
            case ReplaceHead(head):
                current = bucket.head == at.head or self.mutation.unconditional_head
                after = bucket._replace(head=self.numbers.of(head)) if current else bucket
                label = f"replaces the head: term {head.term}, position {head.position.version}"
                yield (label if current else "is refused to replace the head"), after, None
            case CreateOpen(opened):
                state = bucket.versions[opened.version - 1]
                after = bucket
                if not state.opened:
                    after = _with(bucket, opened.version, state._replace(opened=self.numbers.of(opened)))
                yield f"opens version {opened.version} in term {opened.term}", after, None
            case CreateRegister(record):
                yield self._register(bucket, record, at)

    def _register(self, bucket: Bucket, record: Manifest | Abort, at: Writing) -> tuple[str, Bucket, Doing]:
        state, number = bucket.versions[record.version - 1], self.numbers.of(_plain(record))
        after, then = state, None
        if isinstance(record, Abort) and self.mutation.aborts_aside:
            after = state._replace(aborted_aside=state.aborted_aside or number)
        elif not state.register or self.mutation.overwriting_registers:
            after = state._replace(register=number)
        if isinstance(record, Manifest) and self.mutation.trusting_own_write:
            head = self._head(at.head)
            moved = head.model_copy(update={"position": record.position(record.to_bytes())})
            self.steps.append(ReplaceHead(moved))
            then = Writing(len(self.steps), at.head)
        if after.register and not self.late_receipts:
            after = after._replace(receipts=(NONE,) * RANKS)  # nobody looks at them any more
        what = "a manifest" if isinstance(record, Manifest) else "an abort"
        return f"writes {what} to register {record.version}", _with(bucket, record.version, after), then

    def _once(self, key: tuple[object, ...], make: Callable[[], object]):
        if key not in self.memory:
            self.memory[key] = make()
        return self.memory[key]


def _with(bucket: Bucket, version: int, state: VersionState) -> Bucket:
    versions = bucket.versions
    return bucket._replace(versions=(*versions[: version - 1], state, *versions[version:]))


def _told(task: Task) -> str:
    if task.kind == "settle":
        return "settle after expiry" if task.expired else "settle"
    return f"{task.kind} {f'publication {task.ordinal} of ' if task.kind == 'open' else 'for '}term {task.term}"


def _plain(record: Manifest | Abort) -> Manifest | Abort:
    """Aborts of one version are alike: reason and sentence are for people."""
    if isinstance(record, Manifest):
        return record
    return record.model_copy(update={"reason": "expired", "detail": "", "missing": ()})


def _receipt(opened: Open, rank: int, parent: Position) -> Receipt:
    return Receipt(
        run_id=RUN_ID,
        version=opened.version,
        rank=rank,
        parent=parent,
        layout=opened.layout,
        nonce=f"{rank:016x}",
        shard_bytes=len(SHARD_MAGIC) + 2,
        sizes=(2,),
        changed=(1,),
        digests="00" * 16,
        full=(0,) if opened.parent == GENESIS else (),
        blocks="00" * 32,
    )


# The search


def check_bucket(model: Model, before: Bucket, after: Bucket) -> None:
    """The invariants, on every change of the bucket. By induction they hold for its whole history."""
    for old, new in zip(before.versions, after.versions, strict=True):
        if (old.opened and new.opened != old.opened) or (old.register and new.register != old.register):
            raise Violation("a version's opening or decision changed")
        if new.aborted_aside and new.register:
            raise Violation("a version was both aborted and decided by a manifest")
        if new.register != old.register:
            _check_manifest(model, new)
    if after.head != before.head and before.head:
        _check_head(model, model._head(before.head), model._head(after.head), after)


def _check_manifest(model: Model, state: VersionState) -> None:
    manifest, opened = model.numbers[state.register], model.numbers[state.opened]
    if not isinstance(manifest, Manifest) or not isinstance(opened, Open):
        return
    if (manifest.parent, manifest.term, manifest.ordinal) != (opened.parent, opened.term, opened.ordinal):
        raise Violation("a manifest does not describe what was opened")
    by_digest = {sha256_hex(record.to_bytes()): record for record in model.numbers.records}
    for ref in manifest.receipts:
        receipt = by_digest[ref.sha256]
        if not isinstance(receipt, Receipt) or receipt.parent != manifest.parent:
            raise Violation("ranks of one manifest encoded against different parents")


def _check_head(model: Model, before: Head, after: Head, bucket: Bucket) -> None:
    if after.term < before.term or after.position.version < before.position.version:
        raise Violation("the head went back")
    if after.launch != f"launch-{after.term}":
        raise Violation("a launch that had lost the run took it back")
    if after.position == before.position:
        return
    if after.term != before.term:
        raise Violation("a takeover moved the position")
    state = bucket.versions[after.position.version - 1]
    manifest = model.numbers[state.register] if state.register else None
    if not isinstance(manifest, Manifest) or manifest.position(manifest.to_bytes()) != after.position:
        raise Violation("the head names a position that its register does not hold")
    if state.aborted_aside:
        raise Violation("the head names an aborted version")
    if manifest.parent != before.position:
        raise Violation("the head jumped: the sealed version before is not reachable from it")
    if manifest.term != after.term:
        raise Violation("a fenced term moved the head after the takeover")
    publication = (manifest.term, manifest.ordinal)
    for earlier in bucket.versions[: after.position.version - 1]:
        other = model.numbers[earlier.register] if earlier.register else None
        sealed = isinstance(other, Manifest) and other.position(other.to_bytes()) in _links(manifest)
        if sealed and isinstance(other, Manifest) and (other.term, other.ordinal) >= publication:
            raise Violation("a publication was sealed twice or out of order")


def _links(manifest: Manifest) -> set[Position]:
    return {link.position for link in manifest.chain}


def explore(model: Model, limit: int = 3_000_000) -> set[World]:
    """Every world that can be reached, in breadth; ``Violation`` with the shortest way to the first wrong one."""
    first = model.start()
    came_from: dict[World, tuple[World, str] | None] = {first: None}
    queue = deque([first])
    while queue:
        world = queue.popleft()
        try:
            for label, after in model.moves(world):
                if after not in came_from:
                    came_from[after] = (world, label)
                    queue.append(after)
        except Violation as violation:
            raise Violation("\n".join([str(violation), *_way(came_from, world)])) from None
        if len(came_from) > limit:
            raise RuntimeError(f"more than {limit} worlds: make the model smaller")
    return set(came_from)


def _way(came_from: dict[World, tuple[World, str] | None], world: World) -> list[str]:
    labels: list[str] = []
    while (step := came_from[world]) is not None:
        world, label = step
        labels.append(label)
    return labels[::-1]


def dead_ends(model: Model, worlds: set[World]) -> list[Bucket]:
    """Buckets from which a new launch and an empty coordinator, undisturbed, cannot get a version sealed."""
    beyond = replace(
        model, versions=model.versions + 2, late_receipts=False, stray=False, steps=[], step_numbers={}, memory={}
    )
    buckets = [model.buckets[bucket] for bucket in {bucket for bucket, _ in worlds}]
    return [bucket for bucket in buckets if not _recovers(beyond, bucket)]


def _recovers(model: Model, bucket: Bucket) -> bool:
    bucket = bucket._replace(versions=bucket.versions + (VersionState(),) * 2)
    term = model._head(bucket.head).term + 1 if bucket.head else 1
    for task in [Task("take over", term)] * 3 + [Task("open", term)] * 4:
        bucket = model.serve(bucket, task)
    for rank in range(RANKS):
        written = [after for label, after in model._ranks(bucket) if label.startswith(f"rank {rank}")]
        bucket = written[0] if written else bucket
    for _ in range(2):
        bucket = model.serve(bucket, Task("settle"))
    head = model._head(bucket.head)
    manifest = model._current(bucket, head)
    return head.term == term and manifest is not None and manifest.term == term


@pytest.fixture(scope="session")
def kit() -> SimpleNamespace:
    """The parts of the model, for the tests beside this file."""
    return SimpleNamespace(Model=Model, Mutation=Mutation, Violation=Violation, explore=explore, dead_ends=dead_ends)

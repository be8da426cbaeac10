"""A small world in which every interleaving can be tried: the bucket, its coordinators and ranks.

What decides is the real code (``coordinator.decisions`` and ``weight_store.manifest.seal``); only the store and the
loops around it are modelled, and more permissively than they behave:

* The bucket has create-only objects and a head that is replaced by compare-and-set. An object is read at one moment,
  a view at several: the world may move between the reads of head, open and register, and before the write.
* A coordinator is a request being served: take over, open, or settle. It may stop for good at any moment (crash, lost
  request), and a write may come arbitrarily late. After one that is acknowledged it goes on with ``decisions.after``.
  A lost reply is a write after which nobody waits; a loop that reads again is a new request. So both need no state of
  their own.
* A rank may write its receipt for any version that was opened, at any time, whatever became of it or its trainer;
  rank 1 may also have encoded against a position that is not the version's parent.
* Any undecided version with a receipt missing may be found expired.

States are tuples of small numbers: each record that occurs is numbered once, and decisions are remembered by number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType

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
from tests.model.state import (
    LAYOUT,
    LAYOUT_SHA256,
    NONCE,
    NONE,
    RANKS,
    RUN_ID,
    STRAY,
    Bucket,
    Doing,
    Mutation,
    Numbers,
    Reading,
    Task,
    VersionState,
    Violation,
    World,
    Writing,
    make_receipt,
    plain,
    told,
    with_version,
)
from weight_store.head import Head
from weight_store.manifest import Manifest
from weight_store.position import GENESIS
from weight_store.receipt import Receipt
from weight_store.version import Abort, Open, Withdrawal, withdrawn

WHY = Withdrawal("code", "sentence")


@dataclass(slots=True)
class Model:
    """The transition system. ``publications[i]``: how many publications term ``i + 1`` attempts. ``check`` is given
    each change of the bucket and raises :class:`Violation`."""

    publications: tuple[int, ...] = (2, 1)
    versions: int = 3
    coordinators: int = 2
    late_receipts: bool = False
    stray: bool = False
    looked: bool = False  # launches say which term they take the run over from
    withdrawing: bool = False  # ranks say that they cannot go on, to a coordinator or in the register
    mutation: Mutation = field(default_factory=Mutation)
    decide: ModuleType = decisions
    check: Callable[[Model, str, Bucket, Bucket], None] = lambda *_: None
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
            found = [(label, after, None) for label, after in self.ranks(before)]
        else:
            found = list(self._coordinator(before, self.doings[doing]))
        for label, after, _ in found:
            if after != before:
                self.check(self, label, before, after)
        return [(label, self._bucket_number(after), self._doing_number(now)) for label, after, now in found]

    def _bucket_number(self, bucket: Bucket) -> int:
        return self._number(self.buckets, bucket)

    def _doing_number(self, doing: Doing) -> int:
        return self._number(self.doings, doing)

    def _number(self, known: list, item: object) -> int:
        def append() -> int:
            known.append(item)
            return len(known) - 1

        return self._once(("number", id(known), item), append)

    def ranks(self, bucket: Bucket) -> Iterator[tuple[str, Bucket]]:
        for at, state in enumerate(bucket.versions):
            if not state.opened or (state.register and not self.late_receipts):
                continue
            if self.withdrawing and not state.register:
                yield from self._withdraw(bucket, at + 1, state)
            for rank in range(RANKS):
                if state.receipts[rank]:
                    continue
                for number in self._receipts(state.opened, rank):
                    receipts = (*state.receipts[:rank], number, *state.receipts[rank + 1 :])
                    after = with_version(bucket, at + 1, state._replace(receipts=receipts))
                    yield f"rank {rank} writes its receipt of version {at + 1}", after

    def _withdraw(self, bucket: Bucket, version: int, state: VersionState) -> Iterator[tuple[str, Bucket]]:
        """A rank that reaches no coordinator creates the register, whoever has the run by now."""
        record = self.numbers[state.opened]
        assert isinstance(record, Open)
        number = self.numbers.of(plain(withdrawn(record, {0: WHY}, NONCE)))
        after = state._replace(register=number)
        if not self.late_receipts:
            after = after._replace(receipts=(NONE,) * RANKS)
        yield f"a rank writes an abort to register {version}", with_version(bucket, version, after)

    def _receipts(self, opened: int, rank: int) -> list[int]:
        def make() -> list[int]:
            record = self.numbers[opened]
            assert isinstance(record, Open)
            parents = [record.parent, STRAY] if self.stray and rank == 1 else [record.parent]
            return [self.numbers.of(make_receipt(record, rank, parent)) for parent in parents]

        return self._once(("receipts", opened, rank), make)

    def _coordinator(self, bucket: Bucket, doing: Doing) -> Iterator[tuple[str, Bucket, Doing]]:
        if doing is None:
            for task in self._tasks(bucket):
                yield f"{told(task)}: reads the head", bucket, self._read(bucket, Reading(task, bucket.head, 0))
            return
        yield "a coordinator stops", bucket, None
        if isinstance(doing, Reading):
            yield f"{told(doing.task)}: finds nothing more", bucket, self._not_there(bucket, doing)
            here = self._read(bucket, doing)
            if here != doing:
                yield f"{told(doing.task)}: finds what was written meanwhile", bucket, here
        else:
            yield from self._write(bucket, doing)

    def _tasks(self, bucket: Bucket) -> Iterator[Task]:
        """What may be asked now. Launch n comes after launch n - 1; older ones may ask again at any time."""
        term = self.head(bucket.head).term if bucket.head else 0
        for launch in range(1, min(term + 1, len(self.publications)) + 1):
            yield Task("take over", launch)
        if not term:
            return
        yield Task("settle")
        yield Task("settle", expired=True)
        if self.withdrawing:
            yield from (Task("withdraw", ordinal=rank) for rank in range(RANKS))
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
            return self._decide(bucket, at)
        if not at.version:
            at = at._replace(version=self.head(at.head).position.version + 1)
        while True:
            state = self._state(bucket, at.version)
            if state is None or not state.opened:
                return at
            register = state.aborted_aside or state.register
            if not register:
                return at._replace(opened=state.opened)
            if not self._dead(at.head, self._slot(at.version, state.opened, register)):
                return self._decide(bucket, at._replace(opened=state.opened), register)
            opened = self.numbers[state.opened]
            assert isinstance(opened, Open)
            own = opened.term == self.head(at.head).term
            at = Reading(at.task, at.head, at.version + 1, given_up=state.opened if own else at.given_up)

    def _not_there(self, bucket: Bucket, at: Reading) -> Doing:
        return self._decide(bucket, at)

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
        return self._once(("dead", head, id(slot)), lambda: self.decide.is_dead(self.head(head), slot))

    def head(self, number: int) -> Head:
        head = self.numbers[number]
        assert isinstance(head, Head)
        return head

    # Deciding and writing

    def _decide(self, bucket: Bucket, at: Reading, register: int = NONE) -> Writing | None:
        state = self._state(bucket, at.version) if at.head else None
        receipts = state.receipts if state and at.task.kind in {"settle", "withdraw"} else ()
        step = self._once(("decide", at, register, receipts), lambda: self._ask(bucket, at, register, receipts))
        return Writing(step, at, register) if step else None

    def _view(self, bucket: Bucket, at: Reading, register: int) -> View | None:
        if not at.head:
            return None
        head = self.head(at.head)
        given_up = self.numbers[at.given_up] if at.given_up else None
        assert given_up is None or isinstance(given_up, Open)
        return View(head, self.current(bucket, head), self._slot(at.version, at.opened, register), given_up)

    def _ask(self, bucket: Bucket, at: Reading, register: int, receipts: tuple[int, ...]) -> int:
        """The number of the step that the real code asks for; 0 for none."""
        view = self._view(bucket, at, register)
        try:
            step = self._call(at.task, view, receipts)
        except BucketDamaged as error:
            raise Violation(f"the bucket contradicts itself: {error}") from None
        except CoordinatorError:
            return 0
        if isinstance(step, Done):
            if step.version and view is not None:
                self._check_answer(at.task, step.version, view)
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
            return self.decide.take_over(
                view, f"launch-{task.term}", RUN_ID, NONCE, task.term - 1 if self.looked else None
            )
        if view is None:
            return Done()
        if task.kind == "open":
            request = OpenRequest(term=task.term, step=0, ordinal=task.ordinal, layout=LAYOUT_SHA256, world_size=RANKS)
            return self.decide.open_version(view, request, NONCE)
        held = {rank: self.numbers[number] for rank, number in enumerate(receipts) if number}
        evidence = Evidence(
            receipts={rank: (found, found.to_bytes()) for rank, found in held.items() if isinstance(found, Receipt)},
            withdrawals={task.ordinal: WHY} if task.kind == "withdraw" else {},
            layout=LAYOUT if len(held) == RANKS else None,
            quiet_s=1.0 if task.expired else 0.0,
            expire_after_s=1.0,
        )
        return self.decide.settle(view, evidence, NONCE)

    def current(self, bucket: Bucket, head: Head) -> Manifest | None:
        if head.position == GENESIS:
            return None
        manifest = self.numbers[bucket.versions[head.position.version - 1].register]
        assert isinstance(manifest, Manifest)
        return manifest

    def _check_answer(self, task: Task, version: int, view: View) -> None:
        known = view.slot.opened if view.slot.version == version else view.current
        if view.given_up and view.given_up.version == version:
            known = view.given_up
        if known is None or (known.version, known.term, known.ordinal) != (version, task.term, task.ordinal):
            raise Violation(f"{told(task)} was answered with version {version}, which is another publication")

    def _write(self, bucket: Bucket, at: Writing) -> Iterator[tuple[str, Bucket, Doing]]:
        step = self.steps[at.step - 1]
        match step:
            case CreateHead(head):
                after = bucket if bucket.head else bucket._replace(head=self.numbers.of(head))
                yield "creates the head", after, None
            case ReplaceHead(head):
                current = bucket.head == at.at.head or self.mutation.unconditional_head
                after = bucket._replace(head=self.numbers.of(head)) if current else bucket
                label = f"replaces the head: term {head.term}, position {head.position.version}"
                yield from self._answered(label if current else "is refused to replace the head", after, at, current)
            case CreateOpen(opened):
                state = bucket.versions[opened.version - 1]
                after = bucket
                if not state.opened:
                    after = with_version(bucket, opened.version, state._replace(opened=self.numbers.of(opened)))
                label = f"opens version {opened.version} in term {opened.term}"
                yield from self._answered(label, after, at, not state.opened)
            case CreateRegister(record):
                yield from self._register(bucket, record, at)

    def _register(self, bucket: Bucket, record: Manifest | Abort, at: Writing) -> Iterator[tuple[str, Bucket, Doing]]:
        state, number = bucket.versions[record.version - 1], self.numbers.of(plain(record))
        after = state
        if isinstance(record, Abort) and self.mutation.aborts_aside:
            after = state._replace(aborted_aside=state.aborted_aside or number)
        elif not state.register or self.mutation.overwriting_registers:
            after = state._replace(register=number)
        taken = after != state or self.mutation.trusting_own_write
        if after.register and not self.late_receipts:
            after = after._replace(receipts=(NONE,) * RANKS)  # nobody looks at them any more
        what = "a manifest" if isinstance(record, Manifest) else "an abort"
        label = f"writes {what} to register {record.version}"
        yield from self._answered(label, with_version(bucket, record.version, after), at, taken)

    def _answered(self, label: str, bucket: Bucket, at: Writing, taken: bool) -> Iterator[tuple[str, Bucket, Doing]]:
        """What becomes of the coordinator. A refusal, like no answer, makes it read again: another request."""
        if taken and (then := self._go_on(bucket, at)) is not None:
            yield f"{label}, and goes on", bucket, then
        else:
            yield label, bucket, None

    def _go_on(self, bucket: Bucket, done: Writing) -> Doing:
        """With what the real code takes the bucket to say after a write that was acknowledged."""
        step, at = self.steps[done.step - 1], done.at
        before = self._view(bucket, at, done.register)
        manifest = step.record if isinstance(step, CreateRegister) and isinstance(step.record, Manifest) else None
        position = manifest.position(manifest.to_bytes()) if manifest else None
        view = self.decide.after(before, step, position) if before else None
        if view is None:
            return None
        decision = view.slot.decision
        register = self._number_of(decision.manifest if isinstance(decision, Sealing) else decision)
        opened, given_up = self._number_of(view.slot.opened), self._number_of(view.given_up)
        head = self.numbers.of(step.head) if isinstance(step, ReplaceHead) else at.head
        numbers = (self.numbers.of(view.head), opened, register, given_up)
        if self.mutation == Mutation() and not self._is_so(bucket, view, numbers, head):
            raise Violation("a coordinator takes the bucket for something else than its write has made of it")
        return self._decide(bucket, Reading(at.task, head, view.slot.version, opened, given_up), register)

    def _is_so(self, bucket: Bucket, view: View, numbers: tuple[int, ...], head: int) -> bool:
        """Whether a reading with this head would find the same: its opening, register and the newest one given up."""
        given_up = NONE
        for state in bucket.versions[view.head.position.version : view.slot.version - 1]:
            opened = self.numbers[state.opened] if state.opened else None
            given_up = state.opened if isinstance(opened, Open) and opened.term == view.head.term else given_up
        state = self._state(bucket, view.slot.version) or VersionState()
        now = (head, state.opened, state.register, given_up)
        return numbers == now and view.current == self.current(bucket, view.head)

    def _number_of(self, record: Open | Manifest | Abort | None) -> int:
        record = record if record is None or isinstance(record, Open) else plain(record)
        return NONE if record is None else self.numbers.of(record)

    def _once(self, key: tuple[object, ...], make: Callable[[], object]):
        if key not in self.memory:
            self.memory[key] = make()
        return self.memory[key]

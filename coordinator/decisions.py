"""The life of a version as pure functions: from what the bucket says to what is written next. No I/O, no clock.

Three kinds of object carry all state. The *head* moves by compare-and-set; a takeover raises its term, sealing moves
its position. For each version number, *open.json* and the *register* (a manifest or an abort) are created once::

                 open                    all receipts                head: term = mine, position = parent
    (free) ───────────────▶ undecided ───────────────▶ manifest ──────────────────────────────────▶ sealed
                                │                          │
                                │ expired, withdrawn,      │ the head's term is newer
                                │ refused, or opened       ▼
                                │ in an older term      stranded
                                └────────▶ abort

Aborted and stranded numbers are *dead*: nothing can revive them, and the next opening steps over them. Every function
is given one :class:`View` and returns a step to carry out or a :class:`Done`. Whoever carries a step out asks again
with what the bucket says then: with :func:`after` if the store has acknowledged the write, and else, whether it was
refused or got no answer, with a new reading; so a lost reply needs no rule of its own. Views need not be atomic: the
objects are read in the order head, open, register, and a decision made on an older head is refused by the store.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from coordinator import aborts
from coordinator.errors import (
    BucketDamaged,
    Fenced,
    PublicationConflict,
    PublicationPassed,
    UnknownTerm,
    VersionUndecided,
    WrongRun,
)
from coordinator.terms import check_expected, check_not_retired
from coordinator.wire import OpenRequest
from weight_store.errors import FormatError
from weight_store.head import MAX_RETIRED, Head
from weight_store.layout import Layout
from weight_store.manifest import Manifest, seal
from weight_store.position import GENESIS, Position
from weight_store.receipt import Receipt
from weight_store.version import Abort, Open, Withdrawal, withdrawn


@dataclass(frozen=True, slots=True)
class Sealing:
    """A register that holds a manifest. It counts once the head has moved to ``position``."""

    manifest: Manifest
    position: Position


@dataclass(frozen=True, slots=True)
class Slot:
    """One version number: its opening and its register, as far as they exist."""

    version: int
    opened: Open | None = None
    decision: Sealing | Abort | None = None


@dataclass(frozen=True, slots=True)
class View:
    """What the bucket says about a run: its head, the head's manifest (None before the first version) and the first
    slot after the head that is not dead. ``given_up``: the newest opening of the head's term among the dead ones
    between.
    """

    head: Head
    current: Manifest | None
    slot: Slot
    given_up: Open | None = None

    @property
    def undecided(self) -> Open | None:
        """The opening that waits for its decision, if there is one."""
        return self.slot.opened if self.slot.decision is None else None

    @property
    def progress(self) -> tuple[int, int, int, bool, bool]:
        """Grows with every step of the run's life; orders views that were read concurrently."""
        return (
            self.head.term,
            self.head.position.version,
            self.slot.version,
            self.slot.opened is not None,
            self.slot.decision is not None,
        )


@dataclass(frozen=True, slots=True)
class CreateHead:
    """Create the head of a new run, after its marker."""

    head: Head


@dataclass(frozen=True, slots=True)
class ReplaceHead:
    """Compare-and-set the head that was read to this one."""

    head: Head


@dataclass(frozen=True, slots=True)
class CreateOpen:
    """Create ``open.json``."""

    opened: Open


@dataclass(frozen=True, slots=True)
class CreateRegister:
    """Create the decision register of ``record.version``; whoever is first has decided."""

    record: Manifest | Abort


@dataclass(frozen=True, slots=True)
class Reread:
    """The view is torn: the slot is newer than the head that was read."""


@dataclass(frozen=True, slots=True)
class Done:
    """Nothing to write. ``version``: the version that an opening got."""

    version: int = 0


Step = CreateHead | ReplaceHead | CreateOpen | CreateRegister | Reread | Done


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A receipt whose bytes are not a receipt; it was created once, so it stays that way."""

    sentence: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known about an undecided version: receipts by rank (parsed, and as stored), ranks that withdrew, the
    layout once all receipts are there (or the ``trouble`` with reading it), the seconds since its last sign of life by
    the local clock, and after how many it expires. Signs of life: it was opened, a rank reported progress, a receipt
    came.
    """

    receipts: Mapping[int, tuple[Receipt, bytes] | Unreadable] = field(default_factory=dict)
    withdrawals: Mapping[int, Withdrawal] = field(default_factory=dict)
    layout: Layout | None = None
    trouble: str = ""
    quiet_s: float = 0.0
    expire_after_s: float = float("inf")


def is_dead(head: Head, slot: Slot) -> bool:
    """True if ``slot``, a number after ``head``, can never become the head's position.

    A manifest of an older term is stranded: moving the head to it requires head.term to equal its term, and terms
    only grow. ``BucketDamaged`` if the slot contradicts the head in a way that no writer of ours produces.
    """
    _check_owner(head, slot)
    if slot.decision is None:
        return False
    if isinstance(slot.decision, Abort):
        return True
    manifest = slot.decision.manifest
    if manifest.term == head.term and manifest.parent != head.position:
        raise BucketDamaged(
            f"version {slot.version} of term {manifest.term} was sealed on {manifest.parent}, but the head of the "
            f"same term is at {head.position}: something else writes to this bucket"
        )
    return manifest.term < head.term


def _check_owner(head: Head, slot: Slot) -> None:
    decision = slot.decision.manifest if isinstance(slot.decision, Sealing) else slot.decision
    for found in (slot.opened, decision):
        if found is not None and found.run_id != head.run_id:
            raise BucketDamaged(
                f"version {slot.version} belongs to run {found.run_id}, the head to run {head.run_id}: objects of an "
                "earlier run of this name were left behind; use another run name, or delete them"
            )


def take_over(view: View | None, launch: str, run_id: str, write_id: str, expected_term: int | None = None) -> Step:
    """Give the run to ``launch``, once. A manifest of the term that ends is finished first, so that it counts.

    ``expected_term``: take it from this term (0: create it) or not at all; None: from whichever there is. ``Fenced`` if
    the launch had the run and lost it, or another one was quicker; ``WrongRun`` if the run it saw is gone.
    """
    if view is None:
        if expected_term:
            raise WrongRun(
                f"the run that was in term {expected_term} is gone: start the training job anew to create it"
            )
        return CreateHead(Head(run_id=run_id, term=1, launch=launch, position=GENESIS, write_id=write_id))
    head = view.head
    if head.launch == launch:
        return Done()
    check_not_retired(head, launch)
    if expected_term is not None:
        check_expected(head, launch, expected_term)
    pending = _finish(view, write_id)
    if pending is not None:
        return pending
    retired = (head.launch, *head.retired)[:MAX_RETIRED]
    update = {"term": head.term + 1, "launch": launch, "retired": retired, "write_id": write_id}
    return ReplaceHead(head.model_copy(update=update))


def check_term(head: Head, term: int, run_id: str | None = None) -> None:
    """``Fenced`` if a later launch took the run over; ``UnknownTerm`` if the run has not come to ``term``; ``WrongRun``
    if it is not ``run_id`` (None: whichever it is).
    """
    if run_id not in (None, head.run_id):
        raise WrongRun(f"run {run_id} is gone, another one of its name was begun: start the training job anew")
    if term < head.term:
        raise Fenced(
            f"term {term} is over: launch {head.launch} took the run over (term {head.term}); "
            "this trainer can publish nothing more, stop it or start it again"
        )
    if term > head.term:
        raise UnknownTerm(f"the run is in term {head.term} and never had term {term}: take it over first")


def open_version(view: View, request: OpenRequest, write_id: str) -> Step:
    """Assign a version to a publication: the same one to every rank, whatever became of it; one undecided at a time.

    Raises ``Fenced``, ``UnknownTerm``, ``WrongRun``, ``VersionUndecided``, ``PublicationConflict`` or
    ``PublicationPassed``.
    """
    head, slot = view.head, view.slot
    check_term(head, request.term, request.run_id)
    pending = _finish(view, write_id)
    if pending is not None:
        return pending
    current = view.current
    if current is not None and current.term == request.term and current.ordinal >= request.ordinal:
        if current.ordinal > request.ordinal:
            raise PublicationPassed(
                f"publication {request.ordinal} of term {request.term} is over: version {current.version} is "
                f"publication {current.ordinal}"
            )
        _check_same(current, request)
        return Done(current.version)
    given_up = _given_up(view, request)
    if given_up is not None:
        return given_up
    if slot.opened is None:
        return CreateOpen(
            Open(
                run_id=head.run_id,
                version=slot.version,
                term=request.term,
                step=request.step,
                ordinal=request.ordinal,
                parent=head.position,
                layout=request.layout,
                world_size=request.world_size,
                write_id=write_id,
            )
        )
    if slot.opened.term != head.term:
        return _fence(view, write_id)
    if slot.opened.ordinal == request.ordinal:
        _check_same(slot.opened, request)
        return Done(slot.version)
    raise VersionUndecided(
        f"version {slot.version} (step {slot.opened.step}, publication {slot.opened.ordinal}) is undecided; "
        f"publication {request.ordinal} can be opened after it"
    )


def _given_up(view: View, request: OpenRequest) -> Done | None:
    """The answer to a rank that comes after its publication was aborted: opened again, it would wait in vain for the
    other ranks, which have gone on, and hold them up until it expires.
    """
    opened = view.given_up
    if opened is None or opened.term != request.term or opened.ordinal < request.ordinal:
        return None
    if opened.ordinal > request.ordinal:
        raise PublicationPassed(
            f"publication {request.ordinal} of term {request.term} is over: publication {opened.ordinal} was opened "
            f"after it, as version {opened.version}"
        )
    _check_same(opened, request)
    return Done(opened.version)


def settle(view: View, evidence: Evidence, write_id: str) -> Step:
    """Decide what can be decided and finish the head's move. ``Done`` while there is nothing to do but wait."""
    pending = _finish(view, write_id)
    if pending is not None:
        return pending
    opened = view.undecided
    if opened is None:
        return Done()
    if opened.term != view.head.term:
        return _fence(view, write_id)
    missing = [rank for rank in range(opened.world_size) if rank not in evidence.receipts]
    if not missing and evidence.layout is not None:
        return CreateRegister(_decide(view, opened, evidence, evidence.layout, write_id))
    gone = {rank: evidence.withdrawals[rank] for rank in missing if rank in evidence.withdrawals}
    if gone:  # a rank whose receipt is there after all is not waited for
        return CreateRegister(withdrawn(opened, gone, write_id))
    if evidence.quiet_s >= evidence.expire_after_s:
        return CreateRegister(aborts.expired(opened, missing, evidence.expire_after_s, evidence.trouble, write_id))
    return Done()


def after(view: View, step: Step, position: Position | None) -> View | None:
    """The view that a reading would have found when the store took ``step`` on ``view``; None: read to know.

    ``position``: of the manifest that was written, if one was. Every write is conditional, so one that was acknowledged
    shows that what it rests on still held. A number is opened only once the one before is dead or the head's, so behind
    a slot that was decided just now there is nothing yet.
    """
    head, slot = view.head, view.slot
    match step:
        case CreateOpen(opened):
            return replace(view, slot=Slot(opened.version, opened))
        case CreateRegister(Manifest() as manifest) if position is not None:
            return replace(view, slot=replace(slot, decision=Sealing(manifest, position)))
        case CreateRegister(Abort()) if slot.opened is not None:
            given_up = slot.opened if slot.opened.term == head.term else view.given_up
            return replace(view, slot=Slot(slot.version + 1), given_up=given_up)
        case ReplaceHead(moved) if isinstance(slot.decision, Sealing) and moved.position == slot.decision.position:
            return View(moved, slot.decision.manifest, Slot(slot.version + 1))
        case _:
            return None


def _finish(view: View, write_id: str) -> Step | None:
    """The step that makes a decided slot count, or None if the slot is free or undecided.

    Slots that are dead never reach a view, so the manifest here is of the head's own term, or the head was read
    before the newer term began.
    """
    decision = view.slot.decision
    if decision is None:
        return None
    if isinstance(decision, Abort) or decision.manifest.term != view.head.term:
        return Reread()
    return ReplaceHead(view.head.model_copy(update={"position": decision.position, "write_id": write_id}))


def _fence(view: View, write_id: str) -> Step:
    opened, head = view.slot.opened, view.head
    if opened is None or opened.term > head.term:
        return Reread()
    return CreateRegister(aborts.fenced(opened, head.launch, write_id))


def _decide(view: View, opened: Open, evidence: Evidence, layout: Layout, write_id: str) -> Manifest | Abort:
    receipts: list[tuple[Receipt, bytes]] = []
    for rank in range(opened.world_size):
        found = evidence.receipts[rank]
        if isinstance(found, Unreadable):
            return aborts.refused(opened, found.sentence, write_id)
        receipts.append(found)
    parent = None if view.current is None else (view.current, view.head.position)
    try:
        return seal(opened, layout, receipts, parent)
    except FormatError as error:
        return aborts.refused(opened, str(error), write_id)


def _check_same(known: Open | Manifest, request: OpenRequest) -> None:
    mine = (request.step, request.layout, request.world_size)
    theirs = (known.step, known.layout, known.world_size)
    if mine != theirs:
        raise PublicationConflict(
            f"publication {request.ordinal} of term {request.term} was opened as step {known.step} of "
            f"{known.world_size} ranks with layout {known.layout[:12]}; a rank now asks for step {request.step} of "
            f"{request.world_size} ranks with layout {request.layout[:12]}: all ranks must publish the same steps in "
            "the same order"
        )

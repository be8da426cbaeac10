"""Every order of events of a small world keeps the promises: no lost version, no wrong one, and never a dead end.

One decision a version; versions only grow; every sealed version is reachable from the head by parent links; a fenced
term neither seals nor moves the head; a launch that lost the run stays without it; the ranks of a manifest share one
parent; a publication is opened, and hence sealed, at most once.
world.py says what is modelled, and that the decisions are the real code.
"""

from __future__ import annotations

import pytest

from coordinator import decisions
from coordinator.decisions import CreateRegister, Evidence, ReplaceHead, Reread, Sealing, Slot, Step, View
from tests.model.search import dead_ends, explore
from tests.model.state import (
    LAYOUT,
    LAYOUT_SHA256,
    NONCE,
    RANKS,
    RUN_ID,
    Mutation,
    Violation,
    World,
    make_receipt,
)
from tests.model.world import WHY, Model
from weight_store import manifest
from weight_store.head import Head
from weight_store.position import GENESIS, Position
from weight_store.version import Abort, Open

WORLDS = {
    "two terms, three publications": {"publications": (2, 1), "versions": 3},
    "receipts out of step and after the decision": {
        "publications": (1, 1),
        "versions": 2,
        "stray": True,
        "late_receipts": True,
    },
    "three coordinators": {"publications": (1, 1), "versions": 2, "coordinators": 3},
    "ranks withdraw": {"publications": (1, 1), "versions": 2, "withdrawing": True, "late_receipts": True},
    "three terms": {"publications": (1, 1, 1), "versions": 2},
}


@pytest.fixture(scope="module", params=WORLDS)
def explored(request: pytest.FixtureRequest) -> tuple[Model, set[World]]:
    """A model and every world it can come to; a broken promise ends the search with the shortest way there."""
    model = Model(**WORLDS[request.param])
    return model, explore(model)


def test_no_order_of_events_breaks_a_promise(explored) -> None:
    _, worlds = explored
    assert len(worlds) > 10_000, "the search no longer goes where it should"


def test_whatever_happened_an_empty_coordinator_goes_on(explored) -> None:
    assert not dead_ends(*explored)


def is_dead_in_any_term(head: Head, slot: decisions.Slot) -> bool:
    return isinstance(slot.decision, Abort)


def finish_in_any_term(view: View, write_id: str) -> Step | None:
    decision, head = view.slot.decision, view.head
    if decision is None or isinstance(decision, Abort):
        return None if decision is None else Reread()
    return ReplaceHead(head.model_copy(update={"position": decision.position}))


def violation(**model: object) -> str:
    with pytest.raises(Violation) as caught:
        explore(Model(**model))
    return str(caught.value)


def test_a_rank_that_withdraws_after_all_receipts_came_aborts_nothing_by_a_coordinator() -> None:
    """Its word is weighed against the bucket: all receipts make a manifest."""
    record = Open(
        run_id=RUN_ID, version=1, term=1, step=0, ordinal=0, parent=GENESIS, layout=LAYOUT_SHA256, world_size=RANKS,
        write_id=NONCE,
    )  # fmt: skip
    head = Head(run_id=RUN_ID, term=1, launch="launch-1", position=GENESIS, write_id=NONCE)
    receipts = [make_receipt(record, rank, GENESIS) for rank in range(RANKS)]
    evidence = Evidence(
        receipts={rank: (receipt, receipt.to_bytes()) for rank, receipt in enumerate(receipts)},
        withdrawals={0: WHY},
        layout=LAYOUT,
    )
    step = decisions.settle(View(head, None, Slot(1, record)), evidence, NONCE)
    assert isinstance(step, CreateRegister)
    assert isinstance(step.record, manifest.Manifest)


def test_without_the_term_check_a_fenced_term_moves_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "is_dead", is_dead_in_any_term)
    monkeypatch.setattr(decisions, "_finish", finish_in_any_term)
    assert "a fenced term moved the head" in violation(publications=(1, 1), versions=2)


def test_without_the_parent_check_ranks_encode_against_different_parents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "check_belongs", lambda *_: None)
    assert "different parents" in violation(publications=(1, 1), versions=2, stray=True)


@pytest.mark.parametrize(
    ("mutation", "sentence"),
    [
        ("aborts_aside", "both aborted and decided"),
        ("trusting_own_write", "the head names a position that its register does not hold"),
        ("unconditional_head", "the head"),
        ("overwriting_registers", "opening or decision changed"),
    ],
    ids=["abort register", "read-back", "compare-and-set", "create-only"],
)
def test_without_a_mechanism_of_the_store_a_promise_breaks(mutation: str, sentence: str) -> None:
    found = violation(publications=(1, 1), versions=2, mutation=Mutation(**{mutation: True}))
    assert sentence in found


def test_without_fencing_an_old_opening_there_is_a_dead_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "_fence", lambda *_: Reread())
    model = Model(publications=(1, 1), versions=2)
    assert dead_ends(model, explore(model))


def test_without_looking_at_what_was_given_up_a_late_rank_opens_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "_given_up", lambda *_: None)
    assert "opened twice or out of order" in violation(publications=(2,), versions=2)


def test_without_retiring_launches_one_that_lost_the_run_takes_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "MAX_RETIRED", 0)
    assert "took it back" in violation(publications=(1, 1), versions=1)


def test_launches_that_say_what_they_saw_need_not_be_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "MAX_RETIRED", 0)
    model = Model(publications=(1, 1, 1), versions=1, looked=True)
    assert not dead_ends(model, explore(model))


def test_a_coordinator_that_takes_its_write_for_more_than_it_was_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    after = decisions.after

    def hasty(view: View, step: Step, position: Position | None) -> View | None:
        """As if nobody could have a say between the register and the head."""
        found = after(view, step, position)
        if found is None or not isinstance(found.slot.decision, Sealing):
            return found
        moved = found.head.model_copy(update={"position": found.slot.decision.position})
        return View(moved, found.slot.decision.manifest, Slot(found.slot.version + 1))

    monkeypatch.setattr(decisions, "after", hasty)
    assert "something else than its write" in violation(publications=(1, 1), versions=2)


def test_a_violation_says_how_to_get_there() -> None:
    found = violation(publications=(1, 1), versions=2, mutation=Mutation(aborts_aside=True))
    assert "creates the head" in found
    assert "rank 1 writes its receipt of version 1" in found
    assert len(found.splitlines()) < 20

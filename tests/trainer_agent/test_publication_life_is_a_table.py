"""The sidecar's decisions, without a sidecar: every phase and event, bases, fulls, superseded publications."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from coordinator.wire import VersionAnswer
from trainer_agent.decisions import (
    due_fulls,
    is_skipped,
    is_superseded,
    pending_fulls,
    settled,
    source_for,
    wants_extra_full,
)
from trainer_agent.session import (
    FINAL,
    TRANSITIONS,
    GivenUp,
    IllegalTransition,
    Interrupted,
    Observed,
    Phase,
    Progress,
    Rebuilt,
    Refused,
    Sent,
    advance,
)
from trainer_agent.state import Base, State
from weight_store.manifest import Link, Manifest, ReceiptRef
from weight_store.position import GENESIS, Position
from weight_store.receipt import FullRef

RUN_ID = "00000000-0000-0000-0000-000000000000"


def at(version: int) -> Position:
    return Position(version=version, sha256=f"{version:064x}") if version else GENESIS


def base_at(version: int, slot: int = 0) -> Base:
    return Base(slot=slot, position=at(version), digests="")


def answer(version: int = 4, state: str = "undecided", parent: int = 3, **more: object) -> VersionAnswer:
    fields = {"run": "r", "run_id": RUN_ID, "term": 1, "step": 9, "ordinal": 2, "layout": "0" * 64, "world_size": 1}
    return VersionAnswer(version=version, state=state, parent=at(parent), **(fields | more))


EVENTS = (Observed(answer()), Rebuilt(None), Sent(), Interrupted(), Refused("code", "why"), GivenUp())


def progress(phase: Phase = Phase.OPENING, base: Base | None = None) -> Progress:
    return Progress(ordinal=2, step=9, slot=1, base=base, phase=phase)


@pytest.mark.parametrize(("phase", "event"), list(itertools.product(Phase, EVENTS)))
def test_an_event_has_a_rule_or_is_an_error(phase: Phase, event: object) -> None:
    start = progress(phase)
    if (phase, type(event)) in TRANSITIONS:
        assert advance(start, event).phase in Phase
    else:
        with pytest.raises(IllegalTransition):
            advance(start, event)


def test_final_phases_have_no_way_out_and_all_others_can_fail() -> None:
    assert not {phase for phase, _ in TRANSITIONS} & FINAL
    for phase in set(Phase) - FINAL:
        assert advance(progress(phase), Refused("fenced", "why")).failure == Refused("fenced", "why")


@pytest.mark.parametrize(
    ("base", "parent", "source"),
    [
        (None, 0, "full"),
        (base_at(3), 0, "full"),
        (base_at(3), 3, "delta"),
        (base_at(2), 3, "rebuild"),
        (None, 3, "rebuild"),
    ],
)
def test_only_exactly_the_parent_is_a_base(base: Base | None, parent: int, source: str) -> None:
    assert source_for(base, at(parent)) == source
    after = advance(progress(base=base), Observed(answer(parent=parent)))
    assert after.phase is (Phase.REBUILDING if source == "rebuild" else Phase.SENDING)


def test_a_base_of_the_same_version_but_another_manifest_is_no_base() -> None:
    impostor = Base(slot=0, position=Position(version=3, sha256="f" * 64), digests="")
    assert source_for(impostor, at(3)) == "rebuild"


def test_what_cannot_be_rebuilt_is_sent_whole() -> None:
    rebuilding = advance(progress(), Observed(answer()))
    assert advance(rebuilding, Rebuilt(None)).source == "full"
    assert advance(rebuilding, Rebuilt(base_at(3))).source == "delta"


def test_after_an_interruption_the_version_is_looked_at_before_it_is_sent_again() -> None:
    sending = advance(progress(base=base_at(3)), Observed(answer()))
    again = advance(sending, Interrupted())
    assert (again.phase, again.version) == (Phase.OPENING, 4)
    assert advance(again, Observed(answer())).phase is Phase.SENDING
    assert advance(again, Observed(answer(state="sealed"))).phase is Phase.SEALED
    given_up = advance(again, Observed(answer(state="aborted", reason="expired: no receipt of rank 1")))
    assert given_up.phase is Phase.FAILED
    assert given_up.failure is not None
    assert given_up.failure.code == "version-aborted"
    assert "no receipt of rank 1" in given_up.failure.message


FULL = Refused("store-unwritable", "no space left")


@pytest.mark.parametrize("event", [GivenUp(), Observed(answer(state="aborted", reason="withdrawn: rank 0")),
                                   Refused("token-required", "no token")])  # fmt: skip
def test_a_rank_that_cannot_send_withdraws_and_tells_what_it_failed_of(event: object) -> None:
    sending = advance(progress(base=base_at(3)), Observed(answer()))
    withdrawing = advance(sending, FULL)
    assert (withdrawing.phase, withdrawing.failure) == (Phase.WITHDRAWING, FULL)
    after = advance(withdrawing, event)
    assert (after.phase, after.failure) == (Phase.FAILED, FULL)


def test_a_launch_that_is_over_while_a_rank_withdraws_is_told_so() -> None:
    withdrawing = advance(advance(progress(base=base_at(3)), Observed(answer())), FULL)
    fenced = Refused("fenced", "another launch took over")
    after = advance(withdrawing, fenced)
    assert (after.phase, after.failure) == (Phase.FAILED, fenced)


def test_a_launch_whose_version_was_fenced_is_told_so_at_once() -> None:
    fenced = Observed(answer(state="aborted", reason="fenced: term 1 ended before version 4 was decided"))
    sending = advance(progress(base=base_at(3)), Observed(answer()))
    for before in (progress(), sending, advance(sending, Sent()), advance(sending, FULL)):
        if before.phase is Phase.SENDING:
            before = advance(before, Interrupted())
        after = advance(before, fenced)
        assert (after.phase, after.failure.code) == (Phase.FAILED, "fenced")


@pytest.mark.parametrize("event", [Observed(answer()), Interrupted()])
def test_a_receipt_from_before_a_restart_counts(event: object) -> None:
    withdrawing = advance(advance(progress(base=base_at(3)), Observed(answer())), FULL)
    awaiting = advance(withdrawing, event)
    assert awaiting.phase is Phase.AWAITING
    assert advance(awaiting, Observed(answer(state="sealed"))).phase is Phase.SEALED
    assert advance(withdrawing, Observed(answer(state="sealed"))).phase is Phase.SEALED
    assert advance(awaiting, Observed(answer(state="aborted"))).failure == FULL


@pytest.mark.parametrize("code", ["fenced", "unknown-version", "unknown-run", "wrong-run"])
def test_what_nobody_waits_for_is_not_withdrawn(code: str) -> None:
    sending = advance(progress(base=base_at(3)), Observed(answer()))
    assert advance(sending, Refused(code, "why")).phase is Phase.FAILED


def test_before_a_version_is_known_and_after_the_receipt_there_is_nothing_to_withdraw() -> None:
    assert advance(progress(), FULL).phase is Phase.FAILED
    awaiting = advance(advance(progress(base=base_at(3)), Observed(answer())), Sent())
    assert advance(awaiting, FULL).phase is Phase.FAILED


def test_a_version_is_skipped_only_by_a_rank_that_owes_it_and_has_gone_on() -> None:
    waiting = answer(ordinal=4, missing=(1, 3))
    assert is_skipped(waiting, term=1, ordinal=5, rank=3)
    assert not is_skipped(waiting, term=1, ordinal=5, rank=2)
    assert not is_skipped(waiting, term=1, ordinal=4, rank=3)
    assert not is_skipped(waiting, term=2, ordinal=5, rank=3)


def test_waiting_goes_on_until_the_version_is_decided() -> None:
    waiting = advance(advance(progress(base=base_at(3)), Observed(answer())), Sent())
    assert advance(waiting, Observed(answer())).phase is Phase.AWAITING
    assert advance(waiting, Observed(answer(state="sealed"))).phase is Phase.SEALED


def manifest(
    version: int, payloads: list[int], *, full_bytes: int = 100, full_version: int = 1, delta: int | None = None
) -> Manifest:
    """A manifest whose chain has the payloads given, its own last. ``delta``: of the version whose full is an extra."""
    links = tuple(
        Link(version=full_version + i, sha256=f"{full_version + i:064x}", payload_bytes=size)
        for i, size in enumerate([full_bytes if delta is None else delta, *payloads[:-1]])
    )
    own = full_version == version
    return Manifest(
        run_id=RUN_ID,
        version=version,
        term=1,
        step=0,
        ordinal=0,
        parent=links[-1].position if not own else GENESIS,
        layout="0" * 64,
        world_size=1,
        receipts=(ReceiptRef(sha256="0" * 64, size=1, shard_bytes=1),),
        payload_bytes=payloads[-1],
        changed=0,
        elements=1,
        weight_bytes=2,
        full_version=full_version,
        full_bytes=full_bytes,
        chain=() if own else links,
    )


def test_fulls_come_every_so_many_versions_and_when_deltas_cost_more_than_one() -> None:
    assert wants_extra_full(manifest(4, [1, 1, 1]), 4)
    assert not wants_extra_full(manifest(4, [1, 1, 1]), 5)
    assert not wants_extra_full(manifest(4, [1, 1, 1]), 0)
    assert wants_extra_full(manifest(4, [40, 40, 40]), 0)
    assert not wants_extra_full(manifest(5, [40, 40, 40, 40]), 0), "once for every multiple"
    assert wants_extra_full(manifest(6, [40, 40, 40, 40, 40]), 0)
    assert not wants_extra_full(manifest(1, [100]), 1), "it is a full already"
    assert wants_extra_full(manifest(4, [40, 40, 40], delta=30), 0), "who reads the full needs no delta to it"
    assert not wants_extra_full(manifest(2, [0], full_bytes=0), 0), "a run of empty tensors"
    assert due_fulls(manifest(7, [40, 40, 40, 1, 1, 1]), 3) == [3, 4, 6]
    assert due_fulls(manifest(12, [1] * 11), 1) == [5, 6, 7, 8, 9, 10, 11, 12]


def test_fulls_are_reported_until_they_are_visible() -> None:
    refs = [FullRef(version=v, sha256="0" * 64, size=1, shard_bytes=1) for v in range(1, 80)]
    assert [ref.version for ref in pending_fulls(refs, 77)] == [78, 79]
    assert [ref.version for ref in pending_fulls(refs, 0)] == list(range(16, 80)), "the newest that a receipt holds"
    state = State(run_id=RUN_ID, layout="0" * 64, fulls=tuple(refs[:3]))
    after = settled(state, 1, 7, at(9), "", full_version=2)
    assert [ref.version for ref in after.fulls] == [3]
    assert (after.base.slot, after.base.position, after.base.ordinal) == (1, at(9), 7)
    assert State.parse(after.to_bytes()) == after


def test_a_publication_is_superseded_only_by_a_later_one_of_its_term() -> None:
    assert is_superseded(answer(ordinal=5), term=1, ordinal=4)
    assert not is_superseded(answer(ordinal=5), term=1, ordinal=5)
    assert not is_superseded(answer(ordinal=5, term=2), term=1, ordinal=4)


def test_progress_is_frozen() -> None:
    start = progress()
    assert replace(start, version=1) != start
    with pytest.raises(AttributeError):
        start.version = 1

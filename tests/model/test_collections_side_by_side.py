"""Collections of one run that go on at the same time, sleep, die and send late delete nothing that somebody needs.

In every order of a small world, beside launches that take the run over; retention.py says what is modelled, and that
the collections are the real code.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.model import retention
from tests.model.retention import Model, explore
from tests.model.state import Violation
from weight_store.gc import collector, evidence
from weight_store.gc.floor import Raise
from weight_store.gc.plan import Fate

MODELS = {
    "three terms, two layouts": Model(terms=3, versions=1),
    "two terms, two layouts": Model(terms=2, versions=2),
    "three versions, a full of the second": Model(terms=2, versions=3, sizes=(1,)),
}


@pytest.fixture(autouse=True)
def fresh():
    """Nothing is remembered of collections that a test has altered."""
    retention.collect.cache_clear()
    yield
    retention.collect.cache_clear()


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_no_order_of_collections_and_launches_loses_anything(model: Model) -> None:
    assert explore(model) > 300, "the search no longer goes where it should"


def violation(model: Model) -> str:
    with pytest.raises(Violation) as caught:
        explore(model)
    return str(caught.value)


def test_layouts_and_assets_that_nobody_names_are_lost_to_a_launch_that_names_them_again() -> None:
    """Why they stay: the way is one that no look at the head, put-back or lease closes, for deletions arrive late."""
    found = violation(Model(terms=3, versions=1, forgets_shared=True))
    assert "/assets/" in found or "/layouts/" in found
    assert found.endswith("a launch of 2 takes over\nit settles its layout and asset")


async def pending_is_dead(*_: object) -> Fate:
    return Fate("dead", "it is above the head")


def floor_at_the_head(control: Any, wanted: int, current: Any, targets: Any) -> Raise:
    before = control.floor if control is not None else 0
    return Raise(before, max(before, wanted))


def any_floor_will_do(*_: object) -> None:
    """Else the next collection would notice what that one did."""


@pytest.mark.parametrize(
    "wrong",
    [
        {(evidence, "read_pending"): pending_is_dead},
        {(collector, "decide_floor"): floor_at_the_head, (collector, "check_floor"): any_floor_will_do},
    ],
    ids=["undecided versions are kept", "the floor stops at the newest full"],
)
def test_without_a_rule_something_needed_is_deleted(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for (module, name), function in wrong.items():
        monkeypatch.setattr(module, name, function)
    assert "is needed, and a collection may still delete it" in violation(Model(terms=2, versions=2, sizes=(1,)))

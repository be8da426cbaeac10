"""What is there already is not fetched again, and nothing that is needed is left out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rollout_agent.rebuilding import needed_groups, remaining
from rollout_agent.source import LoadedHop
from tests.rollout_agent.training import Training
from weight_store.layout import Layout
from weight_store.memory import MemoryStore


def hop(number: int, layout: Layout, name: str, *, full: set[int] | None = None) -> LoadedHop:
    """A hop whose groups have digests of their own; ``full``: the groups that are not deltas."""
    indices = range(len(layout.groups))
    ranges: Any = {i: SimpleNamespace(digest=digest(number, i), full=full is None or i in full) for i in indices}
    version: Any = SimpleNamespace(layout=name)
    return LoadedHop(hop=None, version=version, layout=layout, receipts=(), ranges=ranges)  # type: ignore[arg-type]


def digest(number: int, index: int) -> bytes:
    return bytes([number, index])


@pytest.fixture
def one() -> Layout:
    return Training(MemoryStore(), world=1).layout()


@pytest.fixture
def two() -> Layout:
    return Training(MemoryStore(), world=2).layout()


def test_a_group_starts_after_the_hop_that_it_is_at(one: Layout) -> None:
    hops = [hop(0, one, "a"), hop(1, one, "a", full=set()), hop(2, one, "a", full=set())]
    found = {0: digest(0, 0), 1: digest(1, 1), 2: digest(2, 2), 3: b"something else"}
    assert remaining(hops, found) == [{3}, {0, 3}, {0, 1, 3}]


def test_a_group_sent_whole_on_the_way_starts_there(one: Layout) -> None:
    hops = [hop(0, one, "a"), hop(1, one, "a", full={3}), hop(2, one, "a", full=set())]
    assert remaining(hops, {3: b"something else"}) == [set(), {3}, {3}]
    assert remaining(hops, {3: digest(0, 3)}) == [set(), {3}, {3}], "what was there before is of no use either"


def test_where_layouts_differ_only_what_is_right_at_the_end_is_kept(one: Layout, two: Layout) -> None:
    """The same number names another group there, or none. What is stored on the way is wrong at the end, too."""
    assert len(one.groups) < len(two.groups)
    hops = [hop(0, one, "a"), hop(1, two, "b", full=set())]
    sizes = set()
    for wrong in range(len(two.groups)):
        found = {index: digest(1, index) for index in range(len(two.groups))} | {wrong: digest(0, 0)}
        earlier, later = remaining(hops, found)
        assert wrong in later
        assert earlier == overlapping(one, two, later)
        assert later == overlapping(two, one, earlier)
        sizes.add(len(later))
    assert min(sizes) == 1
    assert 1 < max(sizes) < len(two.groups)
    # What an earlier hop leaves is not compared across layouts, even if the digests happen to agree.
    hops[0].ranges[0].digest = found[wrong]  # type: ignore[misc]
    assert remaining(hops, found) == [earlier, later]


def overlapping(layout: Layout, other: Layout, indices: set[int]) -> set[int]:
    boxes = [(piece.tensor.name, piece.box) for index in indices for piece in other.groups[index].pieces]
    return {
        group.index
        for group in layout.groups
        if any(p.tensor.name == name and p.box.overlaps(box) for p in group.pieces for name, box in boxes)
    }


def test_a_group_sent_whole_needs_nothing_before_it(one: Layout, two: Layout) -> None:
    hops = [hop(0, one, "a"), hop(1, two, "b", full={0})]
    assert needed_groups(hops, {0}) == [set(), {0}]

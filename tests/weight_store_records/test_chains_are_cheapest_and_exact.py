"""A reader takes the cheapest way in bytes, and a delta only from exactly the position that it names."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weight_store.chain import Hop, plan_chain
from weight_store.errors import ChainError
from weight_store.manifest import Manifest
from weight_store.position import GENESIS, Position

State = tuple[Manifest, Position]


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[int, int, str]]:
    """Per version: how much its number grows, bytes a group, and whether it is a delta, a full or reports an extra."""
    kinds = st.sampled_from(["delta", "delta", "delta", "full", "extra"])
    steps = st.tuples(st.integers(1, 3), st.integers(0, 30), kinds)
    return draw(st.lists(steps, min_size=1, max_size=12))


def build(make, history: list[tuple[int, int, str]], data: st.DataObject) -> list[State]:
    layout = make.layout(world_size=2, layers=1)
    states: list[State] = []
    for growth, size, kind in history:
        before = states[-1] if states else None
        version = (before[1].version if before else 0) + growth
        more: dict[str, object] = {}
        if kind == "full" and before:
            more["full"] = (0,)
        if kind == "extra" and before:
            which = data.draw(st.sampled_from(states))[1].version
            more["fulls"] = (make.full_ref(which, data.draw(st.integers(8, 60))),)
        states.append(make.seal(layout, before, version, size=size, **more))
    return states


def ways(held: Position | None, target: Manifest, position: Position) -> Iterator[list[Hop]]:
    """Every way that the manifest knows of, cheapest or not."""
    links = [*((link.position, link.payload_bytes) for link in target.chain), (position, target.payload_bytes)]

    def onwards(at: int) -> list[Hop]:
        return [Hop(where, "delta", cost) for where, cost in links[at + 1 :]]

    for at, (where, _) in enumerate(links):
        if where == held:
            yield onwards(at)
        if where.version == target.full_version:
            yield [Hop(where, "full", target.full_bytes, target.extra_full), *onwards(at)]


def cost(hops: list[Hop]) -> int:
    return sum(hop.payload_bytes for hop in hops)


@given(histories(), st.data())
def test_the_plan_is_the_cheapest_of_all_ways(make, history: list[tuple[int, int, str]], data: st.DataObject) -> None:
    states = build(make, history, data)
    target, position = states[-1]
    for held in [None, *(state[1] for state in states)]:
        plan = plan_chain(held, target, position)
        known = list(ways(held, target, position))
        assert cost(plan) == min(map(cost, known))
        assert plan in known
        if plan:
            assert plan[-1].position == position


@given(histories(), st.data())
def test_following_every_version_never_needs_a_full(make, history: list[tuple[int, int, str]], data) -> None:
    states = build(make, history, data)
    held = states[0][1]
    for target, position in states[1:]:
        (hop,) = plan_chain(held, target, position)
        assert hop == Hop(position, "delta", target.payload_bytes) or hop.payload_bytes < target.payload_bytes
        held = position


@given(histories(), st.data())
def test_a_plan_starts_at_what_is_held_or_at_a_full(make, history: list[tuple[int, int, str]], data) -> None:
    states = build(make, history, data)
    parents = {position: manifest.parent for manifest, position in states}
    target, position = states[-1]
    for held in [None, *(state[1] for state in states)]:
        at = held
        for hop in plan_chain(held, target, position):
            assert hop.kind == "full" or parents[hop.position] == at
            at = hop.position


def test_another_position_of_the_same_number_is_not_a_base(make) -> None:
    layout = make.layout()
    first = make.seal(layout)
    second = make.seal(layout, first, size=1)
    impostor = Position(version=1, sha256="e" * 64)
    assert [hop.kind for hop in plan_chain(impostor, *second)] == ["full", "delta"]
    assert [hop.kind for hop in plan_chain(first[1], *second)] == ["delta"]
    assert [hop.kind for hop in plan_chain(Position(version=2, sha256="e" * 64), *second)] == ["full", "delta"]


def test_nothing_held_is_never_a_base(make) -> None:
    first = make.seal(make.layout())
    for held in (None, GENESIS):
        assert [hop.kind for hop in plan_chain(held, *first)] == ["full"]


def test_being_there_needs_nothing(make) -> None:
    first = make.seal(make.layout())
    assert plan_chain(first[1], *first) == []


def test_a_rewind_is_never_silent(make) -> None:
    layout = make.layout()
    first = make.seal(layout)
    second = make.seal(layout, first)
    with pytest.raises(ChainError, match="holds version 2, later than version 1"):
        plan_chain(second[1], *first)


def test_a_replica_a_few_versions_behind_follows_by_deltas_across_an_extra_full(make) -> None:
    layout = make.layout()
    states = [make.seal(layout)]
    for _ in range(4):
        states.append(make.seal(layout, states[-1], size=1))
    states.append(make.seal(layout, states[-1], size=1, fulls=(make.full_ref(5, 10_000),)))
    target, position = states[-1]
    assert target.full_version == 5
    assert [hop.position.version for hop in plan_chain(states[1][1], target, position)] == [3, 4, 5, 6]
    late = plan_chain(None, target, position)
    assert [(hop.position.version, hop.kind) for hop in late] == [(5, "full"), (6, "delta")]
    assert late[0].extra_full == target.extra_full


def test_a_cheap_full_beats_many_deltas(make) -> None:
    layout = make.layout()
    states = [make.seal(layout)]
    for _ in range(4):
        states.append(make.seal(layout, states[-1], size=100))
    states.append(make.seal(layout, states[-1], size=1, fulls=(make.full_ref(5, 20),)))
    hops = plan_chain(states[0][1], *states[-1])
    assert [(hop.position.version, hop.kind) for hop in hops] == [(5, "full"), (6, "delta")]

"""Which groups of which hops rebuild what is wanted. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from rollout_agent.source import LoadedHop
from weight_store.boxes import Box
from weight_store.layout import Layout


def needed_groups(hops: Sequence[LoadedHop], wanted: Collection[int]) -> list[set[int]]:
    """For each hop the groups to fetch, so that the last hop's ``wanted`` groups get right and no other gets wrong.

    A delta group needs all of its bytes at the hop before; where layouts differ those lie in other groups. Rebuilding
    these stores old bytes also beside what is wanted: there too the last hop's groups are needed then.
    """
    last = hops[-1]
    closed = set(wanted)
    while True:
        needed = _leading_to(hops, closed)
        others: dict[str, tuple[Layout, set[int]]] = {}
        for hop, groups in zip(hops, needed, strict=True):
            if hop.version.layout != last.version.layout:
                others.setdefault(hop.version.layout, (hop.layout, set()))[1].update(groups)
        stored = [_overlapping(last.layout, layout, groups) for layout, groups in others.values() if groups]
        more = set().union(*stored) - closed
        if not more:
            return needed
        closed |= more


def _leading_to(hops: Sequence[LoadedHop], wanted: Collection[int]) -> list[set[int]]:
    needed: list[set[int]] = [set(wanted)]
    for earlier, later in zip(reversed(hops[:-1]), reversed(hops[1:]), strict=True):
        deltas = {index for index in needed[-1] if not later.ranges[index].full}
        if earlier.version.layout == later.version.layout:
            needed.append(deltas)
        else:
            needed.append(_overlapping(earlier.layout, later.layout, deltas))
    return needed[::-1]


def _overlapping(layout: Layout, other: Layout, groups: Collection[int]) -> set[int]:
    """Groups of ``layout`` that share an element with ``groups`` of ``other``."""
    boxes: dict[str, list[tuple[Box, int]]] = defaultdict(list)
    for group in layout.groups:
        for piece in group.pieces:
            boxes[piece.tensor.name].append((piece.box, group.index))
    return {
        index
        for wanted in groups
        for piece in other.groups[wanted].pieces
        for box, index in boxes[piece.tensor.name]
        if box.overlaps(piece.box)
    }


def remaining(hops: Sequence[LoadedHop], found: Mapping[int, bytes]) -> list[set[int]]:
    """For each hop the groups still to fetch, given the digests found for the last layout's groups.

    A group already as some hop leaves it starts after that hop, as long as every later layout cuts it the same way.
    """
    start = {index: _start(hops, index, digest) for index, digest in found.items()}
    if all(hop.version.layout == hops[-1].version.layout for hop in hops):
        return [{index for index, first in start.items() if first <= k} for k in range(len(hops))]
    return needed_groups(hops, {index for index, first in start.items() if first < len(hops)})


def _start(hops: Sequence[LoadedHop], index: int, digest: bytes) -> int:
    for k in reversed(range(len(hops))):
        if hops[k].version.layout != hops[-1].version.layout:
            break
        if hops[k].ranges[index].digest == digest:
            return k + 1
        if hops[k].ranges[index].full:
            return k
    return 0

"""Boxes mean what numpy slices mean; an overlap or a hole is always found and never invented."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weight_store.boxes import Box, find_hole, find_overlap, is_one_cut, span_count, spans, split, whole
from weight_store.errors import LayoutError


@st.composite
def shapes(draw: st.DrawFn, max_axes: int = 5, max_extent: int = 5) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.integers(0, max_extent), max_size=max_axes)))


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offsets = tuple(draw(st.integers(0, extent)) for extent in shape)
    sizes = tuple(draw(st.integers(0, extent - offset)) for extent, offset in zip(shape, offsets, strict=True))
    return Box(offsets, sizes)


@st.composite
def shape_and_box(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    shape = draw(shapes())
    return shape, draw(boxes_in(shape))


@st.composite
def shape_and_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    shape = draw(shapes(max_axes=3, max_extent=4))
    return shape, draw(st.lists(boxes_in(shape), max_size=6))


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape cut again and again at arbitrary planes."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    tiles = [whole(shape)]
    for _ in range(draw(st.integers(0, 8))):
        box = tiles.pop(draw(st.integers(0, len(tiles) - 1)))
        axis = draw(st.integers(0, max(0, len(shape) - 1)))
        if not shape or box.sizes[axis] < 2:
            tiles.append(box)
            continue
        at = draw(st.integers(1, box.sizes[axis] - 1))
        for first, size in ((0, at), (at, box.sizes[axis] - at)):
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[axis] += first
            sizes[axis] = size
            tiles.append(Box(tuple(offsets), tuple(sizes)))
    return shape, draw(st.permutations(tiles))


@given(shape_and_boxes())
def test_what_is_taken_for_one_cut_tiles(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = case
    if is_one_cut(boxes, shape):
        assert find_overlap(boxes) is None
        assert find_hole(boxes, shape) is None
        assert all(span_count(box, shape) <= 1 for box in boxes)


@given(shapes(), st.data())
def test_one_cut_is_recognised_in_any_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    assert is_one_cut([whole(shape)], shape)
    axes = [axis for axis, extent in enumerate(shape) if extent > 1]
    if not axes:
        return
    axis = data.draw(st.sampled_from(axes))
    cuts = sorted(data.draw(st.sets(st.integers(1, shape[axis] - 1), min_size=1)))
    boxes = []
    for first, end in itertools.pairwise([0, *cuts, shape[axis]]):
        offsets, sizes = [0] * len(shape), list(shape)
        offsets[axis], sizes[axis] = first, end - first
        boxes.append(Box(tuple(offsets), tuple(sizes)))
    boxes = data.draw(st.permutations(boxes))
    assert is_one_cut(boxes, shape)
    assert not is_one_cut(boxes[1:], shape)
    assert not is_one_cut([*boxes, boxes[0]], shape)


def cells(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))))


def numpy_elements(box: Box, shape: tuple[int, ...]) -> list[int]:
    index = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
    return [int(i) for i in np.arange(math.prod(shape)).reshape(shape)[index].reshape(-1)]


@given(shape_and_box())
def test_spans_are_numpy_slicing_in_order(given_: tuple[tuple[int, ...], Box]) -> None:
    shape, box = given_
    found = spans(box, shape)
    elements = [
        span.start + row * span.stride + i for span in found for row in range(span.rows) for i in range(span.run)
    ]
    assert elements == numpy_elements(box, shape)
    assert len(found) == span_count(box, shape)


@pytest.mark.parametrize(
    ("box", "shape", "count"),
    [
        (whole((7, 5, 3)), (7, 5, 3), 1),
        (Box((2, 0), (3, 5)), (7, 5), 1),
        (Box((0, 2), (7, 2)), (7, 5), 1),
        (Box((0, 1, 0, 0), (64, 2, 3, 3)), (64, 8, 3, 3), 1),
        (Box((1, 0, 2), (1, 9, 3)), (4, 9, 8), 1),
        (Box((0, 0, 1), (48_000_000, 1, 1)), (48_000_000, 1, 2), 1),
        (Box((0, 0, 0), (9, 2, 2)), (9, 3, 3), 9),
        (Box((), ()), (), 1),
    ],
)
def test_usual_shardings_are_one_comb(box: Box, shape: tuple[int, ...], count: int) -> None:
    assert span_count(box, shape) == len(spans(box, shape)) == count


@given(shape_and_box(), st.integers(1, 30))
def test_splitting_covers_the_box_in_order(given_: tuple[tuple[int, ...], Box], max_elements: int) -> None:
    shape, box = given_
    parts = split(box, max_elements)
    assert [i for part in parts for i in numpy_elements(part, shape)] == numpy_elements(box, shape)
    assert all(part.elements <= max_elements for part in parts)
    assert len(parts) == 1 or all(part.elements for part in parts)


@given(shape_and_boxes())
def test_overlaps_are_found_and_never_invented(given_: tuple[tuple[int, ...], list[Box]]) -> None:
    _, boxes = given_
    clashes = {
        (i, j)
        for (i, a), (j, b) in itertools.combinations(enumerate(boxes), 2)
        if cells(a) & cells(b) and a.elements and b.elements
    }
    pair = find_overlap(boxes)
    assert pair in clashes if clashes else pair is None
    for (i, a), (j, b) in itertools.combinations(enumerate(boxes), 2):
        assert a.overlaps(b) == b.overlaps(a) == ((i, j) in clashes)


@given(shape_and_boxes())
def test_holes_are_found_and_never_invented(given_: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = given_
    disjoint: list[Box] = []
    for box in boxes:
        if find_overlap([*disjoint, box]) is None:
            disjoint.append(box)
    uncovered = cells(whole(shape)) - {cell for box in disjoint for cell in cells(box)}
    hole = find_hole(disjoint, shape)
    assert (hole is None) == (not uncovered)
    if hole is not None:
        assert cells(hole)
        assert cells(hole) <= uncovered


@given(tilings(), st.data())
def test_every_tiling_is_whole_until_a_tile_is_lost_or_repeated(
    given_: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, tiles = given_
    assert find_overlap(tiles) is None
    assert find_hole(tiles, shape) is None
    which = data.draw(st.integers(0, len(tiles) - 1))
    assert find_hole(tiles[:which] + tiles[which + 1 :], shape) is not None
    pair = find_overlap([*tiles, tiles[which]])
    assert pair == (which, len(tiles))


def test_a_pinwheel_has_no_cut_and_is_still_decided() -> None:
    pinwheel = [
        Box((0, 0), (1, 2)),
        Box((0, 2), (2, 1)),
        Box((2, 1), (1, 2)),
        Box((1, 0), (2, 1)),
        Box((1, 1), (1, 1)),
    ]
    assert find_overlap(pinwheel) is None
    assert find_hole(pinwheel, (3, 3)) is None
    assert find_overlap([*pinwheel[:4], Box((1, 1), (1, 2))]) == (1, 4)


def spokes(n: int) -> list[Box]:
    """A pinwheel, which no plane cuts, around ``n`` rows that all reach over each other."""
    outer = [Box((0, 0), (3 * n, n)), Box((3 * n, 0), (n, 3 * n)), Box((n, 3 * n), (3 * n, n)), Box((0, n), (n, 3 * n))]
    return outer + [Box((n + 1 + i, n + i), (n - 2, 1)) for i in range(n)]


def test_boxes_that_no_plane_parts_are_compared_in_little_work() -> None:
    """Pair by pair this would take hours, and an offer of a megabyte holds them."""
    boxes = spokes(20_000)
    assert find_overlap(boxes) is None
    assert find_overlap([*boxes, Box((31_000, 30_000), (1, 1))]) == (10_004, len(boxes))


def bars(n: int) -> list[Box]:
    """Along each of three axes, past each other: whatever the plane, it cuts many."""
    pairs = [(i, j) for i in range(n) for j in range(n)]
    found = [Box((0, 2 * i, 2 * j), (2 * n, 1, 1)) for i, j in pairs]
    found += [Box((2 * i, 0, 2 * j + 1), (1, 2 * n, 1)) for i, j in pairs]
    return found + [Box((2 * i + 1, 2 * j + 1, 0), (1, 1, 2 * n)) for i, j in pairs]


def test_a_tangle_is_decided_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tangle = bars(8)
    assert find_overlap(tangle) is None
    assert find_overlap([*tangle, Box((1, 1, 1), (1, 1, 1))]) == (128, 192)
    monkeypatch.setattr("weight_store.boxes._MAX_PARTS", -4_000)
    with pytest.raises(LayoutError, match="too entangled"):
        find_overlap(tangle)


def test_a_large_grid_of_boxes_is_settled_in_little_work() -> None:
    n = 200
    grid = [Box((4 * i, 4 * j), (4, 4)) for i in range(n) for j in range(n)]
    assert find_overlap(grid) is None
    lost = grid[: n * n // 2] + grid[n * n // 2 + 1 :]
    assert find_hole(lost, (4 * n, 4 * n)) == grid[n * n // 2]


def test_a_hole_among_scattered_boxes_is_found_in_little_work() -> None:
    """Cutting every box out of what is left would take minutes here, and a rank may offer a million."""
    boxes = [Box((7919 * i % 997, 6007 * i % 1009, 4 * i), (1, 2, 3)) for i in range(4000)]
    hole = find_hole(boxes, (1000, 1011, 16_000))
    assert hole is not None
    assert hole.elements
    assert not any(hole.overlaps(box) for box in boxes)


@given(shape_and_box())
def test_inside_is_what_numpy_would_not_clip(given_: tuple[tuple[int, ...], Box]) -> None:
    shape, box = given_
    assert box.inside(shape)
    for axis in range(len(shape)):
        grown = list(box.sizes)
        grown[axis] = shape[axis] - box.offsets[axis] + 1
        assert not Box(box.offsets, tuple(grown)).inside(shape)
    assert not Box((*box.offsets, 0), (*box.sizes, 1)).inside(shape)


def test_a_box_whose_axes_disagree_can_still_be_named() -> None:
    assert str(Box((0, 1), (2,))) == "at [0, 1] of size [2]"
    assert str(Box((0, 1), (2, 3))) == "[0:2, 1:4]"

"""Boxes: axis-aligned pieces of one tensor in checkpoint coordinates, and whether a set of them tiles it.

A box is (offsets, sizes) within a global shape, as in torch DCP. A 0-d tensor has one box with no axes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from weight_store.errors import LayoutError

Dims = tuple[int, ...]

_FEW = 8
"""Boxes that are compared pair by pair sooner than parted again."""
_MAX_PARTS = 1 << 18
"""Boxes, and parts of boxes that were in the way of a cut, which are looked at before a tangle is given up."""


class Box(NamedTuple):
    """``offsets[d] .. offsets[d] + sizes[d]`` on each axis ``d``. A tuple, because a model may have a million."""

    offsets: Dims
    sizes: Dims

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def inside(self, shape: Dims) -> bool:
        """True if the box lies within ``shape`` and has as many axes."""
        if not len(self.offsets) == len(self.sizes) == len(shape):
            return False
        if self.sizes == shape:
            return not any(self.offsets)
        for offset, size, extent in zip(self.offsets, self.sizes, shape, strict=True):
            if offset < 0 or size < 0 or offset + size > extent:
                return False
        return True

    def overlaps(self, other: Box) -> bool:
        """True if both share at least one element."""
        return (
            all(
                a < b + n and b < a + m
                for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
            )
            and self.elements > 0
            and other.elements > 0
        )

    def __str__(self) -> str:
        if len(self.offsets) != len(self.sizes):
            return f"at {list(self.offsets)} of size {list(self.sizes)}"
        return "[" + ", ".join(f"{o}:{o + s}" for o, s in zip(self.offsets, self.sizes, strict=True)) + "]"


def whole(shape: Dims) -> Box:
    """The box that is all of a tensor of ``shape``."""
    return Box((0,) * len(shape), shape)


class Span(NamedTuple):
    """``rows`` runs of ``run`` consecutive elements; run ``r`` starts at ``start + r * stride`` (elements).

    A box whose elements do not form one regular comb of runs needs several spans.
    """

    start: int
    run: int
    rows: int
    stride: int


def spans(box: Box, shape: Dims) -> list[Span]:
    """Where a box's elements lie in the row-major tensor, in the box's own row-major order.

    Every element of the box appears in exactly one span, in order. A box of whole rows is one run.
    """
    elements = box.elements
    if elements == 0:
        return []
    if box.sizes[1:] == shape[1:]:  # whole rows, as most pieces of most models
        start = box.offsets[0] * (elements // box.sizes[0]) if shape else 0
        return [Span(start, elements, 1, elements)]
    starts = [sum(offset * stride for offset, stride in zip(box.offsets, _strides(shape), strict=True))]
    (run, _), *outer = _loops(box, shape)
    if not outer:
        return [Span(starts[0], run, 1, run)]
    (rows, stride), *outer = outer
    for size, step in reversed(outer):
        starts = [start + i * step for start in starts for i in range(size)]
    return [Span(start, run, rows, stride) for start in starts]


def span_count(box: Box, shape: Dims) -> int:
    """Length of :func:`spans` without making it: what a hostile box would cost."""
    return math.prod(size for size, _ in _loops(box, shape)[2:]) if box.elements else 0


def _loops(box: Box, shape: Dims) -> list[tuple[int, int]]:
    """The fewest nested loops (size, stride) over a box, innermost first; the first one has stride 1."""
    loops = [(1, 1)]
    for size, stride in zip(reversed(box.sizes), reversed(_strides(shape)), strict=True):
        inner_size, inner_stride = loops[-1]
        if size == 1:
            continue
        if stride == inner_size * inner_stride:
            loops[-1] = (inner_size * size, inner_stride)
        else:
            loops.append((size, stride))
    return loops


def _strides(shape: Dims) -> Dims:
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


def split(box: Box, max_elements: int) -> list[Box]:
    """Cut a box into boxes of at most ``max_elements``, each contiguous in the box's own row-major order."""
    if box.elements <= max_elements:
        return [box]
    axis = next(d for d, size in enumerate(box.sizes) if size > 1)
    per_row = box.elements // box.sizes[axis]
    rows = max(1, max_elements // per_row)
    pieces: list[Box] = []
    for first in range(0, box.sizes[axis], rows):
        count = min(rows, box.sizes[axis] - first)
        part = Box(
            _with(box.offsets, axis, box.offsets[axis] + first),
            _with(box.sizes, axis, count),
        )
        pieces.extend(split(part, max_elements))
    return pieces


def _with(dims: Dims, axis: int, value: int) -> Dims:
    return (*dims[:axis], value, *dims[axis + 1 :])


def is_one_cut(boxes: Sequence[tuple[Dims, Dims]], shape: Dims) -> bool:
    """True if ``boxes`` (offsets, sizes) are all of a tensor, or tile it cut across one axis, as usual shardings do.

    False says nothing. Cheap, so that what costs more is done for other tensors only.
    """
    if not boxes:
        return False
    offsets, sizes = boxes[0]
    if not len(offsets) == len(sizes) == len(shape):
        return False
    if sizes == shape:
        return len(boxes) == 1 and not any(offsets)
    axis = next(d for d, size in enumerate(sizes) if size != shape[d])
    before, after = (0,) * axis, (0,) * (len(shape) - axis - 1)
    end = 0
    last: Dims | None = None
    for offsets, sizes in sorted(boxes):
        if offsets != (*before, end, *after):
            return False
        if sizes != last:  # mostly all are of one size
            if len(sizes) != len(shape) or sizes[:axis] != shape[:axis] or sizes[axis + 1 :] != shape[axis + 1 :]:
                return False
            last = sizes
        end += sizes[axis]
    return end == shape[axis]


def find_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Return the indices of two overlapping boxes of one tensor, the smaller first, or None.

    Cuts along planes that no box crosses, as every usual sharding allows (n log n); only what no such plane parts is
    cut through boxes. ``LayoutError`` where that does not end: no sharding looks so.
    """
    solid = [i for i, box in enumerate(boxes) if box.elements]
    axes = len(boxes[0].sizes) if boxes else 0
    pending = [(solid, 0, 0)]
    while pending:
        chosen, axis, uncut = pending.pop()
        if len(chosen) < 2:
            continue
        if uncut == axes:
            pair = _search(boxes, chosen)
            if pair is not None:
                return pair
            continue
        slabs = _slabs(boxes, chosen, axis)
        # A slab cannot be cut again along the axis that made it, so that axis counts as tried.
        tried = uncut + 1 if len(slabs) == 1 else 1
        pending.extend((slab, (axis + 1) % axes, tried) for slab in slabs)
    return None


def _slabs(boxes: Sequence[Box], chosen: Sequence[int], axis: int) -> list[list[int]]:
    """Part ``chosen`` at the planes across ``axis`` that no box crosses."""
    slabs: list[list[int]] = []
    end = 0
    for i in sorted(chosen, key=lambda i: boxes[i].offsets[axis]):
        first = boxes[i].offsets[axis]
        if first >= end or not slabs:
            slabs.append([])
        slabs[-1].append(i)
        end = max(end, first + boxes[i].sizes[axis])
    return slabs


def _search(boxes: Sequence[Box], chosen: Sequence[int]) -> tuple[int, int] | None:
    """Halve the boxes, cutting those in the way in two, until few are left to be compared pair by pair."""
    pending = [[(i, boxes[i]) for i in chosen]]
    work = 0
    while pending:
        parts = pending.pop()
        work += len(parts)
        if work > _MAX_PARTS + 24 * len(chosen):
            raise LayoutError(f"{len(chosen)} boxes of one tensor are too entangled to be compared")
        for (i, a), (j, b) in itertools.combinations(parts[:_FEW], 2):
            if a.overlaps(b):
                return (min(i, j), max(i, j))
        if len(parts) > _FEW:
            pending.extend(_cut(parts))
    return None


def _cut(parts: Sequence[tuple[int, Box]]) -> list[list[tuple[int, Box]]]:
    """Two lists, on either side of the middle of the faces of that axis on which the fewest boxes are in the way."""
    best: list[list[tuple[int, Box]]] = []
    for axis in range(len(parts[0][1].sizes)):
        faces = sorted(face for _, box in parts for face in (box.offsets[axis], box.offsets[axis] + box.sizes[axis]))
        inner = [face for face in faces if faces[0] < face < faces[-1]]
        if not inner:
            continue
        at = inner[len(inner) // 2]
        low = [(i, _clip(box, axis, faces[0], at)) for i, box in parts if box.offsets[axis] < at]
        high = [(i, _clip(box, axis, at, faces[-1])) for i, box in parts if box.offsets[axis] + box.sizes[axis] > at]
        if not best or len(low) + len(high) < sum(map(len, best)):
            best = [low, high]
    return best


def _clip(box: Box, axis: int, start: int, end: int) -> Box:
    low = max(box.offsets[axis], start)
    high = min(box.offsets[axis] + box.sizes[axis], end)
    return Box(_with(box.offsets, axis, low), _with(box.sizes, axis, high - low))


def find_hole(boxes: Iterable[Box], shape: Dims) -> Box | None:
    """Return a box of ``shape`` that disjoint ``boxes`` leave uncovered, or None if they tile it (n log n)."""
    region, inside = whole(shape), [box for box in boxes if box.elements]
    if sum(box.elements for box in inside) == region.elements:
        return None
    while inside:
        # Disjoint boxes that do not fill a part leave a hole in it. Each cut halves the faces left on its axis.
        low, high = _halves(region, inside)
        region = low if sum(_common(low, box).elements for box in inside) < low.elements else high
        inside = [part for part in (_common(region, box) for box in inside) if part.elements]
    return region


def _halves(region: Box, inside: Sequence[Box]) -> tuple[Box, Box]:
    """Cut at the middle one of the faces that lie within ``region``, across the axis that has most of them."""
    faces: list[list[int]] = []
    for axis, (start, size) in enumerate(zip(region.offsets, region.sizes, strict=True)):
        found = {face for box in inside for face in (box.offsets[axis], box.offsets[axis] + box.sizes[axis])}
        faces.append(sorted(found - {start, start + size}))
    axis = max(range(len(faces)), key=lambda d: len(faces[d]))
    cut = faces[axis][len(faces[axis]) // 2]
    start, size = region.offsets[axis], region.sizes[axis]
    low = Box(region.offsets, _with(region.sizes, axis, cut - start))
    high = Box(_with(region.offsets, axis, cut), _with(region.sizes, axis, start + size - cut))
    return low, high


def _common(a: Box, b: Box) -> Box:
    """The box that both share; without elements if they share none."""
    low = tuple(map(max, a.offsets, b.offsets))
    high = (min(o + s, p + t) for o, s, p, t in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True))
    return Box(low, tuple(max(0, end - start) for start, end in zip(low, high, strict=True)))

"""Boxes: axis-aligned pieces of one tensor in checkpoint coordinates, and whether a set of them tiles it.

A box is (offsets, sizes) within a global shape, as in torch DCP. A 0-d tensor has one box with no axes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Dims = tuple[int, ...]


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """``offsets[d] .. offsets[d] + sizes[d]`` on each axis ``d``."""

    offsets: Dims
    sizes: Dims

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def inside(self, shape: Dims) -> bool:
        """True if the box lies within ``shape`` and has as many axes."""
        return len(self.offsets) == len(self.sizes) == len(shape) and all(
            offset >= 0 and size >= 0 and offset + size <= extent
            for offset, size, extent in zip(self.offsets, self.sizes, shape, strict=True)
        )

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
        return "[" + ", ".join(f"{o}:{o + s}" for o, s in zip(self.offsets, self.sizes, strict=True)) + "]"


def whole(shape: Dims) -> Box:
    """The box that is all of a tensor of ``shape``."""
    return Box((0,) * len(shape), shape)


class Span(NamedTuple):
    """``rows`` runs of ``run`` consecutive elements; run ``r`` starts at ``start + r * stride`` (elements).

    A box with more than two non-trivial axes needs several spans.
    """

    start: int
    run: int
    rows: int
    stride: int


def spans(box: Box, shape: Dims) -> list[Span]:
    """Where a box's elements lie in the row-major tensor, in the box's own row-major order.

    Every element of the box appears in exactly one span, in order. A box of whole rows is one run.
    """
    if box.elements == 0:
        return []
    strides = _strides(shape)
    start = sum(o * s for o, s in zip(box.offsets, strides, strict=True))
    axis = len(shape)  # axes from here on are whole, hence contiguous
    run = 1
    while axis > 0 and box.sizes[axis - 1] == shape[axis - 1]:
        axis -= 1
        run *= shape[axis]
    if axis == 0:
        return [Span(start, run, 1, run)]
    axis -= 1
    run *= box.sizes[axis]
    if axis == 0:
        return [Span(start, run, 1, run)]
    rows, stride = box.sizes[axis - 1], strides[axis - 1]
    starts = [start]
    for outer in range(axis - 1):
        starts = [s + i * strides[outer] for s in starts for i in range(box.sizes[outer])]
    return [Span(s, run, rows, stride) for s in starts]


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


def find_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Return the indices of two overlapping boxes, or None. Sweeps the first axis that separates best."""
    if len(boxes) < 2 or not boxes[0].sizes:
        return (0, 1) if len(boxes) > 1 else None
    axis = max(range(len(boxes[0].sizes)), key=lambda d: len({box.offsets[d] for box in boxes}))
    order = sorted(range(len(boxes)), key=lambda i: boxes[i].offsets[axis])
    active: list[int] = []
    for i in order:
        here = boxes[i].offsets[axis]
        active = [j for j in active if boxes[j].offsets[axis] + boxes[j].sizes[axis] > here]
        for j in active:
            if boxes[i].overlaps(boxes[j]):
                return (min(i, j), max(i, j))
        active.append(i)
    return None


def find_hole(boxes: Iterable[Box], shape: Dims) -> Box | None:
    """Return a box of ``shape`` that disjoint ``boxes`` leave uncovered, or None if they tile it."""
    holes = [whole(shape)]
    for box in boxes:
        holes = [rest for hole in holes for rest in _minus(hole, box)]
    return next((hole for hole in holes if hole.elements), None)


def _minus(hole: Box, box: Box) -> list[Box]:
    if not hole.overlaps(box):
        return [hole]
    rest: list[Box] = []
    offsets, sizes = hole.offsets, hole.sizes
    for axis in range(len(sizes)):
        low = max(offsets[axis], box.offsets[axis])
        high = min(offsets[axis] + sizes[axis], box.offsets[axis] + box.sizes[axis])
        if offsets[axis] < low:
            rest.append(Box(offsets, _with(sizes, axis, low - offsets[axis])))
        if high < offsets[axis] + sizes[axis]:
            rest.append(Box(_with(offsets, axis, high), _with(sizes, axis, offsets[axis] + sizes[axis] - high)))
        offsets, sizes = _with(offsets, axis, low), _with(sizes, axis, high - low)
    return rest

"""From groups to bytes in files and back. Pure: arrays and arithmetic.

A group's elements are the concatenation of its pieces; each piece is one or more runs of a tensor in a file. A model of
a million pieces has a million of them, and each is looked at twice a step: so they are rows of an array.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from codec import Change, apply_change
from codec.dtypes import BITS_OF_SIZE, Bits
from rollout_agent.filetable import FileTable
from weight_store.boxes import spans
from weight_store.layout import Group

_MANY = 500
"""Changes of one segment from which on the kernel, which stores without holding the GIL, is worth a call for each."""

Segments = NDArray[np.int64]
"""One row a segment, in the group's order, with the fields of :class:`Segment` as columns."""


class Segment(NamedTuple):
    """Elements ``start ..`` of a group: ``rows`` runs of ``run`` elements, ``stride`` elements apart, in file ``file``.

    The first run begins at element ``at`` of the file, were it all of the group's item size. One row means contiguous.
    """

    start: int
    file: int
    at: int
    run: int
    rows: int
    stride: int


def segments_of(group: Group, table: FileTable) -> Segments:
    """Where a group's elements lie, in the group's order; neighbours that touch are joined."""
    found: list[tuple[int, int, int, int, int, int]] = []
    size = group.itemsize
    end = (-1, -1)  # file and element after the last segment, if that is contiguous
    for tensor, box, start in group.pieces:
        place = table.places[tensor.name]
        first = place.offset // size
        for offset, run, rows, stride in spans(box, tensor.shape):
            at = first + offset
            if rows == 1 and (place.file, at) == end:
                joined = found[-1]
                found[-1] = (*joined[:3], joined[3] + run, 1, joined[3] + run)
            else:
                found.append((start, place.file, at, run, rows, stride))
            end = (place.file, at + run) if rows == 1 else (-1, -1)
            start += run * rows
    return np.array(found, np.int64).reshape(-1, len(Segment._fields))


def each(segments: Segments) -> Iterator[Segment]:
    """The rows, one by one."""
    return map(Segment._make, segments.tolist())


def view(elements: Bits, segment: Segment) -> Bits:
    """The segment as it lies in a file: 1-D if contiguous, else 2-D ``[rows, run]``; shares the file's memory."""
    _, _, at, run, rows, stride = segment
    if rows == 1:
        return elements[at : at + run]
    flat = elements[at : at + (rows - 1) * stride + run]
    strides = (stride * flat.itemsize, flat.itemsize)
    return as_strided(flat, (rows, run), strides, writeable=flat.flags.writeable)


def elements_of(data: NDArray[np.uint8], itemsize: int) -> Bits:
    """A file's bytes as elements of ``itemsize`` bytes, to which its tensors are aligned; without a rest at the end."""
    return data[: data.size - data.size % itemsize].view(BITS_OF_SIZE[itemsize])


def gather(files: Sequence[NDArray[np.uint8]], segments: Segments, group: Group) -> Bits:
    """The group's bits, read-only: a view where they are one contiguous range, else a copy."""
    elements = {file: elements_of(files[file], group.itemsize) for file in set(segments[:, 1].tolist())}
    if len(segments) == 1 and segments[0, 4] == 1:
        (segment,) = each(segments)
        bits = view(elements[segment.file], segment)
    else:
        bits = np.empty(group.elements, BITS_OF_SIZE[group.itemsize])
        for segment in each(segments):
            source = view(elements[segment.file], segment)
            part = bits[segment.start : segment.start + source.size]
            part.reshape(source.shape)[...] = source
    bits = bits.view()
    bits.flags.writeable = False
    return bits


def by_file(segments: Segments) -> Iterator[tuple[int, Segments]]:
    """The rows of each file, with its number."""
    for file in sorted(set(segments[:, 1].tolist())):
        yield file, segments[segments[:, 1] == file]


def store(data: NDArray[np.uint8], segments: Segments, itemsize: int, change: Change) -> None:
    """Store the parts of a group's change that fall into ``segments`` into the bytes of their file."""
    elements = elements_of(data, itemsize)
    if change.whole is not None:
        for segment in each(segments):
            target = view(elements, segment)
            target[...] = change.whole[segment.start : segment.start + target.size].reshape(target.shape)
        return
    starts = segments[:, 0]
    lows, highs = np.searchsorted(change.index, (starts, starts + segments[:, 3] * segments[:, 4]))
    counts = highs - lows
    few = change.index.size <= _MANY * len(segments)
    if few and (segments[:, 4] == 1).all() and counts.sum() == highs[-1] - lows[0]:
        found = slice(lows[0], highs[-1])
        elements[change.index[found] + np.repeat(segments[:, 2] - starts, counts)] = change.bits[found]
        return
    for segment, low, high in zip(each(segments), lows.tolist(), highs.tolist(), strict=True):
        index, bits = change.index[low:high] - np.uint32(segment.start), change.bits[low:high]
        target = view(elements, segment)
        if segment.rows > 1:
            target[index // segment.run, index % segment.run] = bits
        elif index.size > _MANY:
            apply_change(target, Change(index, bits, None, b""))
        else:
            target[index] = bits


def copy(target: NDArray[np.uint8], source: NDArray[np.uint8], segments: Segments, itemsize: int) -> None:
    """Copy what ``segments`` cover from one file's bytes to another's."""
    to, of = elements_of(target, itemsize), elements_of(source, itemsize)
    for segment in each(segments):
        view(to, segment)[...] = view(of, segment)

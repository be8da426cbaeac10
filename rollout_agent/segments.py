"""From groups to bytes in files and back. Pure: arrays and arithmetic.

A group's elements are the concatenation of its pieces; each piece is one or more runs of a tensor in a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from codec import Change, apply_change
from codec.dtypes import BITS_OF_SIZE, Bits
from rollout_agent.filetable import FileTable
from weight_store.boxes import spans
from weight_store.layout import Group


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements ``start ..`` of a group: ``rows`` runs of ``run`` elements, ``stride`` elements apart, in file ``file``.

    The first run begins at byte ``offset`` of the file. One row means contiguous.
    """

    start: int
    file: int
    offset: int
    run: int
    rows: int
    stride: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.run * self.rows


def segments_of(group: Group, table: FileTable) -> tuple[Segment, ...]:
    """Where a group's elements lie, in the group's order; neighbours that touch are joined."""
    found: list[Segment] = []
    size = group.itemsize
    for piece in group.pieces:
        place = table.places[piece.tensor.name]
        at = piece.start
        for span in spans(piece.box, piece.tensor.shape):
            part = Segment(at, place.file, place.offset + span.start * size, span.run, span.rows, span.stride)
            at += part.elements
            if found and _touch(found[-1], part, size):
                found[-1] = replace(found[-1], run=found[-1].run + part.run)
            else:
                found.append(part)
    return tuple(found)


def _touch(a: Segment, b: Segment, size: int) -> bool:
    return a.rows == b.rows == 1 and a.file == b.file and a.offset + a.run * size == b.offset


def view(data: NDArray[np.uint8], segment: Segment, itemsize: int) -> Bits:
    """The segment as it lies in a file: 1-D if contiguous, else 2-D ``[rows, run]``; shares the file's memory."""
    dtype = BITS_OF_SIZE[itemsize]
    end = segment.offset + ((segment.rows - 1) * segment.stride + segment.run) * itemsize
    flat = data[segment.offset : end].view(dtype)
    if segment.rows == 1:
        return flat
    strides = (segment.stride * itemsize, itemsize)
    return as_strided(flat, (segment.rows, segment.run), strides, writeable=flat.flags.writeable)


def gather(files: Sequence[NDArray[np.uint8]], segments: Sequence[Segment], group: Group) -> Bits:
    """The group's bits, read-only: a view where they are one contiguous range, else a copy."""
    if len(segments) == 1 and segments[0].rows == 1:
        bits = view(files[segments[0].file], segments[0], group.itemsize)
    else:
        bits = np.empty(group.elements, BITS_OF_SIZE[group.itemsize])
        for segment in segments:
            part = bits[segment.start : segment.start + segment.elements]
            source = view(files[segment.file], segment, group.itemsize)
            part.reshape(source.shape)[...] = source
    bits = bits.view()
    bits.flags.writeable = False
    return bits


def store(data: NDArray[np.uint8], segment: Segment, itemsize: int, change: Change) -> None:
    """Store the part of a group's change that falls into one segment into its file's bytes."""
    target = view(data, segment, itemsize)
    end = segment.start + segment.elements
    if change.whole is not None:
        target[...] = change.whole[segment.start : end].reshape(target.shape)
        return
    low, high = np.searchsorted(change.index, (segment.start, end))
    index, bits = change.index[low:high] - np.uint32(segment.start), change.bits[low:high]
    if segment.rows == 1:
        apply_change(target, Change(index, bits, None, b""))
    else:
        target[index // segment.run, index % segment.run] = bits

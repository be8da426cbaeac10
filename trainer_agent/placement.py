"""Where a rank's weights lie in a slot, and which part of each piece goes where. Pure.

A slot holds the groups that the rank owns, in layout order, each starting at a multiple of ``ALIGN_BYTES``: a group is
one contiguous range, so the sidecar codes it without gathering.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trainer_agent.errors import InvalidPieces, PiecesChanged
from weight_store.boxes import Box, Dims
from weight_store.layout import Group
from weight_store.offer import Offer

ALIGN_BYTES = 64


@dataclass(frozen=True, slots=True)
class PlacedGroup:
    """A group of this rank and where it starts in the slot (bytes)."""

    group: Group
    start: int

    @property
    def end(self) -> int:
        """One past its last byte."""
        return self.start + self.group.nbytes


def place_groups(owned: Iterable[Group]) -> tuple[PlacedGroup, ...]:
    """Lay the groups one after the other."""
    placed: list[PlacedGroup] = []
    end = 0
    for group in owned:
        placed.append(PlacedGroup(group, -(-end // ALIGN_BYTES) * ALIGN_BYTES))
        end = placed[-1].end
    return tuple(placed)


def slot_bytes(placed: Sequence[PlacedGroup]) -> int:
    """Size of a slot; never 0, because nothing cannot be mapped."""
    return max(ALIGN_BYTES, placed[-1].end if placed else 0)


@dataclass(frozen=True, slots=True)
class Copy:
    """Elements ``offsets .. offsets + sizes`` of a piece go, row-major, to byte ``start`` of the slot."""

    offsets: Dims
    sizes: Dims
    start: int
    frozen: bool


@dataclass(frozen=True, slots=True)
class Known:
    """What one of this rank's pieces was at the first publication, and what of it is to be copied."""

    dtype: str
    copies: tuple[Copy, ...]


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """The rank's pieces as fixed by its offer and the layout."""

    shapes: Mapping[str, Dims]
    pieces: Mapping[tuple[str, Box], Known]
    frozen: frozenset[str]

    def find(self, name: str, dtype: str, shape: Dims, box: Box) -> Known:
        """The piece's plan. Raises ``PiecesChanged`` naming what differs from the first publication."""
        if name not in self.shapes:
            raise PiecesChanged(f"{name} was added since the first publication; {_SAME}")
        if self.shapes[name] != shape:
            raise PiecesChanged(f"{name} changed shape from {list(self.shapes[name])} to {list(shape)}; {_SAME}")
        known = self.pieces.get((name, box))
        if known is None:
            raise PiecesChanged(f"this rank offers {box} of {name}, a box it did not offer before; {_SAME}")
        if known.dtype != dtype:
            raise PiecesChanged(f"{name} changed dtype from {known.dtype} to {dtype}; {_SAME}")
        return known

    def check_complete(self, seen: set[tuple[str, Box]]) -> None:
        """Raise ``PiecesChanged`` if a piece to be copied did not come. Frozen ones may stay away."""
        missing = [
            f"{box} of {name}"
            for (name, box), known in self.pieces.items()
            if (name, box) not in seen and known.copies and name not in self.frozen
        ]
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise PiecesChanged(f"{', '.join(missing[:3])}{more} is missing from this publication; {_SAME}")


_SAME = "a launch publishes the same pieces every time"


def plan_copies(offer: Offer, placed: Sequence[PlacedGroup]) -> CopyPlan:
    """Find for every piece of the offer what of it this rank owns, and where that goes."""
    offered: dict[str, list[Box]] = defaultdict(list)
    for name, box in zip(offer.names, offer.boxes(), strict=True):
        offered[name].append(box)
    copies: dict[tuple[str, Box], list[Copy]] = {(name, box): [] for name, boxes in offered.items() for box in boxes}
    for slot in placed:
        for piece in slot.group.pieces:
            if not piece.box.elements:
                continue
            name = piece.tensor.name
            exact = (name, piece.box) in copies
            source = piece.box if exact else _containing(name, piece.box, offered[name])
            inner = tuple(a - b for a, b in zip(piece.box.offsets, source.offsets, strict=True))
            start = slot.start + piece.start * piece.tensor.itemsize
            copies[name, source].append(Copy(inner, piece.box.sizes, start, piece.tensor.frozen))
    dtypes = dict(zip(offer.names, offer.dtypes, strict=True))
    return CopyPlan(
        shapes=dict(zip(offer.names, offer.shapes, strict=True)),
        pieces={key: Known(dtypes[key[0]], tuple(found)) for key, found in copies.items()},
        frozen=frozenset(offer.frozen),
    )


def _containing(name: str, box: Box, offered: Sequence[Box]) -> Box:
    for candidate in offered:
        if all(
            o <= a and a + n <= o + m
            for o, m, a, n in zip(candidate.offsets, candidate.sizes, box.offsets, box.sizes, strict=True)
        ):
            return candidate
    raise InvalidPieces(f"the layout gives this rank {box} of {name}, which it did not offer")

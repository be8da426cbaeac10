"""From offers to a layout: one owner for each box, balanced by bytes, then groups of one block of layers each.

Pure and deterministic: every coordinator computes the same layout from the same offers.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from pydantic import ValidationError

from weight_store.boxes import Box, Dims, find_hole, find_overlap, is_one_cut, split
from weight_store.errors import LayoutError
from weight_store.layout import Layout
from weight_store.offer import Offer

GROUP_BYTES = 32 << 20
"""A group is closed once it holds this much (DESIGN: chunks of 16 M BF16 weights cost 6 % less than 1 M)."""
PIECE_BYTES = 32 << 20
"""Larger boxes are cut, so that a group stays below GROUP_BYTES + PIECE_BYTES + a remainder of the same size."""
BLOCK_BYTES = 16 << 20
"""Layers share groups while an owner's part of one is smaller on average: each group pays about 130 bytes for a model,
states and a digest, which half a GROUP_BYTES carries for at most 3 % of any delta and a few MiB do not."""

MAX_MODEL_BYTES = 1 << 46
"""64 TiB, some thirty times the largest model known: bounds the pieces that a short offer can ask us to make."""

_INTEGER = re.compile(r"(\d+)")


_Kind = tuple[str, int, Dims]
"""Dtype, item size and shape."""


@dataclass(slots=True)
class _Offered:
    kind: _Kind
    first_rank: int
    ranks: dict[Box, list[int]] = field(default_factory=dict)

    @property
    def dtype(self) -> str:
        return self.kind[0]

    @property
    def itemsize(self) -> int:
        return self.kind[1]

    @property
    def shape(self) -> Dims:
        return self.kind[2]


class _Owned(NamedTuple):
    tensor: int
    owner: int
    box: Box
    nbytes: int


def layer_order(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key that orders names naturally: ``layers.2`` before ``layers.10``."""
    return tuple(map(_part_order, filter(None, _INTEGER.split(name))))


@lru_cache(maxsize=1 << 16)
def _part_order(part: str) -> tuple[int, int, str]:
    return (0, int(part), "") if part.isdigit() else (1, 0, part)


def layer_of(name: str) -> str:
    """The layer a tensor belongs to: its name up to the first integer component, or itself's module."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return ".".join(parts[:-1])


def stack_of(layer: str) -> tuple[str, int] | None:
    """The stack that a layer belongs to and its number in it: ``model.layers`` and 3; None for a layer without one."""
    stack, _, number = layer.rpartition(".")
    return (stack, int(number)) if number.isdigit() else None


def layers_in_a_block(layers: int, owners: int, nbytes: int) -> int:
    """How many consecutive layers of a stack share groups: ``nbytes`` in ``layers`` layers, spread over ``owners``.

    A power of two, so that the blocks of one layout nest in those of another: a selection of layers that is closed
    under several layouts is that of the coarsest.
    """
    joined = 1
    while joined < layers and joined * nbytes < BLOCK_BYTES * layers * owners:
        joined *= 2
    return joined


def resolve_layout(offers: Sequence[Offer]) -> Layout:
    """Settle ownership of all ranks' boxes and form groups. ``offers[r]`` is rank r's.

    Raises ``LayoutError`` with the tensor's name and the ranks for: contradicting shape or dtype, partial overlap,
    a hole, an alias of an unknown tensor, offers of different worlds, no tensor at all, or more than any model has.
    """
    _check_world(offers)
    offered = _collect(offers)
    _check_model(offered)
    names = sorted(offered, key=lambda name: (layer_order(name), name))
    solid = [_solid(offered[name]) for name in names]
    _check_boxes(names, offered, solid)
    frozen = _frozen(offers, offered)
    owned = _assign([offered[name].itemsize for name in names], solid)
    order, group_owner, group_start = _form_groups(names, offered, frozen, owned)
    try:
        return Layout(
            world_size=len(offers),
            names=tuple(names),
            dtypes=tuple(offered[name].dtype for name in names),
            itemsizes=tuple(offered[name].itemsize for name in names),
            shapes=tuple(offered[name].shape for name in names),
            frozen=tuple(i for i, name in enumerate(names) if name in frozen),
            aliases=_aliases(offers, offered),
            piece_tensor=tuple(piece.tensor for piece in order),
            piece_offsets=tuple(piece.box.offsets for piece in order),
            piece_sizes=tuple(piece.box.sizes for piece in order),
            group_owner=tuple(group_owner),
            group_start=tuple(group_start),
        )
    except ValidationError as error:
        raise LayoutError(f"the offers make no layout: {error.errors()[0]['msg']}") from None


def _check_world(offers: Sequence[Offer]) -> None:
    for rank, offer in enumerate(offers):
        if offer.rank != rank or offer.world_size != len(offers) or offer.term != offers[0].term:
            raise LayoutError(
                f"rank {offer.rank} offers for a world of {offer.world_size} in term {offer.term}, "
                f"expected rank {rank} of {len(offers)} in term {offers[0].term}"
            )


def _collect(offers: Sequence[Offer]) -> dict[str, _Offered]:
    found: dict[str, _Offered] = {}
    for offer in offers:
        rank = offer.rank
        kinds = zip(offer.dtypes, offer.itemsizes, offer.shapes, strict=True)
        for name, kind, box in zip(offer.names, kinds, offer.boxes(), strict=True):
            known = found.get(name)
            if known is None:
                known = found[name] = _Offered(kind, rank)
            elif known.kind != kind:
                raise LayoutError(
                    f"rank {known.first_rank} offers {name} as {known.dtype} {list(known.shape)}, "
                    f"rank {rank} as {kind[0]} {list(kind[2])}"
                )
            holders = known.ranks.get(box)
            if holders is None:
                known.ranks[box] = [rank]
            elif holders[-1] == rank:
                raise LayoutError(f"rank {rank} offers box {box} of {name} twice")
            else:
                holders.append(rank)
    return found


def _check_model(offered: dict[str, _Offered]) -> None:
    if not offered:
        raise LayoutError("no rank offers a tensor: publish at least one")
    total = sum(math.prod(about.shape) * about.itemsize for about in offered.values())
    if total > MAX_MODEL_BYTES:
        raise LayoutError(f"the offered tensors have {total} bytes, more than the {MAX_MODEL_BYTES} a run may have")


_Solid = dict[Box, list[int]]
"""The ranks that hold each box of a tensor."""


def _solid(offered: _Offered) -> _Solid:
    """The boxes that hold elements; of a tensor without elements, one box, so that somebody owns the tensor."""
    ranks = offered.ranks
    if 0 not in offered.shape and not any(0 in sizes for _, sizes in ranks):
        return ranks
    solid = {box: holders for box, holders in ranks.items() if box.elements}
    first = min(ranks)
    return solid or {first: ranks[first]}


def _check_boxes(names: Sequence[str], offered: dict[str, _Offered], solid: Sequence[_Solid]) -> None:
    """Once for all tensors of one shape that are cut alike, as those of most layers are."""
    checked: set[tuple[Dims, tuple[Box, ...]]] = set()
    for name, boxes in zip(names, solid, strict=True):
        cut = offered[name].shape, tuple(boxes)
        if cut not in checked:
            _check_cut(name, offered[name], *cut)
            checked.add(cut)


def _check_cut(name: str, offered: _Offered, shape: Dims, boxes: Sequence[Box]) -> None:
    if is_one_cut(boxes, shape):
        return
    try:
        pair = find_overlap(boxes)
    except LayoutError as error:
        raise LayoutError(f"{name}: {error}") from None
    if pair is not None:
        a, b = boxes[pair[0]], boxes[pair[1]]
        raise LayoutError(
            f"{name}: box {a} of rank {offered.ranks[a][0]} and box {b} of rank {offered.ranks[b][0]} "
            "overlap without being identical; offer each element from identical boxes or from one rank"
        )
    if sum(box.elements for box in boxes) != Box(shape, shape).elements:
        raise LayoutError(f"{name}: no rank offers {find_hole(boxes, shape)}")


def _frozen(offers: Sequence[Offer], offered: dict[str, _Offered]) -> set[str]:
    frozen_on = [set(offer.frozen) for offer in offers]
    frozen = set().union(*frozen_on)
    for name in sorted(frozen & offered.keys()):
        for rank in sorted({rank for ranks in offered[name].ranks.values() for rank in ranks}):
            if name not in frozen_on[rank]:
                raise LayoutError(f"{name} is frozen on some ranks but not on rank {rank}")
    return frozen & offered.keys()


def _aliases(offers: Sequence[Offer], offered: dict[str, _Offered]) -> dict[str, str]:
    found: dict[str, str] = {}
    for offer in offers:
        for alias, target in offer.aliases.items():
            if found.setdefault(alias, target) != target:
                raise LayoutError(f"{alias} is tied to {found[alias]} and, on rank {offer.rank}, to {target}")
            if target not in offered:
                raise LayoutError(f"{alias} is tied to {target}, which no rank offers")
            if alias in offered:
                raise LayoutError(f"{alias} is offered as a tensor and, on rank {offer.rank}, as tied to {target}")
    return dict(sorted(found.items()))


def _assign(itemsizes: Sequence[int], solid: Sequence[_Solid]) -> list[_Owned]:
    """Sole offerers first, then replicated boxes from large to small to the rank with the least so far."""
    load: dict[int, int] = defaultdict(int)
    owned: list[_Owned] = []
    shared: list[tuple[int, int, Box, list[int]]] = []
    for tensor, (itemsize, boxes) in enumerate(zip(itemsizes, solid, strict=True)):
        for box, ranks in boxes.items():
            nbytes = math.prod(box[1]) * itemsize
            if len(ranks) == 1:
                load[ranks[0]] += nbytes
                owned.append(_Owned(tensor, ranks[0], box, nbytes))
            else:
                shared.append((-nbytes, tensor, box, ranks))
    for minus_nbytes, tensor, box, ranks in sorted(shared):
        owner = min(ranks, key=lambda rank: (load[rank], rank))
        load[owner] -= minus_nbytes
        owned.append(_Owned(tensor, owner, box, -minus_nbytes))
    return owned


def _form_groups(
    names: Sequence[str], offered: dict[str, _Offered], frozen: set[str], owned: Iterable[_Owned]
) -> tuple[list[_Owned], list[int], list[int]]:
    """Return pieces in group order, each group's owner, and each group's first piece."""
    pieces = sorted(owned)
    blocks = _blocks(names, frozen, pieces)
    kinds = [(offered[name].dtype, name in frozen) for name in names]
    buckets: dict[tuple[int, int, str, bool], list[_Owned]] = defaultdict(list)
    for piece in pieces:
        bucket = buckets[blocks[piece.tensor], piece.owner, *kinds[piece.tensor]]
        if piece.nbytes <= PIECE_BYTES:
            bucket.append(piece)
        else:
            bucket.extend(_cut_up(piece, offered[names[piece.tensor]].itemsize))
    order: list[_Owned] = []
    group_owner: list[int] = []
    group_start: list[int] = []
    for key in sorted(buckets):
        for group in _pack(buckets[key]):
            group_owner.append(key[1])
            group_start.append(len(order))
            order.extend(group)
    return order, group_owner, group_start


def _cut_up(piece: _Owned, itemsize: int) -> Iterator[_Owned]:
    for box in split(piece.box, PIECE_BYTES // itemsize):
        yield _Owned(piece.tensor, piece.owner, box, box.elements * itemsize)


@dataclass(slots=True)
class _Stack:
    nbytes: int = 0
    layers: set[int] = field(default_factory=set)
    owners: set[int] = field(default_factory=set)


def _blocks(names: Sequence[str], frozen: set[str], pieces: Sequence[_Owned]) -> list[int]:
    """The block of each tensor, numbered in the order of the layers: the same for all owners and dtypes."""
    trained = [name not in frozen for name in names]
    if sum(piece.nbytes for piece in pieces if trained[piece.tensor]) < 2 * BLOCK_BYTES:
        return [0] * len(names)  # all of the model is less than one group
    places = [stack_of(layer) or (layer, -1) for layer in map(layer_of, names)]
    stacks: dict[str, _Stack] = defaultdict(_Stack)
    stack_at: list[_Stack | None] = []
    for (stack_name, number), counts in zip(places, trained, strict=True):
        stack_at.append(stacks[stack_name] if counts and number >= 0 else None)
        if stack_at[-1]:
            stack_at[-1].layers.add(number)
    for tensor, owner, _, nbytes in pieces:
        stack = stack_at[tensor]
        if stack:
            stack.nbytes += nbytes
            stack.owners.add(owner)
    joined = {name: layers_in_a_block(len(s.layers), len(s.owners), s.nbytes) for name, s in stacks.items()}
    nth: dict[tuple[str, int], int] = {}
    for stack_name, group in itertools.groupby(sorted(set(places)), key=lambda place: place[0]):
        nth |= {place: i // joined.get(stack_name, 1) for i, place in enumerate(group)}
    blocks = [(stack_name, nth[stack_name, number]) for stack_name, number in places]
    order = {block: i for i, block in enumerate(dict.fromkeys(blocks))}
    return [order[block] for block in blocks]


def _pack(pieces: Sequence[_Owned]) -> list[list[_Owned]]:
    """Close a group at GROUP_BYTES; a remainder below that joins the group before it."""
    groups: list[list[_Owned]] = []
    current: list[_Owned] = []
    held = 0
    for piece in pieces:
        current.append(piece)
        held += piece.nbytes
        if held >= GROUP_BYTES:
            groups.append(current)
            current, held = [], 0
    if current and groups:
        groups[-1].extend(current)
    elif current:
        groups.append(current)
    return groups

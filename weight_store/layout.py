"""The layout: which rank owns which pieces of which tensors, and how pieces form groups.

A layout is complete by construction: its pieces tile every tensor exactly (checked on parsing as well as on making).
Groups are the unit of coding, digest and fetch; a group's bytes are the concatenation of its pieces, each row-major.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple, Self

from pydantic import Field, model_validator

from weight_store.boxes import Box, Dims, find_hole, find_overlap, is_one_cut, span_count
from weight_store.errors import LayoutError
from weight_store.offer import Alias, DtypeName, Itemsize, Shape, TensorName, check_tensors
from weight_store.records import Count, Rank, Record
from weight_store.version import WorldSize

MAX_GROUP_BYTES = 96 << 20
"""An agent allocates a few groups at a time; see grouping.py for how groups come to be smaller than this."""
MAX_SPANS = 1 << 20
"""A piece scattered over more combs of runs than this would cost its reader more memory than its weights."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of the checkpoint: HF name, safetensors dtype name, global shape."""

    name: str
    dtype: str
    itemsize: int
    shape: Dims
    frozen: bool

    @property
    def nbytes(self) -> int:
        """Size of the whole tensor in bytes."""
        return Box(self.shape, self.shape).elements * self.itemsize


class PlacedPiece(NamedTuple):
    """A piece and where its first element lies in its group (elements)."""

    tensor: Tensor
    box: Box
    start: int


@dataclass(frozen=True, slots=True)
class Group:
    """Consecutive pieces of one block of layers, one dtype and one owner."""

    index: int
    owner: int
    dtype: str
    itemsize: int
    frozen: bool
    pieces: tuple[PlacedPiece, ...]
    elements: int

    @property
    def nbytes(self) -> int:
        """Size of the group's weights in bytes."""
        return self.elements * self.itemsize


class Layout(Record):
    """``layouts/<sha256 of the JSON>``, packed. Tensors in layer order; pieces in group order."""

    FORMAT: ClassVar[str] = "weightcast.layout"

    world_size: WorldSize
    names: tuple[TensorName, ...]
    dtypes: tuple[DtypeName, ...]
    itemsizes: tuple[Itemsize, ...]
    shapes: tuple[Shape, ...]
    frozen: tuple[Count, ...] = Field(default=(), description="indices of tensors that never change")
    aliases: dict[Alias, TensorName] = Field(default={}, description="tied name -> stored name")
    piece_tensor: tuple[Count, ...]
    piece_offsets: tuple[Shape, ...]
    piece_sizes: tuple[Shape, ...]
    group_owner: tuple[Rank, ...]
    group_start: tuple[Count, ...] = Field(description="index of each group's first piece")

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_layout(self)
        return self

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors in layer order."""
        return tuple(map(self._tensor, range(len(self.names))))

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """Groups in order; ``groups[i].index == i``."""
        return tuple(map(self._group, range(len(self.group_owner))))

    def owned(self, rank: int) -> tuple[Group, ...]:
        """The groups of one rank, in order."""
        return tuple(map(self._group, self.owned_indices.get(rank, ())))

    @cached_property
    def owned_indices(self) -> dict[int, list[int]]:
        """The indices of each rank's groups, in order; of ranks that own any."""
        found: dict[int, list[int]] = {}
        for index, owner in enumerate(self.group_owner):
            found.setdefault(owner, []).append(index)
        return found

    @cached_property
    def group_sizes(self) -> tuple[tuple[int, int], ...]:
        """Elements and bytes of each group, for who needs no more of it."""
        elements = list(map(math.prod, self.piece_sizes))
        sizes: list[tuple[int, int]] = []
        for rows in self.group_rows:
            held = sum(elements[rows])
            sizes.append((held, held * self.itemsizes[self.piece_tensor[rows.start]]))
        return tuple(sizes)

    @cached_property
    def group_rows(self) -> tuple[slice, ...]:
        """The rows of each group in the columns of pieces."""
        ends = (*self.group_start[1:], len(self.piece_tensor)) if self.group_start else ()
        return tuple(map(slice, self.group_start, ends))

    # Made one by one, and once, as they are asked for: a rank needs its own of a million pieces, a coordinator none.

    def _tensor(self, index: int) -> Tensor:
        found = self._tensors.get(index)
        if found is None:
            row = self.names[index], self.dtypes[index], self.itemsizes[index], self.shapes[index]
            found = self._tensors.setdefault(index, Tensor(*row, index in self._frozen))
        return found

    def _group(self, index: int) -> Group:
        found = self._groups.get(index)
        if found is None:
            rows = self.group_rows[index]
            tensors = list(map(self._tensor, self.piece_tensor[rows]))
            boxes = map(Box, self.piece_offsets[rows], self.piece_sizes[rows])
            *starts, end = itertools.accumulate(map(math.prod, self.piece_sizes[rows]), initial=0)
            pieces = tuple(map(PlacedPiece, tensors, boxes, starts))
            kind = tensors[0].dtype, tensors[0].itemsize, tensors[0].frozen
            found = self._groups.setdefault(index, Group(index, self.group_owner[index], *kind, pieces, end))
        return found

    @cached_property
    def _tensors(self) -> dict[int, Tensor]:
        return {}

    @cached_property
    def _groups(self) -> dict[int, Group]:
        return {}

    @cached_property
    def _frozen(self) -> frozenset[int]:
        return frozenset(self.frozen)

    @property
    def elements(self) -> int:
        """Number of weights in the model."""
        return sum(map(math.prod, self.shapes))

    @property
    def nbytes(self) -> int:
        """Size of the model in bytes."""
        return sum(map(operator.mul, map(math.prod, self.shapes), self.itemsizes))


def check_layout(layout: Layout) -> None:
    """``ValueError`` naming the tensor unless columns agree, groups are uniform and pieces tile every tensor."""
    _check_columns(layout)
    check_tensors(layout.names, layout.shapes, layout.itemsizes)
    cuts: list[list[tuple[Dims, Dims]]] = [[] for _ in layout.names]
    for tensor, box in zip(
        layout.piece_tensor, zip(layout.piece_offsets, layout.piece_sizes, strict=True), strict=True
    ):
        cuts[tensor].append(box)
    checked: set[tuple[Dims, tuple[tuple[Dims, Dims], ...]]] = set()
    for name, shape, boxes in zip(layout.names, layout.shapes, cuts, strict=True):
        cut = shape, tuple(boxes)
        if cut not in checked:  # tensors of one shape are mostly cut alike
            if not is_one_cut(boxes, shape):
                _check_tiling(name, shape, [Box(*box) for box in boxes])
            checked.add(cut)
    _check_groups(layout)


def _check_columns(layout: Layout) -> None:
    tensors, pieces, groups = len(layout.names), len(layout.piece_tensor), len(layout.group_owner)
    if any(len(c) != tensors for c in (layout.dtypes, layout.itemsizes, layout.shapes)):
        raise ValueError("tensor columns differ in length")
    if any(len(c) != pieces for c in (layout.piece_offsets, layout.piece_sizes)):
        raise ValueError("piece columns differ in length")
    if len(set(layout.names)) != tensors:
        raise ValueError("a tensor name appears twice")
    if any(t >= tensors for t in (*layout.piece_tensor, *layout.frozen)):
        raise ValueError("a piece or frozen entry names a tensor that is not there")
    starts = (*layout.group_start, pieces)
    if len(layout.group_start) != groups or starts[0] != 0:
        raise ValueError("groups do not start at the first piece")
    if any(a >= b for a, b in itertools.pairwise(starts)):
        raise ValueError("an empty group, or groups out of order")
    if any(owner >= layout.world_size for owner in layout.group_owner):
        raise ValueError("a group is owned by a rank outside the world size")
    known = set(layout.names)
    for alias, target in layout.aliases.items():
        if alias in known or target not in known:
            raise ValueError(f"alias {alias} -> {target} does not lead from a new name to a stored tensor")


def _check_tiling(name: str, shape: Dims, pieces: list[Box]) -> None:
    outside = next((box for box in pieces if not box.inside(shape)), None)
    if outside is not None:
        raise ValueError(f"piece {outside} of {name} lies outside its shape {list(shape)}")
    scattered = next((box for box in pieces if len(shape) > 2 and span_count(box, shape) > MAX_SPANS), None)
    if scattered is not None:
        raise ValueError(f"piece {scattered} of {name} is scattered over more than {MAX_SPANS} places of its tensor")
    try:
        pair = find_overlap(pieces)
    except LayoutError as error:
        raise ValueError(f"{name}: {error}") from None
    if pair is not None:
        raise ValueError(f"pieces {pieces[pair[0]]} and {pieces[pair[1]]} of {name} overlap")
    if sum(box.elements for box in pieces) != Box(shape, shape).elements:
        raise ValueError(f"no rank owns {find_hole(pieces, shape)} of {name}")


def _check_groups(layout: Layout) -> None:
    """On the columns: ``layout.groups`` of a large model takes longer to make than all the rest."""
    frozen = set(layout.frozen)
    columns = zip(layout.dtypes, layout.itemsizes, strict=True)
    kinds = [(*kind, tensor in frozen) for tensor, kind in enumerate(columns)]
    for index, (rows, (_, nbytes)) in enumerate(zip(layout.group_rows, layout.group_sizes, strict=True)):
        if len({kinds[tensor] for tensor in layout.piece_tensor[rows]}) != 1:
            raise ValueError(f"group {index} mixes dtypes or frozen tensors")
        if nbytes > MAX_GROUP_BYTES:
            raise ValueError(f"group {index} has {nbytes} bytes, more than {MAX_GROUP_BYTES}")


def check_same_tensors(before: Iterable[Tensor], after: Iterable[Tensor]) -> None:
    """``LayoutError`` naming what was added, is missing, was reshaped or changed dtype. Sharding may differ."""
    old = {t.name: t for t in before}
    new = {t.name: t for t in after}
    problems = [f"{name} is missing" for name in old if name not in new]
    problems += [f"{name} was added" for name in new if name not in old]
    for name in old.keys() & new.keys():
        a, b = old[name], new[name]
        if a.shape != b.shape:
            problems.append(f"{name} changed shape from {list(a.shape)} to {list(b.shape)}")
        if a.dtype != b.dtype:
            problems.append(f"{name} changed dtype from {a.dtype} to {b.dtype}")
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise LayoutError(
            f"the tensors of this run changed: {'; '.join(sorted(problems)[:5])}{more}. "
            "A run keeps one set of tensors; publish another architecture as a new run"
        )

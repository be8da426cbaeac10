"""What one rank offers to publish: boxes of tensors, before ownership is settled."""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Sequence
from typing import Annotated, ClassVar, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from weight_store.boxes import Box, Dims
from weight_store.head import Term
from weight_store.records import Rank, Record, Uuid
from weight_store.version import WorldSize

MAX_AXES = 8
MAX_TENSOR_BYTES = 1 << 50

METADATA = "__metadata__"
"""The one name that a safetensors header keeps for itself."""


def check_not_reserved(name: str) -> str:
    """``name``; ``ValueError`` if no tensor of a safetensors file may have it."""
    if name == METADATA:
        raise ValueError(f"{METADATA} is no tensor name: safetensors files keep their metadata under it")
    return name


TensorName = Annotated[str, StringConstraints(min_length=1, max_length=512, pattern=r"^[\x21-\x7e]+$")]
"""Printable ASCII without spaces, as in every published checkpoint. Never used as a path."""
Alias = Annotated[TensorName, AfterValidator(check_not_reserved)]
DtypeName = Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Z0-9_]{0,15}$")]
Itemsize = Annotated[int, Field(ge=1, le=16)]
Extent = Annotated[int, Field(ge=0, le=2**48)]
Shape = Annotated[tuple[Extent, ...], Field(max_length=MAX_AXES)]

_TENSOR = re.compile(r"[\x21-\x7e]{1,512}")


class Offer(Record):
    """``terms/<term>/<rank>.offer``, packed. Columns of equal length, one row a box; a tensor may have many rows."""

    FORMAT: ClassVar[str] = "weightcast.offer"

    run_id: Uuid
    term: Term
    rank: Rank
    world_size: WorldSize
    names: tuple[TensorName, ...]
    dtypes: tuple[DtypeName, ...]
    itemsizes: tuple[Itemsize, ...]
    shapes: tuple[Shape, ...]
    offsets: tuple[Shape, ...]
    sizes: tuple[Shape, ...]
    frozen: tuple[TensorName, ...] = ()
    aliases: dict[Alias, TensorName] = Field(default={})

    @model_validator(mode="after")
    def _check(self) -> Self:
        columns = (self.dtypes, self.itemsizes, self.shapes, self.offsets, self.sizes)
        if any(len(column) != len(self.names) for column in columns):
            raise ValueError("columns of an offer differ in length")
        if self.rank >= self.world_size:
            raise ValueError(f"rank {self.rank} of a world of {self.world_size}")
        check_tensors(self.names, self.shapes, self.itemsizes)
        # Most rows are like others: each kind is looked at once.
        for shape, offsets, sizes in set(zip(self.shapes, self.offsets, self.sizes, strict=True)):
            if not Box(offsets, sizes).inside(shape):
                self._refuse_outside()
        return self

    def _refuse_outside(self) -> None:
        for name, shape, box in zip(self.names, self.shapes, self.boxes(), strict=True):
            if not box.inside(shape):
                raise ValueError(f"box {box} of {name} lies outside its shape {list(shape)}")

    def boxes(self) -> list[Box]:
        """One box a row."""
        return list(map(Box, self.offsets, self.sizes))


def check_tensors(names: Sequence[str], shapes: Sequence[Dims], itemsizes: Sequence[int]) -> None:
    """``ValueError`` if no file can hold a tensor: its name is reserved, or it is larger than 2**50 bytes."""
    if METADATA in names:
        check_not_reserved(METADATA)
    large = {kind for kind in set(zip(shapes, itemsizes, strict=True)) if _is_too_large(*kind)}
    if large:
        rows = zip(names, shapes, itemsizes, strict=True)
        name, shape = next((name, shape) for name, shape, itemsize in rows if (shape, itemsize) in large)
        raise ValueError(f"tensor {name} of shape {list(shape)} has more than 2**50 bytes")


def _is_too_large(shape: Dims, itemsize: int) -> bool:
    """Also where a later extent is 0: readers multiply from the first on."""
    return any(total > MAX_TENSOR_BYTES for total in itertools.accumulate(shape, operator.mul, initial=itemsize))

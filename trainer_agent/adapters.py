"""From what trainers have to pieces: state dicts, DTensors, iterators of full tensors.

No adapter communicates, and none gathers: a DTensor gives the box that this rank holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainer_agent.errors import InvalidPieces
from trainer_agent.piece import Piece

SPLIT_BYTES = 1 << 20
"""A full tensor above this is published by all ranks, rows shared out; a smaller one by one rank."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces of one rank, and which names are tied to a stored one (``alias -> stored``)."""

    pieces: Sequence[Piece]
    aliases: Mapping[str, str]

    def __iter__(self) -> Iterator[Piece]:
        return iter(self.pieces)


def from_state_dict(state: Mapping[str, Any]) -> Pieces:
    """Pieces of a state dict whose values are plain tensors (this rank has all of it) or DTensors (its local box).

    Names that share one tensor (tied weights) are published once, under the first name; the others become aliases.
    ``*_extra_state`` entries are left out. Raises ``InvalidPieces`` for a DTensor that waits for a reduction
    (``Partial``) and for anything else that is not a tensor.
    """
    pieces: list[Piece] = []
    aliases: dict[str, str] = {}
    seen: dict[tuple[object, ...], str] = {}
    for name, value in state.items():
        if not isinstance(name, str):
            raise InvalidPieces(f"{name!r} is no tensor name: a state dict has strings for keys")
        if name.endswith("_extra_state"):
            continue
        if not isinstance(value, torch.Tensor):
            raise InvalidPieces(f"{name}: expected a tensor or a DTensor, got {type(value).__name__}")
        local = value.to_local() if isinstance(value, DTensor) else value
        first = seen.setdefault(_identity(value, local), name)
        if first != name:
            aliases[name] = first
            continue
        piece = _dtensor_piece(name, value) if isinstance(value, DTensor) else _whole(name, value)
        if piece is not None:
            pieces.append(piece)
    return Pieces(pieces, aliases)


def _whole(name: str, tensor: torch.Tensor) -> Piece:
    return Piece(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor.detach())


def _identity(value: torch.Tensor, local: torch.Tensor) -> tuple[object, ...]:
    """Equal for two names of the same elements. An empty shard has no address, so its storage object stands for it."""
    if local.layout != torch.strided:
        return (id(value),)
    storage = local.untyped_storage()._cdata
    return (storage, local.storage_offset(), tuple(value.shape), tuple(local.shape), local.stride(), local.dtype)


def _dtensor_piece(name: str, tensor: DTensor) -> Piece | None:
    """The local box of a DTensor; None on a rank outside its mesh. Replicas give identical boxes."""
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise InvalidPieces(f"{name} still waits for a reduction ({tensor.placements}): redistribute it first")
    if tensor.device_mesh.get_coordinate() is None:
        return None
    shape = tuple(tensor.shape)
    sizes, offsets = compute_local_shape_and_global_offset(shape, tensor.device_mesh, tensor.placements)
    local = tensor.to_local().detach()
    if tuple(local.shape) != tuple(sizes):
        raise InvalidPieces(
            f"{name}: the local shard has shape {list(local.shape)} where {tensor.placements} of {list(shape)} "
            f"gives {list(sizes)}: it is no box; pass pieces made by hand"
        )
    return Piece(name, shape, tuple(offsets) if local.numel() else (0,) * len(shape), local)


def from_named_tensors(
    items: Iterable[tuple[str, torch.Tensor]], *, rank: int = 0, world_size: int = 1
) -> Iterator[Piece]:
    """This rank's share of full tensors that every rank iterates in the same order.

    Tensors above ``SPLIT_BYTES`` are split by rows, each rank taking a run of them; smaller ones go round. Lazy: one
    tensor is held at a time. With the defaults all of each tensor is this rank's (ranks that iterate different
    tensors, as in a pipeline).
    """
    for ordinal, (name, value) in enumerate(items):
        tensor = value.full_tensor() if isinstance(value, DTensor) else value
        if not isinstance(tensor, torch.Tensor):
            raise InvalidPieces(f"{name}: expected a tensor, got {type(tensor).__name__}")
        piece = _share(name, tensor, ordinal, rank, world_size)
        if piece is not None:
            yield piece


def _share(name: str, tensor: torch.Tensor, ordinal: int, rank: int, world_size: int) -> Piece | None:
    if tensor.dim() == 0 or tensor.numel() * tensor.element_size() <= SPLIT_BYTES or tensor.shape[0] < world_size:
        return _whole(name, tensor) if ordinal % world_size == rank else None
    rows = tensor.shape[0]
    first, end = rows * rank // world_size, rows * (rank + 1) // world_size
    return Piece(name, tuple(tensor.shape), (first, *([0] * (tensor.dim() - 1))), tensor.detach()[first:end])

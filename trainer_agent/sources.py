"""What may be handed to ``publish``, made into pieces of this rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from trainer_agent.adapters import Pieces, from_named_tensors, from_state_dict
from trainer_agent.errors import InvalidPieces
from trainer_agent.piece import Casting, Piece


@dataclass(frozen=True, slots=True)
class Source:
    """Pieces that can be iterated; ``once``: one time only. ``aliases`` are those found on the way."""

    given: Iterable[Any]
    rank: int
    world_size: int
    once: bool
    aliases: Mapping[str, str] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Piece]:
        items = iter(self.given)
        first = next(items, None)
        if first is None:
            return iter(())
        joined = itertools.chain([first], items)
        if isinstance(first, Piece):
            return _checked(joined)
        held = getattr(self.given, "held_names", None)
        if callable(held):
            # A weight source names what this rank holds: whole tensors, owned once by whoever offers them.
            mine = frozenset(held())
            return from_named_tensors(item for item in _pairs(joined) if item[0] in mine)
        return from_named_tensors(_pairs(joined), rank=self.rank, world_size=self.world_size)


def as_source(given: Any, rank: int, world_size: int) -> Source:
    """Accept a state dict, pieces, or (name, full tensor) pairs as a list, a re-iterable source or an iterator."""
    if isinstance(given, Mapping):
        given = from_state_dict(given)
    if isinstance(given, Pieces):
        return Source(given.pieces, rank, world_size, once=False, aliases=given.aliases)
    if isinstance(given, torch.nn.Module) or not isinstance(given, Iterable):
        raise InvalidPieces(
            f"publish takes a state dict, pieces, or pairs of name and tensor, not {type(given).__name__}; "
            "for a module pass its state_dict()"
        )
    return Source(given, rank, world_size, once=iter(given) is given)


def stage(source: Source, casting: Casting) -> Source:
    """Take the pieces of a one-shot iterator now, cast, in host memory: only the first publication needs this, because
    where they go depends on what all ranks offer.
    """
    kept: list[Piece] = []
    for piece in source:
        dtype = casting.of(piece.name, piece.tensor.dtype)
        copy = torch.empty(piece.tensor.shape, dtype=dtype).copy_(piece.tensor)
        kept.append(Piece(piece.name, piece.global_shape, piece.offsets, copy))
    return Source(kept, source.rank, source.world_size, once=False, aliases=source.aliases)


def _checked(items: Iterable[Any]) -> Iterator[Piece]:
    for item in items:
        if not isinstance(item, Piece):
            raise InvalidPieces(f"expected a Piece as before it, got {type(item).__name__}")
        yield item


def _pairs(items: Iterable[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for item in items:
        if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)):
            raise InvalidPieces(f"expected pairs of name and tensor, got {type(item).__name__}")
        yield item

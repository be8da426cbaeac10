"""From pieces to the offer that the ranks settle ownership from. Pure but for reading shapes of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from pydantic import ValidationError

from trainer_agent.errors import InvalidPieces
from trainer_agent.piece import Row
from weight_store.boxes import Box
from weight_store.offer import Offer


def make_offer(
    rows: Iterable[Row],
    *,
    run_id: str,
    term: int,
    rank: int,
    world_size: int,
    frozen: Sequence[str],
    aliases: Mapping[str, str],
) -> Offer:
    """The offer of one rank. ``frozen``: patterns of names. Raises ``InvalidPieces`` naming the tensor at fault."""
    rows = list(rows)
    _check_distinct(rows)
    names = {row.name for row in rows}
    try:
        return Offer(
            run_id=run_id,
            term=term,
            rank=rank,
            world_size=world_size,
            names=tuple(row.name for row in rows),
            dtypes=tuple(row.dtype for row in rows),
            itemsizes=tuple(row.itemsize for row in rows),
            shapes=tuple(row.shape for row in rows),
            offsets=tuple(row.box.offsets for row in rows),
            sizes=tuple(row.box.sizes for row in rows),
            frozen=tuple(sorted(name for name in names if any(fnmatchcase(name, pattern) for pattern in frozen))),
            aliases=dict(aliases),
        )
    except ValidationError as error:
        reason = error.errors(include_url=False, include_input=False)[0]["msg"]
        raise InvalidPieces(f"rank {rank} cannot offer these pieces: {reason}") from None


def _check_distinct(rows: Sequence[Row]) -> None:
    seen: set[tuple[str, Box]] = set()
    shapes: dict[str, Row] = {}
    for row in rows:
        if (row.name, row.box) in seen:
            raise InvalidPieces(f"{row.name}: box {row.box} comes twice")
        seen.add((row.name, row.box))
        first = shapes.setdefault(row.name, row)
        if (first.shape, first.dtype) != (row.shape, row.dtype):
            raise InvalidPieces(
                f"{row.name} is {first.dtype} {list(first.shape)} in one piece and {row.dtype} {list(row.shape)} "
                "in another"
            )

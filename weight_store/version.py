"""A version's opening record and the abort that may decide it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from weight_store.head import Term
from weight_store.position import Position
from weight_store.records import Count, Nonce, Rank, Record, Sha256, Uuid, Version

WorldSize = Annotated[int, Field(ge=1, le=100_000)]
AbortReason = Literal["expired", "fenced", "withdrawn", "refused"]
MAX_DETAIL = 2000
MAX_NAMED_RANKS = 1000
"""An abort lists at most this many missing ranks, so that its size is bounded at any world size."""


class Open(Record):
    """``v/<version>/open.json``: fixes parent, layout and world size before any rank encodes.

    ``step`` is the trainer's label and may repeat; ``ordinal`` counts the publications of a term, so that
    (term, step, ordinal) names one publication and opening it twice is one opening.
    """

    FORMAT: ClassVar[str] = "weightcast.open"

    run_id: Uuid
    version: Version
    term: Term
    step: Count
    ordinal: Count
    parent: Position
    layout: Sha256
    world_size: WorldSize
    write_id: Nonce


class Abort(Record):
    """``v/<version>/manifest.json`` when the version was given up. Readers never see an aborted version.

    ``refused``: the receipts contradict the layout; ``withdrawn``: a rank said that it cannot send its shard.
    ``missing`` names ranks that had not reported, or those that withdrew.
    """

    FORMAT: ClassVar[str] = "weightcast.abort"

    run_id: Uuid
    version: Version
    term: Term
    reason: AbortReason
    detail: Annotated[str, StringConstraints(max_length=MAX_DETAIL)]
    missing: tuple[Rank, ...] = ()
    write_id: Nonce


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """Why a rank cannot send its shard of a version, for good: the stable code of an error, and its sentence."""

    code: str
    sentence: str


def withdrawn(opened: Open, withdrawals: Mapping[int, Withdrawal], write_id: str) -> Abort:
    """The abort of a version from which ranks withdrew; it gives the reason of the first of them.

    A coordinator writes it, or such a rank itself where no coordinator answers: the register takes the first of all.
    """
    rank = min(withdrawals)
    why = withdrawals[rank]
    sentence = "".join(character if character.isprintable() else " " for character in why.sentence)
    detail = (
        f"rank {rank} cannot send its shard of version {opened.version} (step {opened.step}): {why.code}: {sentence}"
    )
    return Abort(
        run_id=opened.run_id,
        version=opened.version,
        term=opened.term,
        reason="withdrawn",
        detail=detail[:MAX_DETAIL],
        missing=tuple(sorted(withdrawals)[:MAX_NAMED_RANKS]),
        write_id=write_id,
    )

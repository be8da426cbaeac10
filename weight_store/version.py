"""A version's opening record and the abort that may decide it."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from weight_store.head import Term
from weight_store.position import Position
from weight_store.records import Count, Nonce, Rank, Record, Sha256, Uuid, Version

WorldSize = Annotated[int, Field(ge=1, le=100_000)]
AbortReason = Literal["expired", "fenced", "withdrawn", "refused"]


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

    ``refused``: the receipts contradict the layout; ``missing`` names ranks that had not reported.
    """

    FORMAT: ClassVar[str] = "weightcast.abort"

    run_id: Uuid
    version: Version
    term: Term
    reason: AbortReason
    detail: Annotated[str, StringConstraints(max_length=2000)]
    missing: tuple[Rank, ...] = ()
    write_id: Nonce

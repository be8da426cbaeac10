"""The head: the one mutable pointer of a run, moved only by compare-and-set.

A takeover raises ``term`` and keeps the position; sealing keeps the term and moves the position. ``write_id`` makes
each written head unique, so that a writer whose reply was lost recognises its own write when reading back.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, StringConstraints

from weight_store.position import Position
from weight_store.records import Nonce, Record, Uuid

MAX_TERM = 10**8 - 1
MAX_RETIRED = 256

Term = Annotated[int, Field(ge=1, le=MAX_TERM)]
Launch = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._:-]{1,128}$")]
"""One start of a training job: all its ranks share it, another start never does."""


class Head(Record):
    """``<run>/head.json``. ``retired``: launches that had the run and lost it, the latest first.

    A request of such a launch may come late (a trainer's restarted helper, a coordinator that was asleep); it must not
    take the run back from the launch that has it.
    """

    FORMAT: ClassVar[str] = "weightcast.head"

    run_id: Uuid
    term: Term
    launch: Launch
    position: Position
    write_id: Nonce
    retired: Annotated[tuple[Launch, ...], Field(max_length=MAX_RETIRED)] = ()

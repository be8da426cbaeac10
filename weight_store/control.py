"""The control object: what regions should run and how far back readers may still reach. Moved by compare-and-set."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, StringConstraints

from weight_store.records import Nonce, Record, Uuid, Version

RegionName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?$")]


class Control(Record):
    """``<run>/control.json``. A region without a target follows the head; ``floor`` is the oldest version kept."""

    FORMAT: ClassVar[str] = "weightcast.control"

    run_id: Uuid
    targets: dict[RegionName, Version] = Field(default={})
    floor: Version = 0
    write_id: Nonce

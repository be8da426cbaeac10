"""The control object: how far back readers may still reach, and, reserved, what regions shall run instead of the head.

Moved by compare-and-set. No agent follows targets yet; collections keep what they name.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, StringConstraints

from weight_store.records import Nonce, Record, Uuid, Version

RegionName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?$")]


class Control(Record):
    """``<run>/control.json``. ``targets``: version by region; ``floor``: the oldest version kept."""

    FORMAT: ClassVar[str] = "weightcast.control"

    run_id: Uuid
    targets: dict[RegionName, Version] = Field(default={})
    floor: Version = 0
    write_id: Nonce

"""The other way to a version, where an object on the cheapest one is damaged or gone. Pure."""

from __future__ import annotations

from typing import Literal

from weight_store.chain import Hop, plan_chain
from weight_store.manifest import Manifest
from weight_store.position import Position

Start = Literal["full", "delta"]
"""What a way begins with: the newest full, or the delta that leads on from what is held."""

_UNWANTED_BYTES = 1 << 62


def cheapest_start(held: Position | None, target: Manifest, position: Position) -> Start:
    """What the cheapest way begins with; deltas where there is nothing left to fetch."""
    hops = plan_chain(held, target, position)
    return hops[0].kind if hops else "delta"


def plan_without(start: Start, held: Position | None, target: Manifest, position: Position) -> list[Hop]:
    """The hops of a way that does not begin with ``start``; where there is none they begin with the full."""
    if start == "delta":
        return plan_chain(None, target, position)
    return plan_chain(held, target.model_copy(update={"full_bytes": _UNWANTED_BYTES}), position)


def leads_on(held: Position, target: Manifest, position: Position) -> bool:
    """Whether there is a way besides the cheapest one that is not made of objects of before ``held``."""
    start = cheapest_start(held, target, position)
    if start == "delta":
        return target.full_version > held.version
    return plan_without(start, held, target, position)[0].kind == "delta"

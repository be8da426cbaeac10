"""What becomes of a version that an engine has refused: it had no room, or had not started yet, and is told again."""

from __future__ import annotations

from dataclasses import dataclass

from weight_store.position import Position


@dataclass(frozen=True, slots=True)
class Refusal:
    """An engine refused ``position`` ``times`` times, and is not told of it again before ``until_s`` of some clock."""

    position: Position
    error: str
    times: int
    until_s: float

    def stands(self, now_s: float) -> bool:
        """Whether it is too soon to tell again."""
        return now_s < self.until_s


def times_refused(former: Refusal | None, position: Position) -> int:
    """How often ``position`` has been refused in a row, this time included."""
    return former.times + 1 if former is not None and former.position == position else 1

"""How a search came to a world."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

W = TypeVar("W")


def way(came_from: Mapping[W, tuple[W, str] | None], world: W) -> list[str]:
    """The moves from the first world to this one."""
    labels: list[str] = []
    while (step := came_from[world]) is not None:
        world, label = step
        labels.append(label)
    return labels[::-1]

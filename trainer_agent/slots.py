"""The weights in the arena as the sidecar sees them: arrays of raw bits, one a group."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence

import numpy as np

from codec import digest
from trainer_agent.arena import Arena
from trainer_agent.encoding import Bits, Job
from trainer_agent.placement import PlacedGroup
from trainer_agent.state import SLOTS, Base, Waiting


class Slots:
    """Maps both slots. Arrays handed out share the mapping and are valid until the process ends."""

    def __init__(self, arena: Arena, placed: Sequence[PlacedGroup]) -> None:
        self.placed = tuple(placed)
        self._maps: list[mmap.mmap] = [arena.map(f"slot{slot}") for slot in range(SLOTS)]

    def view(self, slot: int, entry: int) -> Bits:
        """Raw bits of the rank's ``entry``-th group: 1-D, contiguous, unsigned of the item size, writable."""
        placed = self.placed[entry]
        itemsize = placed.group.itemsize
        unsigned = np.dtype(f"u{itemsize}")
        view: Bits = np.frombuffer(self._maps[slot], unsigned, placed.group.elements, placed.start)
        return view

    def views(self, slot: int) -> Iterator[Bits]:
        """Raw bits of every group, in order."""
        return (self.view(slot, entry) for entry in range(len(self.placed)))

    def jobs(self, slot: int, base: Base | None, waiting: Waiting | None = None) -> Iterator[Job]:
        """What is to be encoded from ``slot``: deltas from ``base``, or fulls. ``waiting``: what the slot must hold."""
        for entry, placed in enumerate(self.placed):
            name, new = placed.group.pieces[0].tensor.name, self.view(slot, entry)
            digest = b"" if waiting is None else waiting.digest(entry)
            if base is None:
                yield Job(name, placed.group.dtype, new, digest)
            else:
                yield Job(name, placed.group.dtype, new, digest, self.view(base.slot, entry), base.digest(entry))

    def digests(self, slot: int) -> str:
        """XXH3-128 of every group as a receipt lists them (hex)."""
        return "".join(digest(view).hex() for view in self.views(slot))

"""What the sidecar uploads, decided from what it holds and what the bucket says. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from coordinator.wire import VersionAnswer
from trainer_agent.state import Base, State
from weight_store.manifest import Manifest
from weight_store.position import GENESIS, Position
from weight_store.receipt import FullRef

Source = Literal["full", "delta", "rebuild"]

MOST_DUE = 8
"""So many extra fulls of an earlier launch are looked for: one request each, of every rank at once."""


def source_for(base: Base | None, parent: Position) -> Source:
    """How a version that starts from ``parent`` is coded: only exactly that position is a base for its delta."""
    if parent == GENESIS:
        return "full"
    return "delta" if base is not None and base.position == parent else "rebuild"


def wants_extra_full(manifest: Manifest, full_every: int) -> bool:
    """Whether every rank uploads a full of this version: all decide alike, from the manifest alone.

    Every ``full_every`` versions (0: never for that reason), and whenever the deltas since the newest full cross a
    multiple of its size: from then on a late joiner pays more than a full. Once a multiple, because a full takes a
    few versions until it is visible.
    """
    return manifest.version in due_fulls(manifest, full_every)


def due_fulls(manifest: Manifest, full_every: int) -> list[int]:
    """Of which versions, from the newest full on that ``manifest`` knows to its own, another full is or was due: the
    last few. An earlier launch may have uploaded one, and ended before a receipt could say so.
    """
    if manifest.full_version == manifest.version:
        return []
    newer = [(link.version, link.payload_bytes) for link in manifest.chain if link.version > manifest.full_version]
    due: list[int] = []
    before, size = 0, max(1, manifest.full_bytes)
    for version, payload_bytes in [*newer, (manifest.version, manifest.payload_bytes)]:
        after = before + payload_bytes
        if (full_every and version % full_every == 0) or after // size > before // size:
            due.append(version)
        before = after
    return due[-MOST_DUE:]


def settled(state: State, slot: int, ordinal: int, position: Position, digests: str, full_version: int) -> State:
    """The state after a publication was sealed: its slot is the base, fulls that have become visible are dropped."""
    base = Base(slot=slot, position=position, ordinal=ordinal, digests=digests)
    return state.model_copy(update={"base": base, "waiting": None, "fulls": pending_fulls(state.fulls, full_version)})


def pending_fulls(fulls: Sequence[FullRef], full_version: int) -> tuple[FullRef, ...]:
    """Fulls still to be reported: those newer than the newest visible one, at most as many as a receipt holds."""
    return tuple(ref for ref in fulls if ref.version > full_version)[-64:]


def is_superseded(undecided: VersionAnswer, term: int, ordinal: int) -> bool:
    """True if the other ranks already publish a later one: opening ours, which was given up, would only block them."""
    return undecided.term == term and undecided.ordinal > ordinal


def is_skipped(undecided: VersionAnswer, term: int, ordinal: int, rank: int) -> bool:
    """True if the version waits for a receipt that ``rank``, already at publication ``ordinal``, will never write."""
    return undecided.term == term and undecided.ordinal < ordinal and rank in undecided.missing

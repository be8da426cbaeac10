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
    if manifest.full_version == manifest.version:
        return False
    if full_every and manifest.version % full_every == 0:
        return True
    before = sum(link.payload_bytes for link in manifest.chain if link.version > manifest.full_version)
    size = max(1, manifest.full_bytes)
    return (before + manifest.payload_bytes) // size > before // size


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

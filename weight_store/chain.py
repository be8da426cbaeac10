"""Which versions a reader fetches to get from the position it holds to the one it wants. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weight_store.errors import ChainError, FormatError
from weight_store.manifest import Manifest, ReceiptRef
from weight_store.position import GENESIS, Position


@dataclass(frozen=True, slots=True)
class Hop:
    """One version to apply. ``extra_full``: receipts of the extra full to fetch instead of the version's own."""

    position: Position
    kind: Literal["full", "delta"]
    payload_bytes: int
    extra_full: tuple[ReceiptRef, ...] = ()


def plan_chain(held: Position | None, target: Manifest, target_position: Position) -> list[Hop]:
    """Cheapest hops in bytes from ``held`` (None: nothing, or not trusted) to ``target``; empty if already there.

    A delta is used only if ``held`` is exactly a link of the target's chain. Raises ``ChainError`` if ``held`` is a
    later version of the same run than the target (a rewind is never silent).
    """
    if held == target_position:
        return []
    if held is not None and held.version > target.version:
        raise ChainError(
            f"this replica holds version {held.version}, later than version {target.version} that it is asked to run"
        )
    last = Hop(target_position, "delta", target.payload_bytes)
    deltas = [*(Hop(link.position, "delta", link.payload_bytes) for link in target.chain), last]
    if target.full_version == target.version:
        full = [Hop(target_position, "full", target.full_bytes)]
    else:
        start = next(i for i, link in enumerate(target.chain) if link.version == target.full_version)
        first = Hop(target.chain[start].position, "full", target.full_bytes, target.extra_full)
        full = [first, *deltas[start + 1 :]]
    links = [link.position for link in target.chain]
    if held is None or held == GENESIS:
        return full
    if held == target.parent:  # asked by itself: a version that is its own full may have no chain
        return _cheaper([last], full)
    if held in links:
        return _cheaper(deltas[links.index(held) + 1 :], full)
    return full


def receipts_of(hop: Hop, manifest: Manifest, run: str) -> tuple[ReceiptRef, ...]:
    """The receipts to fetch for a hop, one for each rank of ``manifest``, which is the hop's own.

    An extra full is listed by a later manifest than the one whose ranks it must match, so this is the first place
    where both are known: ``FormatError`` if it is not one receipt for each rank.
    """
    refs = hop.extra_full or manifest.receipts
    if len(refs) != manifest.world_size:
        raise FormatError(
            f"the full of version {hop.position} of {run!r} is listed with {len(refs)} receipts, but the version has "
            f"{manifest.world_size} ranks: the manifest that lists it was altered or is of another run"
        )
    return refs


def _cheaper(deltas: list[Hop], full: list[Hop]) -> list[Hop]:
    return deltas if _cost(deltas) <= _cost(full) else full


def _cost(hops: list[Hop]) -> int:
    return sum(hop.payload_bytes for hop in hops)

"""How far the floor may rise. Pure.

Whoever follows the head from nothing needs the newest full and every delta after it, so the floor never passes
``full_version`` of the head's manifest, nor of the manifest of a version that a region is told to run. Both only grow
as the head moves on, so a floor that was right when it was raised stays right.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from weight_store.control import Control
from weight_store.errors import StoreRefused
from weight_store.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Wish:
    """What a person wants kept: the newest ``keep_versions`` sealed versions, or all from ``floor`` on, or as it is."""

    keep_versions: int | None = None
    floor: int | None = None


@dataclass(frozen=True, slots=True)
class Raise:
    """From which floor to which, and what held it back (empty: nothing)."""

    before: int
    after: int
    limited_by: str = ""


def wanted_floor(wish: Wish, sealed: Sequence[int]) -> int:
    """Return the floor that is wished for; ``sealed``: known sealed versions, oldest first. 0: no change.

    With fewer than ``keep_versions`` known ones everything is kept.
    """
    if wish.floor is not None:
        return wish.floor
    if wish.keep_versions is None or len(sealed) < wish.keep_versions:
        return 0
    return sealed[-wish.keep_versions]


def check_floor(control: Control | None, current: Manifest | None) -> None:
    """``StoreRefused`` if the floor is above the newest full: no collection raised it there, and none may act on it."""
    newest_full = current.full_version if current is not None else 0
    if control is not None and control.floor > newest_full:
        raise StoreRefused(
            f"control.json has floor {control.floor}, above version {newest_full}, the newest full: who starts from "
            f"nothing needs what lies between, so nothing is deleted; correct the floor to {newest_full} at most"
        )


def decide_floor(
    control: Control | None, wanted: int, current: Manifest | None, targets: Collection[tuple[str, Manifest]]
) -> Raise:
    """Return the highest floor up to ``wanted`` that leaves everything reachable from the head and the ``targets``
    (region, manifest of the version it is told to run). Never lower than it is.
    """
    before = control.floor if control is not None else 0
    if current is None:
        return Raise(before, before, "the run has no version yet" if wanted > before else "")
    limit, limited_by = current.full_version, f"the newest full is version {current.full_version}"
    for region, manifest in targets:
        if manifest.full_version < limit:
            limit = manifest.full_version
            limited_by = (
                f"region {region} is told to run version {manifest.version}, which starts from the full of "
                f"version {manifest.full_version}"
            )
    after = max(before, min(wanted, limit))
    return Raise(before, after, limited_by if after < wanted else "")

"""What happens to objects of the bucket for good, and which ways past them a replica has to find."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from weight_store.keys import head_key, manifest_key

if TYPE_CHECKING:
    from tests.rollout_agent.crashing import World
    from tests.rollout_agent.walking import Walk

Objects = dict[str, tuple[bytes, float]]
RUN = "tiny"


async def spoil(walk: Walk) -> None:
    """An object that may be needed next is altered, cut or gone."""
    objects = walk.world.store._objects
    keys = _candidates(walk.world, objects, walk.shown or 0)
    if not walk.may_spoil:
        return
    if walk.chance.random() < 0.5:
        keys = _before_a_full(walk.world, objects, walk.shown or 0) or keys
    key = walk.chance.choice(keys)
    data, modified = objects[key]
    what = walk.chance.choice(("flipped", "flipped", "cut", "gone"))
    walk.note(f"   {key}: {what}")
    walk.spoilt.setdefault(key, data)
    objects[key] = (_spoilt(data, what, walk.chance), modified)
    if what == "gone":
        del objects[key]


def _candidates(world: World, objects: Objects, shown: int) -> list[str]:
    full = world.training.manifests[world.now].full_version
    found = [key for key in objects if "/v/" not in key]
    for version in world.training.positions:
        if version > shown or version == full:
            found += 2 * [key for key in objects if key.startswith(_prefix(version))]
    return sorted(found)


def _before_a_full(world: World, objects: Objects, shown: int) -> list[str]:
    """Of versions that a later full makes unnecessary."""
    last = max(manifest.full_version for manifest in world.training.manifests.values())
    versions = [version for version in world.training.positions if shown < version <= last]
    return sorted(key for key in objects for v in versions if key.startswith(_prefix(v)) and "/full/" not in key)


def _spoilt(data: bytes, what: str, chance: random.Random) -> bytes:
    if what == "cut" or not data:
        return data[: chance.randrange(len(data) + 1)]
    at = chance.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]


async def go_round(walk: Walk) -> None:
    """A replica that runs into it, while the head moves on."""
    later = [version for version in walk.versions if version > walk.world.now]
    if walk.spoilt and later and walk.open.telling is None:
        walk.no_faults()
        if walk.disk.inside is not None:
            walk.disk.leaves()
        await walk.world.head(walk.chance.choice(later))
        walk.spoilt.pop(head_key(RUN), None)
        await walk.go_round()


async def put_back(walk: Walk) -> None:
    """Somebody repairs the bucket."""
    for key, data in walk.spoilt.items():
        walk.world.store._objects[key] = (data, 0.0)
    if head_key(RUN) in walk.spoilt:
        await walk.world.head(walk.world.now)
    walk.spoilt.clear()


def _prefix(version: int) -> str:
    return manifest_key(RUN, version).removesuffix("manifest.json")


def is_open(walk: Walk, *, only_full: bool) -> bool:
    """Whether a way leads to the head past what is spoilt. ``only_full``: what is held is no start."""
    manifest = walk.world.training.manifests[walk.world.now]
    needed = {head_key(RUN), manifest_key(RUN, walk.world.now)}
    if any(key in needed or "/v/" not in key for key in walk.spoilt):
        return False
    held = walk.open.position
    after_full = [v for v in walk.versions if manifest.full_version < v <= walk.world.now]
    full = _is_good(walk, manifest.full_version, extra=bool(manifest.extra_full))
    full = full and all(_is_good(walk, version) for version in after_full)
    if held is None or only_full:
        return full
    chain = {link.version for link in manifest.chain}
    deltas = held.version in chain and all(
        _is_good(walk, version) for version in walk.versions if held.version < version <= walk.world.now
    )
    return deltas or (full and manifest.full_version > held.version)


def _is_good(walk: Walk, version: int, *, extra: bool = False) -> bool:
    prefix = _prefix(version)
    bad = [key.removeprefix(prefix) for key in walk.spoilt if key.startswith(prefix)]
    return not any(key == "manifest.json" or (key != "open.json" and ("full/" in key) == extra) for key in bad)

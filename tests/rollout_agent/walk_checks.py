"""What a walking replica must show, and what it may leave lying about."""

from __future__ import annotations

import json

from rollout_agent import gate
from rollout_agent.places import INDEX, Places, is_weights_name
from tests.rollout_agent.courses import ASSETS
from tests.rollout_agent.crashing import MODEL, STATE, World
from tests.rollout_agent.simdisk import SimDisk
from tests.rollout_agent.training import read_model
from tests.rollout_agent.walk_disk import engine_files
from tests.rollout_agent.walk_harms import Harm
from weight_store.records import sha256_hex

INCLUDES: tuple[tuple[str, ...], ...] = ((), ("*.c",), ("*.a",))
"""Patterns that a replica may be given."""


def visible(
    world: World, disk: SimDisk, places: Places, harms: list[Harm], includes: set[tuple[str, ...]]
) -> int | None:
    """The version that an engine would load through the gate: exactly that, unless somebody had his hands in it."""
    whole = gate.holds(disk, places)
    if whole is None:
        return None
    found = wrong(world, whole.position.version, engine_files(disk.volume), includes)
    if not found:
        return whole.position.version
    assert any(item.model for item in harms), found
    # Only stamps tell of an edit, and only reading of rot.
    visitor = gate.Visitor(disk, places, verify=any(item.unseen for item in harms))
    assert visitor.enter() is None, f"the gate lets engines to {found}"
    return None


def wrong(world: World, version: int, files: dict[str, bytes], includes: set[tuple[str, ...]]) -> str:
    """What is not as it is in this version, of all that an engine could load; empty if everything is."""
    try:
        tensors = read_model({name: data for name, data in files.items() if name.endswith(".safetensors")})
        index = json.loads(files[INDEX])["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        return f"version {version} cannot be read: {error!r}"
    every = world.training.tensors(version)
    if not any(tensors == {name: every[name] for name in _kept(every, include)} for include in includes):
        return f"a mixture at version {version}"
    if not (index.keys() == tensors.keys() and set(index.values()) == {n for n in files if n.endswith(".safetensors")}):
        return f"the index of version {version} does not fit"
    assets = {asset.name: asset.sha256 for asset in world.training.manifests[version].assets}
    others = {
        n: sha256_hex(data) for n, data in files.items() if n != INDEX and not n.endswith((".safetensors", ".tmp"))
    }
    return "" if assets == others else f"assets {sorted(others)} of version {version} do not fit {sorted(assets)}"


def _kept(names: dict[str, bytes], include: tuple[str, ...]) -> set[str]:
    """``*.c`` alone has groups of its own: the other two share theirs."""
    return {name for name in names if not include or (name.endswith(".c") == (include == ("*.c",)))}


def check_tidy(world: World, disk: SimDisk, places: Places, done: list[str], *, tmpfs: bool) -> None:
    """The names are those that a replica would have which had fetched this version and nothing else.

    What a crash leaves behind stays until the next version comes and the next checkpoint: if these were ``done``.
    """
    saved = any(what.startswith("rename state.json.tmp") for what in done)
    moved = any(what.startswith(("create change-", "rename pending.json.tmp")) for what in done)
    names, manifest = disk.volume.names, world.training.manifests[world.now]
    layout = world.training.layouts[world.now]
    files = [name for name in engine_files(disk.volume) if is_weights_name(name)]
    expected = {str(MODEL / name) for name in (*files, INDEX, *(asset.name for asset in manifest.assets))}
    expected |= {str(places.private / name) for name in ("owner.json", "whole.json", "digests.json")}
    expected |= {str(path) for path in (places.checkpoint, places.layout(layout), places.shown_layout(layout))}
    expected |= {str(places.asset(asset.sha256)) for asset in manifest.assets}
    copies = {name.split("/")[2] for name in names if name.startswith(f"{STATE}/checkpoint-")}
    expected |= {str(STATE / copy / name) for copy in copies for name in files}
    assert len(copies) >= tmpfs
    if not saved:
        return
    assert len(copies) == tmpfs, copies
    assert expected <= names.keys(), sorted(expected - names.keys())
    more = sorted(name for name in names.keys() - expected if not _may_stay(name, places))
    more = [name for name in more if moved or not name.startswith(f"{places.new}/")]
    assert not more, f"left behind: {more}"


def _may_stay(name: str, places: Places) -> bool:
    """Names of which there is one at most, whatever has happened."""
    few = (places.serving, places.told, places.syncing, *(places.hidden / n for n in (INDEX, "config.json")))
    records = (places.owner, places.whole, places.digests, places.checkpoint, places.pending)
    # Of what was being written when the process ended; replaced when it is written the next time.
    beginnings = {f"{path}.tmp" for path in (*few[:3], *records)}
    return name in {str(path) for path in few} | beginnings or _is_beginning(name)


def _is_beginning(name: str) -> bool:
    directory, _, last = name.rpartition("/")
    if directory == f"{MODEL}/.weightcast/layouts":
        return last.endswith(".tmp")
    return directory == str(MODEL) and last.removesuffix(".tmp") in (INDEX, *ASSETS) and last.endswith(".tmp")

"""What an engine sees of a model directory: there and whole, or not there.

What changes a file that engines load is called under the exclusive gate; records are also written beside engines.
``whole.json`` goes first and comes last, so at no moment does it stand beside weights in between.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from pathlib import Path

from rollout_agent.disk import Disk, Stamp, write_file
from rollout_agent.errors import DamagedFiles, DiskError
from rollout_agent.places import CONFIG, HIDDEN, INDEX, Places
from rollout_agent.state import State, Version, Whole, seal
from weight_store.layout import Layout
from weight_store.receipt import Asset
from weight_store.records import pack

_MAX_ASSET_BYTES = 1 << 30


def hide(disk: Disk, places: Places) -> None:
    """Take away what an engine needs to find the model."""
    disk.remove(places.whole)
    for name in HIDDEN:
        if disk.size(places.model / name) is not None:
            disk.rename(places.model / name, places.hidden / name)


def place(
    disk: Disk, places: Places, version: Version, index: bytes, *, before: tuple[Asset, ...] = ()
) -> dict[str, Stamp]:
    """Bring back assets, config and index of ``version``; their stamps. ``DamagedFiles`` if an asset is missing.

    Assets that were in place ``before`` and did not change are not looked at again: tokenizers can be large. Those have
    no stamp in the answer.
    """
    assets = [asset for asset in version.assets if asset not in before or asset.name in HIDDEN]
    lost = missing_assets(disk, places, assets)
    if lost:
        raise DamagedFiles(f"the copy of {lost[0].name} in {places.state} is missing or damaged")
    for asset in sorted(assets, key=lambda a: a.name == CONFIG):
        _place(disk, places, asset.name, _kept(disk, places, asset) or b"")
    _place(disk, places, INDEX, index)
    return mark(disk, places, [*(asset.name for asset in assets), INDEX])


def mark(disk: Disk, places: Places, names: Iterable[str]) -> dict[str, Stamp]:
    """Mark files of the model directory, so that any later write shows; their stamps, none for what is not there."""
    stamps = {name: disk.mark(places.model / name) for name in names}
    return {name: stamp for name, stamp in stamps.items() if stamp is not None}


def record(disk: Disk, places: Places, whole: Whole, state: State, layout: Layout, *, afresh: bool = False) -> None:
    """Say what the directory holds, then let engines in; see :func:`record_digests`."""
    record_digests(disk, places, state, layout, afresh=afresh)
    put(disk, places.whole, seal(whole))


def record_digests(disk: Disk, places: Places, state: State, layout: Layout, *, afresh: bool = False) -> None:
    """Say what each group should be. A layout that is there already is left alone unless ``afresh``."""
    kept = places.shown_layout(state.version.layout)
    if afresh or disk.size(kept) is None:
        disk.make_dir(kept.parent)
        for name in disk.names(kept.parent):
            if name != kept.name:
                disk.remove(kept.parent / name)
        put(disk, kept, pack(layout.to_bytes()))
    put(disk, places.digests, seal(state))


def misplaced(disk: Disk, places: Places, version: Version, index: bytes) -> list[str]:
    """Names of index and assets in the model directory that are absent or were edited."""
    expected = {asset.name: (asset.size, asset.sha256) for asset in version.assets}
    expected[INDEX] = (len(index), hashlib.sha256(index).hexdigest())
    return [name for name, (size, sha256) in expected.items() if not _has(disk, places.model / name, size, sha256)]


def missing_assets(disk: Disk, places: Places, assets: Iterable[Asset]) -> list[Asset]:
    """Assets whose own copy in the state directory is not there or is damaged."""
    return [asset for asset in assets if not _has(disk, places.asset(asset.sha256), asset.size, asset.sha256)]


def keep_asset(disk: Disk, places: Places, asset: Asset, data: bytes) -> None:
    """Keep the verified content of an asset; durable before any commit that needs it."""
    write_file(disk, places.asset(asset.sha256), data)


def adopt_assets(disk: Disk, places: Places, assets: Iterable[Asset]) -> None:
    """Keep what lies in the model directory of those assets of which the state directory has no copy yet."""
    for asset in assets:
        if disk.size(places.asset(asset.sha256)) is None:
            for path in (places.model / asset.name, places.hidden / asset.name):
                if _has(disk, path, asset.size, asset.sha256):
                    keep_asset(disk, places, asset, disk.read(path, max_bytes=_MAX_ASSET_BYTES) or b"")


def remove_assets(disk: Disk, places: Places, names: Collection[str], version: Version) -> None:
    """Remove files called ``names``, which are assets of other versions, as far as ``version`` has none of that name.

    Durable when this returns: where they would come back with a reboot, nobody might be left who knows of them.
    """
    stale = sorted(set(names) - {asset.name for asset in version.assets})
    for name in stale:
        disk.remove(places.model / name)
    # Also where none was there: whoever removed it may have ended before this.
    if stale:
        disk.sync_dir(places.model)


def _kept(disk: Disk, places: Places, asset: Asset) -> bytes | None:
    return disk.read(places.asset(asset.sha256), max_bytes=_MAX_ASSET_BYTES)


def _has(disk: Disk, path: Path, size: int, sha256: str) -> bool:
    if disk.size(path) != size:
        return False
    return hashlib.sha256(disk.read(path, max_bytes=_MAX_ASSET_BYTES) or b"").hexdigest() == sha256


def _place(disk: Disk, places: Places, name: str, data: bytes) -> None:
    """Leave ``data`` at ``name``, by moving the hidden file back where that has it already."""
    target, hidden = places.model / name, places.hidden / name
    sha256 = hashlib.sha256(data).hexdigest()
    if _has(disk, target, len(data), sha256):
        return
    if name in HIDDEN and _has(disk, hidden, len(data), sha256):
        disk.rename(hidden, target)
    else:
        put(disk, target, data)


def put(disk: Disk, path: Path, data: bytes) -> None:
    """Replace a file atomically, for this boot."""
    # Not synced: after a power loss whole.json belongs to another boot, and all of this is placed again.
    temporary = path.with_name(path.name + ".tmp")
    file = disk.append(temporary)
    try:
        file.write(data)
        disk.rename(temporary, path)
    except DiskError:
        disk.remove(temporary)
        raise
    finally:
        file.close()

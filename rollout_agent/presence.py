"""What an engine sees of a model directory: there and whole, or not there. Every call is made under the exclusive gate.

``whole.json`` goes first and comes last, so at no moment does it stand beside weights in between.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from rollout_agent.disk import Disk, write_file
from rollout_agent.errors import DamagedFiles
from rollout_agent.places import CONFIG, HIDDEN, INDEX, Places, is_weights_name
from rollout_agent.state import Version, Whole, seal
from weight_store.receipt import Asset

_MAX_ASSET_BYTES = 1 << 30


def hide(disk: Disk, places: Places) -> None:
    """Take away what an engine needs to find the model."""
    disk.remove(places.whole)
    for name in HIDDEN:
        if disk.size(places.model / name) is not None:
            disk.rename(places.model / name, places.hidden / name)


def show(
    disk: Disk,
    places: Places,
    version: Version,
    index: bytes,
    *,
    run: str,
    run_id: str,
    before: tuple[Asset, ...] = (),
) -> None:
    """Bring it back for ``version``: assets, config, index, then the mark. ``DamagedFiles`` if an asset is missing.

    Assets that were in place ``before`` and did not change are not looked at again: tokenizers can be large.
    """
    assets = [asset for asset in version.assets if asset not in before or asset.name in HIDDEN]
    lost = missing_assets(disk, places, assets)
    if lost:
        raise DamagedFiles(f"the copy of {lost[0].name} in {places.state} is missing or damaged")
    for asset in sorted(assets, key=lambda a: a.name == CONFIG):
        _place(disk, places, asset.name, _kept(disk, places, asset) or b"")
    _place(disk, places, INDEX, index)
    files = {name: disk.size(places.model / name) or 0 for name in disk.names(places.model) if is_weights_name(name)}
    whole = Whole(
        run=run, run_id=run_id, position=version.position, step=version.step, boot_id=disk.boot_id(), files=files
    )
    _put(disk, places.whole, seal(whole))


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


def remove_assets(disk: Disk, places: Places, before: Version, after: Version) -> None:
    """Remove assets that the run no longer has."""
    for name in {a.name for a in before.assets} - {a.name for a in after.assets}:
        disk.remove(places.model / name)


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
        _put(disk, target, data)


def _put(disk: Disk, path: Path, data: bytes) -> None:
    # Not synced: after a power loss whole.json belongs to another boot, and all of this is placed again.
    temporary = path.with_name(path.name + ".tmp")
    file = disk.append(temporary)
    try:
        file.write(data)
    finally:
        file.close()
    disk.rename(temporary, path)

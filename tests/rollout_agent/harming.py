"""What edits and rot do to a model directory."""

from __future__ import annotations

import os
from pathlib import Path

from rollout_agent.disk import LocalDisk
from rollout_agent.places import Places
from rollout_agent.state import Whole, load, save


def weight_files(directory: Path) -> list[Path]:
    found = sorted(directory.glob("*.safetensors"))
    assert len(found) > 2
    return found


def edit(path: Path) -> None:
    """One bit, in place: size and inode stay."""
    with path.open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        byte = file.read(1)[0] ^ 0x10
        file.seek(-3, os.SEEK_END)
        file.write(bytes([byte]))


def swap_names(path: Path) -> None:
    """Two tensors of one shape change places in the header: size, inode and every weight stay."""
    data = path.read_bytes()
    head = data[: 8 + int.from_bytes(data[:8], "little")]
    first, second = b'"model.layers.0.mlp.down.weight"', b'"model.layers.1.mlp.down.weight"'
    assert first in head
    assert second in head
    swapped = head.replace(first, b"?").replace(second, first).replace(b"?", second)
    with path.open("r+b") as file:
        file.write(swapped)


def forge(directory: Path) -> None:
    """Make the record say that every file is as it was left: what rots by itself leaves no trace in stamps."""
    disk, places = LocalDisk(), Places.of(directory)
    whole = load(disk, places.whole, Whole)
    assert whole is not None
    stamps = {name: stamp for name in whole.stamps if (stamp := disk.stat(directory / name)) is not None}
    save(disk, places.whole, whole.model_copy(update={"stamps": stamps}))


def fill(directory: Path) -> Path:
    """A file that takes all there is."""
    others = directory / "others"
    with others.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return others
    raise AssertionError("there is no end of it")

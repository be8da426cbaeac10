"""The part of a checkpoint that one rank publishes, told without any of the code that publishes it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

Dims = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class LocalBox:
    """Rows ``start`` and on of tensor ``name`` of shape ``shape``; ``tensor`` holds them as they are published."""

    name: str
    shape: Dims
    start: int
    tensor: Tensor


def rows_of(extent: int, rank: int, world_size: int) -> range:
    """Return the rows of rank ``rank`` when ``extent`` rows are cut as ``torch.chunk`` cuts them."""
    chunk = -(-extent // world_size)
    return range(min(rank * chunk, extent), min((rank + 1) * chunk, extent))


def raw_bytes(tensor: Tensor) -> bytes:
    """Return the elements of ``tensor`` in row-major order, as a safetensors file has them."""
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def sha256_of(boxes: Sequence[LocalBox]) -> str:
    """SHA-256 of the bytes of all boxes in their order, as 64 hex digits."""
    return hashlib.sha256(b"".join(raw_bytes(box.tensor) for box in boxes)).hexdigest()


@dataclass(frozen=True, slots=True)
class BoxPlace:
    """A box without its elements: ``rows`` rows from ``start`` of a tensor of ``shape`` and torch ``dtype``."""

    name: str
    dtype: str
    shape: Dims
    start: int
    rows: int


def place_of(box: LocalBox) -> BoxPlace:
    """Return where ``box`` lies."""
    rows = box.tensor.shape[0] if box.tensor.dim() else 1
    return BoxPlace(box.name, str(box.tensor.dtype).removeprefix("torch."), box.shape, box.start, rows)


def save_places(path: Path, boxes: Sequence[LocalBox]) -> None:
    """Write the places of a rank's boxes, which never change within a run. Appears at once or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps([asdict(place_of(box)) for box in boxes]))
    temporary.replace(path)


def load_places(path: Path) -> list[BoxPlace]:
    """Read what :func:`save_places` wrote."""
    return [BoxPlace(**{**fields, "shape": tuple(fields["shape"])}) for fields in json.loads(path.read_text())]


def save_bytes(path: Path, boxes: Sequence[LocalBox]) -> None:
    """Write the bytes of a rank's boxes, one after the other, as its testimony of the last step."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        for box in boxes:
            file.write(raw_bytes(box.tensor))
    temporary.replace(path)

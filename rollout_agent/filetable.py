"""Which tensor lies where in which safetensors file. Pure; the same tensors always give the same files.

Files are in layer order and cut at layer boundaries. Within a file wide elements come first, so that every tensor is
aligned to its element; for a model of one dtype that is layer order throughout.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from rollout_agent.errors import DamagedObject
from rollout_agent.places import weights_name
from weight_store.grouping import layer_of
from weight_store.layout import Tensor

FILE_BYTES = 5 * 10**9
"""A file is closed at the first layer boundary before this, as Hugging Face tools do."""
_ALIGN = 64
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors readers


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor's bytes: file number (from 0) and byte offset in the file."""

    file: int
    offset: int
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One file: its name, its first bytes, its whole size in bytes, and its tensors in order."""

    name: str
    head: bytes
    size: int
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True)
class FileTable:
    """All weight files of a replica; ``aliases`` maps tied names to the tensors stored for them."""

    files: tuple[WeightFile, ...]
    places: Mapping[str, Place]
    aliases: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        """Size of all files in bytes."""
        return sum(file.size for file in self.files)

    @cached_property
    def index(self) -> bytes:
        """Content of ``model.safetensors.index.json``. Tied names are left out of the map, as in published models."""
        weight_map = {name: self.files[place.file].name for name, place in self.places.items()}
        metadata: dict[str, object] = {
            "total_size": sum(place.tensor.nbytes for place in self.places.values()),
        }
        if self.aliases:
            metadata["tied_weights"] = dict(sorted(self.aliases.items()))
        return json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2).encode() + b"\n"


def plan_files(tensors: Iterable[Tensor], aliases: Mapping[str, str], *, file_bytes: int = FILE_BYTES) -> FileTable:
    """Lay out ``tensors`` (in layer order) in files of about ``file_bytes``."""
    batches = _cut(tensors, file_bytes)
    files: list[WeightFile] = []
    places: dict[str, Place] = {}
    for number, batch in enumerate(batches):
        ordered = sorted(batch, key=lambda t: -t.itemsize)
        head, offsets, size = _file_head(ordered)
        files.append(WeightFile(weights_name(number + 1, len(batches)), head, size, tuple(ordered)))
        places |= {t.name: Place(number, offset, t) for t, offset in zip(ordered, offsets, strict=True)}
    kept = {alias: target for alias, target in aliases.items() if target in places}
    return FileTable(tuple(files), places, kept)


def _cut(tensors: Iterable[Tensor], file_bytes: int) -> list[list[Tensor]]:
    layers: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        layers.setdefault(layer_of(tensor.name), []).append(tensor)
    batches: list[list[Tensor]] = []
    held = 0
    for layer in layers.values():
        nbytes = sum(tensor.nbytes for tensor in layer)
        if not batches or held + nbytes > file_bytes or len(batches[-1]) + len(layer) > 100_000:
            batches.append([])
            held = 0
        batches[-1].extend(layer)
        held += nbytes
    return batches


def _file_head(tensors: Iterable[Tensor]) -> tuple[bytes, list[int], int]:
    """Header with length, absolute offset of each tensor, file size."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    ends: list[tuple[int, int]] = []
    at = 0
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": _header_shape(tensor),
            "data_offsets": [at, at + tensor.nbytes],
        }
        ends.append((at, at + tensor.nbytes))
        at += tensor.nbytes
    body = json.dumps(entries, separators=(",", ":")).encode()
    body += b" " * (-(8 + len(body)) % _ALIGN)
    if len(body) > _MAX_HEADER_BYTES:
        raise DamagedObject(f"a weight file with {len(ends)} tensors would need a header of {len(body)} bytes")
    head = struct.pack("<Q", len(body)) + body
    return head, [len(head) + start for start, _ in ends], len(head) + at


def _header_shape(tensor: Tensor) -> list[int]:
    # A byte holds two F4 values; safetensors counts values, torch (and the layout) counts bytes.
    if tensor.dtype == "F4" and tensor.shape:
        return [*tensor.shape[:-1], 2 * tensor.shape[-1]]
    return list(tensor.shape)

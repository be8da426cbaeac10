"""The weights of the soak as bits, without torch: what a rank publishes, what an engine loads, how both are compared.

Every tensor has ``BLOCKS`` blocks of rows, so that 1, 2 or 3 ranks can share it; ``STAMP`` says in each block of which
attempt and step it is.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

BLOCKS = 12
STAMP = "model.layers.0.stamp"
SHAPES = {
    "model.embed.weight": (48, 8192),
    "model.layers.0.mlp.weight": (240, 1500),
    "model.layers.1.mlp.weight": (240, 1501),
    "model.layers.1.norm.weight": (12,),
    "lm_head.weight": (24, 4096),
}
Bits = dict[str, np.ndarray]
_KINDS = {"BF16": np.uint16, "I64": np.int64}
_READ_BYTES = 1 << 18


def fresh(seed: int) -> Bits:
    """Weights like those of a model, as the bits of BF16, and a stamp."""
    chance = np.random.default_rng(seed)
    bits = {n: (chance.standard_normal(s).astype(np.float32) * 0.02).view(np.uint32) for n, s in SHAPES.items()}
    found: Bits = {name: (value >> 16).astype(np.uint16) for name, value in bits.items()}
    found[STAMP] = np.zeros((BLOCKS, 4), np.int64)
    return found


def move(bits: Bits, attempt: int, step: int, share: float) -> None:
    """One step: ``share`` of the weights go one unit in the last place up or down. The same on all ranks."""
    chance = np.random.default_rng([attempt, step])
    for name in SHAPES:
        flat = bits[name].reshape(-1)
        where = np.flatnonzero(chance.random(flat.size) < share)
        flat[where] += np.where(chance.random(where.size) < 0.5, 1, 65535).astype(np.uint16)
    for block in range(BLOCKS):
        bits[STAMP][block] = (attempt, step, block, 7)


def part(array: np.ndarray, first: int, last: int) -> np.ndarray:
    """Rows of blocks ``first`` to ``last`` (excluded)."""
    rows = array.shape[0] // BLOCKS
    return array[first * rows : last * rows]


def digest(bits: Mapping[str, np.ndarray], block: int) -> str:
    """Of one block of all tensors."""
    found = hashlib.sha256()
    for name in sorted(bits):
        found.update(part(bits[name], block, block + 1).tobytes())
    return found.hexdigest()[:24]


def load(directory: Path, pause: Callable[[], None]) -> Bits:
    """A model directory read as engines do, in pieces; ``pause`` is called between them."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    found: Bits = {}
    for name in sorted(set(index.values())):
        found |= _load_file(directory / name, pause)
    if set(found) != {*SHAPES, STAMP}:
        raise ValueError(f"{directory} holds {sorted(found)}")
    return found


def _load_file(path: Path, pause: Callable[[], None]) -> Bits:
    found: Bits = {}
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        base = file.tell()
        for tensor, about in header.items():
            start, end = about["data_offsets"]
            file.seek(base + start)
            data = b""
            while len(data) < end - start:
                data += file.read(min(_READ_BYTES, end - start - len(data)))
                pause()
            found[tensor] = np.frombuffer(data, _KINDS[about["dtype"]]).reshape(about["shape"])
    return found


class Log:
    """Lines of JSON that survive a kill; several processes may write to one."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def add(self, **facts: object) -> None:
        os.write(self._file, json.dumps(facts).encode() + b"\n")

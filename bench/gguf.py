"""Just enough of GGUF to read one packaged model: metadata, and tensors as F32, Q4_1 or Q8_0.

The layout is that of ggml's docs/gguf.md, version 3. Quantised weights come back dithered: each is moved uniformly
inside its cell of the grid, since weights that lie exactly on a coarse grid (many of them exactly zero) are what no
trained model has.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weightcast.measure.errors import MeasureError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_F32, _Q4_1, _Q8_0 = 0, 3, 8
_BLOCK = 32
_BLOCK_BYTES = {_Q4_1: 20, _Q8_0: 34}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: ``shape`` slowest dimension first, its ggml ``kind``, and its offset in the data."""

    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True, slots=True)
class Gguf:
    """A parsed file. ``metadata`` has numbers, strings as bytes, and lists of either."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    data: memoryview

    def read(self, name: str, generator: np.random.Generator) -> NDArray[np.float32]:
        """One tensor; a quantised one dithered. :class:`MeasureError` for kinds that are not known here."""
        info = self.tensors[name]
        count = prod(info.shape)
        if info.kind == _F32:
            return np.frombuffer(self.data, "<f4", count, info.offset).reshape(info.shape).copy()
        if info.kind not in _BLOCK_BYTES or info.shape[-1] % _BLOCK:
            raise MeasureError(f"{name} has ggml type {info.kind}; F32, Q4_1 and Q8_0 are known here")
        size = _BLOCK_BYTES[info.kind]
        blocks = np.frombuffer(self.data, np.uint8, count // _BLOCK * size, info.offset).reshape(-1, size)
        scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
        if info.kind == _Q4_1:
            low = blocks[:, 2:4].copy().view("<f2").astype(np.float32)
            cell = np.concatenate([blocks[:, 4:] & 0xF, blocks[:, 4:] >> 4], axis=1).astype(np.float32)
        else:
            low = np.zeros_like(scale)
            cell = blocks[:, 2:].view(np.int8).astype(np.float32)
        cell += generator.random(cell.shape, dtype=np.float32) - np.float32(0.5)
        return (cell * scale + low).reshape(info.shape)


def parse(raw: bytes) -> Gguf:
    """Parse a whole file; :class:`MeasureError` if it is none, or another version."""
    if raw[:4] != b"GGUF" or len(raw) < 24:
        raise MeasureError("this is no GGUF file")
    cursor = _Cursor(raw, 4)
    version, tensor_count, entries = cursor.scalar("I"), cursor.scalar("Q"), cursor.scalar("Q")
    if version != 3:
        raise MeasureError(f"GGUF version {version}; 3 is known here")
    try:
        metadata = {cursor.string().decode(): cursor.value(cursor.scalar("I")) for _ in range(entries)}
        tensors = dict(cursor.tensor() for _ in range(tensor_count))
    except (struct.error, UnicodeDecodeError, KeyError) as error:
        raise MeasureError(f"the GGUF file is damaged near byte {cursor.at}: {error}") from None
    alignment = int(metadata.get("general.alignment", 32))
    return Gguf(metadata, tensors, memoryview(raw)[-(-cursor.at // alignment) * alignment :])


class _Cursor:
    def __init__(self, raw: bytes, at: int) -> None:
        self._raw = raw
        self.at = at

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._raw, self.at)
        self.at += struct.calcsize(f"<{code}")
        return value

    def string(self) -> bytes:
        size = self.scalar("Q")
        self.at += size
        return self._raw[self.at - size : self.at]

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        item, count = self.scalar("I"), self.scalar("Q")
        return [self.value(item) for _ in range(count)]

    def tensor(self) -> tuple[str, TensorInfo]:
        name = self.string().decode()
        shape = tuple(self.scalar("Q") for _ in range(self.scalar("I")))[::-1]
        kind, offset = self.scalar("I"), self.scalar("Q")
        return name, TensorInfo(shape, kind, offset)

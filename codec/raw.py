"""Method 1, ``raw``: the bytes themselves. What remains when nothing is smaller."""

from __future__ import annotations

import numpy as np

from codec._native import Digests
from codec.change import Change, whole_change
from codec.dtypes import Bits, find
from codec.errors import CorruptFrame, TruncatedFrame


def encode(base: Bits | None, new: Bits, dtype: str) -> bytes | None:
    """Always applies."""
    return new.tobytes()


def decode(base: Bits | None, body: memoryview, dtype: str, count: int, digests: Digests | None = None) -> Change:
    """A copy of the body as the whole new array."""
    info = find(dtype)
    size = count * info.item_bytes
    if len(body) != size:
        error = TruncatedFrame if len(body) < size else CorruptFrame
        raise error(f"the payload holds {len(body)} bytes where {count} elements of {dtype} take {size}")
    return whole_change(base, np.frombuffer(bytearray(body), info.bits), digests)

"""The tensors of the golden frames of several chunks, which are too large to be kept: made by a formula."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

COUNT = (1 << 24) + 1000
"""Two chunks, the second one small."""
KINDS = {"full": 4, "delta": 5, "stored-full": 6, "stored-delta": 7}


def tensors(kind: str) -> tuple[NDArray[np.uint8] | None, NDArray[np.uint8]]:
    """Base (None for a full) and new tensor, U8: what nothing makes smaller (SHAKE-256), or what compresses."""
    if kind == "full":
        return None, (np.arange(COUNT) // 4096 % 256).astype(np.uint8)
    new = np.frombuffer(hashlib.shake_256(b"new").digest(COUNT), np.uint8)
    if kind == "stored-full":
        return None, new
    if kind == "stored-delta":
        return np.frombuffer(hashlib.shake_256(b"base").digest(COUNT), np.uint8), new
    base = new.copy()
    base[:: 1 << 16] += 1
    base[-1] -= 3
    return base, new

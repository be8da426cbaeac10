"""Method 2, ``planes``: everything, cut into byte planes. The full.

Bits of floats are rotated left by one first: the exponent then fills the top plane (BF16, F32) with what can be
compressed, and the sign joins the mantissa, which cannot.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from codec import streams
from codec._native import Digests
from codec.change import Change, whole_change
from codec.dtypes import Bits, find


def split(bits: Bits, dtype: str) -> list[NDArray[np.uint8]]:
    """The byte planes of ``bits``, most significant first."""
    size = bits.itemsize
    if find(dtype).is_float:
        top = bits.dtype.type(8 * size - 1)
        bits = bits << bits.dtype.type(1) | bits >> top
    columns = bits.view(np.uint8).reshape(-1, size)
    return [np.ascontiguousarray(columns[:, k]) for k in reversed(range(size))]


def join(reader: streams.Reader, dtype: str, count: int) -> Bits:
    """Read the planes of ``count`` elements back; the inverse of :func:`split` and packing."""
    info = find(dtype)
    bits = np.empty(count, info.bits)
    columns = bits.view(np.uint8).reshape(-1, info.item_bytes)
    for k in reversed(range(info.item_bytes)):
        columns[:, k] = streams.unpack(reader, count)
    if info.is_float:
        bits = bits >> 1 | bits << (8 * info.item_bytes - 1)
    return bits


def encode(base: Bits | None, new: Bits, dtype: str) -> bytes | None:
    """The planes of ``new``; ``base`` plays no part. None if that is no smaller than the raw bytes."""
    body = streams.pack(split(new, dtype), streams.PLANE_CANDIDATES)
    return body if len(body) < new.nbytes else None


def decode(base: Bits | None, body: memoryview, dtype: str, count: int, digests: Digests | None = None) -> Change:
    """The whole new array."""
    reader = streams.Reader(body)
    bits = join(reader, dtype, count)
    reader.end()
    return whole_change(base, bits, digests)

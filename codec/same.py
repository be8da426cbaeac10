"""Method 0, ``same``: nothing changed. The body is empty."""

from __future__ import annotations

import numpy as np

from codec import kernels, streams
from codec._native import Digests
from codec.change import Change, sparse_change
from codec.dtypes import Bits
from codec.errors import InvalidInput


def encode(base: Bits | None, new: Bits, dtype: str) -> bytes | None:
    """An empty body if ``new`` equals ``base`` bit for bit, else None."""
    return b"" if base is not None and kernels.count_changed(base, new) == 0 else None


def decode(base: Bits | None, body: memoryview, dtype: str, count: int, digests: Digests | None = None) -> Change:
    """A change of no element."""
    if base is None:
        raise InvalidInput("'same' needs the base")
    streams.Reader(body).end()
    return sparse_change(base, np.empty(0, np.uint32), np.empty(0, base.dtype), digests)

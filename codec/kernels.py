"""The passes over whole tensors that methods share, in numpy: compare, scatter, hash a patched base.

Everything works in tiles, so that temporaries stay in cache and memory beyond the arguments is bounded.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from codec.digest import digest_patched as digest_patched
from codec.dtypes import Bits

_TILE_N = 1 << 18


def count_changed(base: Bits, new: Bits) -> int:
    """How many elements differ; both arrays have the same dtype and size."""
    return sum(
        int(np.count_nonzero(base[at : at + _TILE_N] != new[at : at + _TILE_N])) for at in range(0, base.size, _TILE_N)
    )


def changed_index(base: Bits, new: Bits) -> NDArray[np.uint32]:
    """Ascending positions of the elements that differ."""
    parts = [
        (np.flatnonzero(base[at : at + _TILE_N] != new[at : at + _TILE_N]) + at).astype(np.uint32)
        for at in range(0, base.size, _TILE_N)
    ]
    return np.concatenate(parts) if parts else np.empty(0, np.uint32)


def scatter(buffer: Bits, index: NDArray[np.uint32], bits: Bits) -> None:
    """``buffer[index] = bits``; the caller has checked that the largest index is inside the buffer."""
    buffer[index] = bits

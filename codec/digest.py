"""XXH3-128 of raw bytes: the integrity digest of groups and frames.

16 bytes, canonical (big-endian) order, seed 0. Not cryptographic: whoever can choose both sides can collide it;
authenticity is the manifest's, whose SHA-256 chain ends in the head.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from codec.dtypes import Bits
from codec.errors import InvalidInput

DIGEST_BYTES = 16
TILE_BYTES = 256 << 10
"""How much of a result exists at a time while it is hashed: fits the second-level cache of current cores."""

Buffer: TypeAlias = bytes | bytearray | memoryview | NDArray[Any]


def digest(data: Buffer) -> bytes:
    """XXH3-128 of ``data`` (C-contiguous); 16 bytes. Releases the GIL. Raises :class:`InvalidInput`."""
    return xxhash.xxh3_128_digest(as_bytes(data))


def as_bytes(data: Buffer) -> memoryview:
    """``data`` (C-contiguous) as a flat view of its bytes; :class:`InvalidInput` for anything else."""
    try:
        view = data.data if isinstance(data, np.ndarray) else memoryview(data)
        if "O" in view.format:
            raise TypeError("it holds Python objects")
        return view.cast("B") if view.nbytes else memoryview(b"")
    except (TypeError, ValueError) as error:
        raise InvalidInput(
            f"expected bytes or a contiguous array of them, got {type(data).__name__}: {error}"
        ) from None


def update_patched(hasher: xxhash.xxh3_128, base: Bits, index: NDArray[np.uint32], bits: Bits) -> None:
    """Feed ``hasher`` with ``base`` as it is once ``bits`` are stored at ``index``, which ascends; neither changes.

    Works through one tile at a time, so the patched array never exists as a whole.
    """
    tile_n = TILE_BYTES // base.itemsize
    starts = np.arange(0, base.size, tile_n, dtype=np.int64)
    cuts = np.append(np.searchsorted(index, starts), index.size).tolist()
    tile = np.empty(min(tile_n, base.size), base.dtype)
    for start, low, high in zip(starts.tolist(), cuts, cuts[1:], strict=False):
        part = base[start : start + tile_n]
        if low != high:
            np.copyto(tile[: part.size], part)
            part = tile[: part.size]
            part[index[low:high].astype(np.int64) - start] = bits[low:high]
        hasher.update(as_bytes(part))

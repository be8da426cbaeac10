"""XXH3-128 of raw bytes: the integrity digest of groups and frames.

16 bytes, canonical (big-endian) order, seed 0. Not cryptographic: whoever can choose both sides can collide it;
authenticity is the manifest's, whose SHA-256 chain ends in the head.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from codec.errors import InvalidInput

DIGEST_BYTES = 16

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

"""The passes over whole tensors that methods share: compare, scatter, hash base and result. All release the GIL.

Native where memory is aligned, numpy where it is not: a tensor inside a mapped file may start at any byte.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from codec import _native
from codec._native import Digests
from codec.dtypes import Bits
from codec.errors import CorruptFrame

_TILE_N = 1 << 18  # numpy's temporaries stay in cache


def count_changed(base: Bits, new: Bits) -> int:
    """How many elements differ; both arrays have the same dtype and size."""
    if base.flags.aligned and new.flags.aligned:
        return _native.count_changed(base.view(np.uint8), new.view(np.uint8), base.itemsize)
    return int(changed_index(base, new).size)


def changed_index(base: Bits, new: Bits) -> NDArray[np.uint32]:
    """Ascending positions of the elements that differ."""
    parts = [
        (np.flatnonzero(base[at : at + _TILE_N] != new[at : at + _TILE_N]) + at).astype(np.uint32)
        for at in range(0, base.size, _TILE_N)
    ]
    return np.concatenate(parts) if parts else np.empty(0, np.uint32)


def scatter(buffer: Bits, index: NDArray[np.uint32], bits: Bits) -> None:
    """``buffer[index] = bits``; :class:`CorruptFrame`, with nothing stored, unless ``index`` ascends below its size."""
    if not buffer.flags.aligned:
        if not _ascends_below(index, buffer.size):
            raise CorruptFrame("the positions of the changed weights do not ascend within the tensor")
        buffer[index] = bits
        return
    try:
        _native.scatter(buffer.view(np.uint8), buffer.itemsize, index, bits.view(np.uint8))
    except ValueError as error:
        raise CorruptFrame(str(error)) from None


def hash_patched(digests: Digests, base: Bits, index: NDArray[np.uint32], bits: Bits) -> None:
    """Feed ``base`` as it is, and with ``bits`` stored at ``index``: tile by tile, the patched array never exists.

    Raises :class:`CorruptFrame` unless ``index`` ascends below the size of ``base``.
    """
    try:
        digests.add_patched(base.view(np.uint8), base.itemsize, index, bits.view(np.uint8))
    except ValueError as error:
        raise CorruptFrame(str(error)) from None


def hash_both(digests: Digests, base: Bits | None, result: Bits) -> None:
    """Feed both arrays, of one size; without a base its digest must not be wanted."""
    digests.add((result[:0] if base is None else base).view(np.uint8), result.view(np.uint8))


def _ascends_below(index: NDArray[np.uint32], size: int) -> bool:
    return index.size == 0 or (int(index[-1]) < size and bool((index[1:] > index[:-1]).all()))

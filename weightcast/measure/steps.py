"""Changes as signed steps in units in the last place, and what they cost at least when the old exponent is known."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from codec import dtypes
from codec.dtypes import Bits


def ordered(bits: Bits) -> NDArray[np.int64]:
    """Map the bits of floats to integers in the order of their values: neighbours differ by 1. Bijective; -0 is -1."""
    width = 8 * bits.itemsize
    signed = bits.view(f"int{width}").astype(np.int64)
    return np.where(signed < 0, signed ^ ((1 << (width - 1)) - 1), signed)


def steps_of(base: Bits, new: Bits, dtype: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Positions of the changed elements, and their steps; for types that are no floats, of the numbers themselves."""
    where = np.flatnonzero(base != new)
    old, now = base[where], new[where]
    if dtypes.find(dtype).is_float:
        return where, ordered(now) - ordered(old)
    signed = f"int{8 * base.itemsize}"
    return where, (now - old).view(signed).astype(np.int64)


def exponents(base: Bits, dtype: str) -> NDArray[np.int64]:
    """The exponent field of each element; zeros for types without one."""
    info = dtypes.find(dtype)
    if not info.is_float:
        return np.zeros(base.size, np.int64)
    fields = base >> base.dtype.type(info.mantissa_bits)
    return (fields & base.dtype.type((1 << info.exponent_bits) - 1)).astype(np.int64)


def memoryless_bits(base: Bits, new: Bits, dtype: str) -> float:
    """The empirical entropy, in bits, of all steps (0 where nothing changed) given the exponent of the old element.

    What a coder needs that knows this table for free and nothing else. A few changed elements fit their own table too
    well: read it as a floor, not as something a code can reach.
    """
    classes = exponents(base, dtype)
    members = np.bincount(classes)
    where, step = steps_of(base, new, dtype)
    changed = np.bincount(classes[where], minlength=members.size)
    _, counts = np.unique(np.stack([classes[where], step]), axis=1, return_counts=True)
    return float(_n_log_n(members) - _n_log_n(members - changed) - _n_log_n(counts))


def _n_log_n(counts: NDArray[np.int64]) -> float:
    positive = counts[counts > 0].astype(np.float64)
    return float((positive * np.log2(positive)).sum())

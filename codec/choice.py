"""Which methods are run over a delta: how much changes decides, and for a large dense delta a sample of it.

A dense delta may suit any method, and each takes as long as many sparse deltas. What is chosen depends on the two
arrays alone.
"""

from __future__ import annotations

import numpy as np

from codec import kernels, methods
from codec.dtypes import Bits

_DENSE_ONE_IN = 8
"""From one changed element in this many on, the methods for dense updates are tried as well."""
_SMALL_BYTES = 64 << 10
"""Up to this size all delta methods are tried: a model of the changes may cost more than the changes."""
_SAMPLE_FROM_BYTES = 1 << 20
_SAMPLE_SLICES = 16
_SLICE_ELEMENTS = 4096
"""At most; a sample is never more than an eighth of the group."""
_CLOSE_ONE_IN = 8
"""A method whose sample is larger than the smallest by more than one part in this many is not run: what a model or a
table costs, which weighs more in a sample, stays below that."""


def candidates(changed: int, new: Bits, default: str) -> list[str]:
    """The methods worth trying for a delta with ``changed`` changes, of which the smallest body will be taken."""
    if changed * _DENSE_ONE_IN >= new.size:
        return _dense(default)
    return [default, "fields_v1"] if new.nbytes <= _SMALL_BYTES else [default]


def sampled(base: Bits, new: Bits, dtype: str, default: str) -> list[str] | None:
    """The methods worth trying for a large dense delta, none where raw bytes are smallest; None for any other delta."""
    if new.nbytes < _SAMPLE_FROM_BYTES:
        return None
    old, now = _sample(base), _sample(new)
    if kernels.count_changed(old, now) * _DENSE_ONE_IN < now.size:
        return None
    bodies = {name: methods.find(name).encode(old, now, dtype) for name in _dense(default)}
    sizes = {name: len(body) for name, body in bodies.items() if body is not None}
    most = min(sizes.values(), default=0) * (_CLOSE_ONE_IN + 1) // _CLOSE_ONE_IN
    return [name for name, size in sizes.items() if size <= most]


def _dense(default: str) -> list[str]:
    return [default, "xor_planes", "planes"]


def _sample(bits: Bits) -> Bits:
    """Slices of the array, at uneven distances: rows of a matrix must not all be met at their beginnings."""
    step = bits.size // _SAMPLE_SLICES
    length = min(_SLICE_ELEMENTS, step // 8)
    starts = [i * step + i * 2654435761 % (step - length) for i in range(_SAMPLE_SLICES)]
    return np.concatenate([bits[start : start + length] for start in starts])

"""Which methods are run over a delta: how much changes decides, and where, and for a large delta a sample of it.

A dense delta may suit any method, and each takes as long as many sparse deltas. Where changes are clustered, as in the
rows of tokens that occurred, gaps between them may be cheaper than chances by exponent. What is chosen depends on the
two arrays alone.
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
_DENSE_SLICES = 16
_CLUSTERED_ONE_IN = 16
"""Of a delta with clusters so large a part is looked at, however large it is: most slices may hold no change."""
_SPARSE_ONE_IN = 256
"""With fewer changes gaps take little longer to code than to look at, and a sample would hold too few of them."""
_SLICE_ELEMENTS = 4096
"""At most; a sample is never more than an eighth of the group."""
_CLOSE_ONE_IN = 8
"""A method whose sample is larger than the smallest by more than one part in this many is not run: what a model or a
table costs, which weighs more in a sample, stays below that. fields_v1 takes so long that it has to win by as much."""
_RUN = 64


def candidates(base: Bits, new: Bits, dtype: str, default: str, *, changed: int, clustered: bool) -> list[str]:
    """The methods worth trying for a delta with ``changed`` changes, of which the smallest body will be taken.

    ``clustered``: the changes are in fewer places than independent ones would be.
    """
    dense = changed * _DENSE_ONE_IN >= new.size
    small = new.nbytes <= _SMALL_BYTES
    names = _names(default, dense=dense, gaps=small or clustered)
    sparse = changed * _SPARSE_ONE_IN <= new.size
    if dense or small or sparse or not clustered or new.nbytes < _SAMPLE_FROM_BYTES:
        return names
    slices = max(_DENSE_SLICES, new.size // (_SLICE_ELEMENTS * _CLUSTERED_ONE_IN))
    return _closest(names, _sample(base, slices), _sample(new, slices), dtype)


def sampled(base: Bits, new: Bits, dtype: str, default: str) -> list[str] | None:
    """The methods worth trying for a large dense delta, none where raw bytes are smallest; None for any other delta."""
    if new.nbytes < _SAMPLE_FROM_BYTES:
        return None
    old, now = _sample(base, _DENSE_SLICES), _sample(new, _DENSE_SLICES)
    if kernels.count_changed(old, now) * _DENSE_ONE_IN < now.size:
        return None
    return _closest(_names(default, dense=True, gaps=_is_clustered(old, now)), old, now, dtype)


def _names(default: str, *, dense: bool, gaps: bool) -> list[str]:
    names = [default, *(["fields_v1"] if gaps else []), *(["xor_planes", "planes"] if dense else [])]
    return list(dict.fromkeys(names))


def _closest(names: list[str], old: Bits, now: Bits, dtype: str) -> list[str]:
    """Those of the methods that may be the smallest, by a sample."""
    bodies = {name: methods.find(name).encode(old, now, dtype) for name in names}
    sizes = {name: len(body) for name, body in bodies.items() if body is not None}
    least = min(sizes.values(), default=0)
    close = [name for name, size in sizes.items() if size <= least + least // _CLOSE_ONE_IN]
    return close if len(close) < 2 or names[0] == "fields_v1" else [name for name in close if name != "fields_v1"]


def _is_clustered(old: Bits, now: Bits) -> bool:
    """Whether in a dense sample one run in ten has no change, where of independent changes each run would have some."""
    runs = (old != now)[: now.size // _RUN * _RUN].reshape(-1, _RUN).any(axis=1)
    return bool(np.count_nonzero(runs) * 10 < runs.size * 9)


def _sample(bits: Bits, slices: int) -> Bits:
    """Slices of the array, at uneven distances: rows of a matrix must not all be met at their beginnings."""
    step = bits.size // slices
    length = min(_SLICE_ELEMENTS, step // 8)
    starts = [i * step + i * 2654435761 % (step - length) for i in range(slices)]
    return np.concatenate([bits[start : start + length] for start in starts])

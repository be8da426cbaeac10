"""What :mod:`codec.reference_ulp_encoder` looks at before it codes: samples, and what chunks would cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from codec.reference_ulp import Fields

Array = NDArray[Any]

RUN, PART = 256, 1 << 19  # weights
MODEL_BITS = 1280  # about what a chunk costs beside its changes
COST_BITS = 20  # costs of chunks are in units of 2^-20 bits


def log2(x: int) -> int:
    """log2 of x >= 1 in units of 2^-32, rounded down bit by bit."""
    top = x.bit_length() - 1
    y, result = (x << 31 >> top), top
    for _ in range(32):
        y = y * y >> 31
        carry = y >> 32
        y >>= carry
        result = result << 1 | carry
    return result


def x_log_x(x: int) -> int:
    """x * log2(x) in units of 2^-32."""
    return x * log2(x) if x else 0


def choice_cost(k: int, n: int) -> int:
    """Bits, in units of 2^-32, of saying which k of n change."""
    return x_log_x(n) - x_log_x(k) - x_log_x(n - k)


@dataclass
class Sample:
    """By exponent: weights looked at, one in ``stride``, and how many of them change."""

    stride: int
    seen: Array
    changed: Array


def sample_stride(count: int) -> int:
    """Of how many weights one is looked at."""
    return next(stride for stride in (16, 8, 4, 2, 1) if count >> 18 >= stride or stride == 1)


def chosen_run(first: int, stride: int) -> int:
    """Which of ``stride`` runs is looked at, of those from run ``first`` of the body on."""
    h = first * 2654435761 % (1 << 32)
    h = (h ^ h >> 15) * 2246822519 % (1 << 32)
    return h * stride >> 32


def take_sample(base: Array, new: Array, first: int, count: int, stride: int, f: Fields) -> Sample:
    """Of the weights ``[first, first + count)`` of a body."""
    end, exponents = first + count, 1 << f.exponent
    starts = [start + RUN * chosen_run(start // RUN, stride) for start in range(first, end, RUN * stride)]
    at = np.concatenate([np.arange(start, max(start, min(start + RUN, end))) for start in starts])
    keys = (base[at].astype(np.int64) >> f.mantissa) % exponents
    changed = keys[base[at] != new[at]]
    return Sample(stride, np.bincount(keys, minlength=exponents), np.bincount(changed, minlength=exponents))


def choose_chunk(base: Array, new: Array, fields: Fields) -> int:
    """log2 of the chunk size."""
    if base.size <= PART:
        return 24
    stride = sample_stride(base.size)
    parts = [take_sample(base, new, i, min(PART, base.size - i), stride, fields) for i in range(0, base.size, PART)]
    differ, looked = sum(int(p.changed.sum()) for p in parts), sum(int(p.seen.sum()) for p in parts)
    largest = 22 if differ * 64 > looked else 24
    if cheapest(parts, largest, by_exponent=False) == largest:
        return largest
    return cheapest(parts, largest, by_exponent=True)


def cheapest(parts: list[Sample], largest: int, *, by_exponent: bool) -> int:
    """The chunk size that costs least; a smaller one than the largest has to save one part in 32."""
    best, most = largest, 0
    for log in range(largest, 18, -1):
        step = 1 << (log - 19)
        cost = sum(_chunk_cost(parts[i : i + step], by_exponent) for i in range(0, len(parts), step))
        if log == largest or cost < most:
            best, most = log, cost - cost // 32 if log == largest else cost
    return best


def _chunk_cost(parts: list[Sample], by_exponent: bool) -> int:
    changed, seen = np.sum([p.changed for p in parts], axis=0), np.sum([p.seen for p in parts], axis=0)
    if not np.any(changed):
        return 0
    k, n = (changed, seen) if by_exponent else (changed.sum(keepdims=True), seen.sum(keepdims=True))
    costs = [choice_cost(*pair) >> (32 - COST_BITS) for pair in zip(k.tolist(), n.tolist(), strict=True)]
    return (MODEL_BITS << COST_BITS) + parts[0].stride * sum(costs)

"""Method 3, ``fields_v1``: changed positions as gaps; mantissa-only changes apart from the others.

The published idea of ARCv3, on raw bits: unchanged elements are left out; changes of the mantissa alone are one
class; changes of exponent or sign (and every change of a type without these fields) another. Either class is a list
of gaps and a list of steps, cut into byte planes and packed by several general compressors, the smallest kept.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from codec import kernels, streams
from codec._native import Digests
from codec.change import Change, sparse_change
from codec.dtypes import BITS_OF_SIZE, Bits, find
from codec.errors import CorruptFrame, InvalidInput


def encode(base: Bits | None, new: Bits, dtype: str) -> bytes | None:
    """The changes from ``base`` to ``new``; None without a base, or if that is no smaller than the raw bytes."""
    if base is None:
        return None
    index = kernels.changed_index(base, new)
    old, now = base[index], new[index]
    beyond_mantissa = (old ^ now) >> find(dtype).mantissa_bits != 0
    head = bytearray()
    planes: list[NDArray[np.uint8]] = []
    for member in (~beyond_mantissa, beyond_mantissa):
        where = index[member].astype(np.int64)
        gaps = np.diff(where, prepend=-1) - 1
        steps = _zigzag(now[member] - old[member])
        head += streams.varint(where.size)
        if where.size:
            for values in (_narrow(gaps), _narrow(steps)):
                head.append(values.itemsize)
                planes += _planes(values)
    body = bytes(head) + streams.pack(planes, streams.SPARSE_CANDIDATES)
    return body if len(body) < new.nbytes else None


def decode(base: Bits | None, body: memoryview, dtype: str, count: int, digests: Digests | None = None) -> Change:
    """The changes as a sparse change of ``base``, which is only read."""
    if base is None:
        raise InvalidInput("fields_v1 needs the base")
    reader = streams.Reader(body)
    sizes = [_class_head(reader, count, base.itemsize) for _ in range(2)]
    wheres, steps = [], []
    for n, gap_bytes, step_bytes in sizes:
        where = np.cumsum(_join(reader, n, gap_bytes).astype(np.int64) + 1) - 1
        if n and where[-1] >= count:
            raise CorruptFrame(f"a change lies at element {where[-1]} of {count}")
        wheres.append(where)
        steps.append(_unzigzag(_join(reader, n, step_bytes).astype(base.dtype)))
    reader.end()
    where = np.concatenate(wheres)
    order = np.argsort(where, kind="stable")  # two ascending runs: one merge
    index = where[order].astype(np.uint32)
    return sparse_change(base, index, base[index] + np.concatenate(steps)[order], digests)


def _class_head(reader: streams.Reader, count: int, item_bytes: int) -> tuple[int, int, int]:
    """Number of changes of a class, bytes a gap, bytes a step."""
    n = reader.varint(count)
    if n == 0:
        return 0, 1, 1
    gap_bytes, step_bytes = reader.u8(), reader.u8()
    if gap_bytes not in (1, 2, 4) or step_bytes not in (1, 2, 4, 8) or step_bytes > item_bytes:
        raise CorruptFrame(f"gaps of {gap_bytes} and steps of {step_bytes} bytes are impossible here")
    return n, gap_bytes, step_bytes


def _zigzag(step: Bits) -> Bits:
    """Signed steps (modulo 2**width) as unsigned numbers, small for small steps: 0, -1, 1, -2 ... become 0, 1, 2, 3."""
    one, top = step.dtype.type(1), step.dtype.type(8 * step.itemsize - 1)
    z: Bits = (step << one) ^ np.negative(step >> top)
    return z


def _unzigzag(z: Bits) -> Bits:
    one = z.dtype.type(1)
    step: Bits = (z >> one) ^ np.negative(z & one)
    return step


def _narrow(values: NDArray[np.integer]) -> Bits:
    """Non-negative ``values`` in the narrowest unsigned type that holds them all."""
    top = int(values.max())
    size = next(n for n in (1, 2, 4, 8) if top < 1 << 8 * n)
    return values.astype(BITS_OF_SIZE[size])


def _planes(values: Bits) -> list[NDArray[np.uint8]]:
    columns = values.view(np.uint8).reshape(-1, values.itemsize)
    return [np.ascontiguousarray(columns[:, k]) for k in reversed(range(values.itemsize))]


def _join(reader: streams.Reader, n: int, size: int) -> Bits:
    values = np.zeros(n, BITS_OF_SIZE[size])
    if n:
        columns = values.view(np.uint8).reshape(-1, size)
        for k in reversed(range(size)):
            columns[:, k] = streams.unpack(reader, n)
    return values

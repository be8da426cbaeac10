"""Promise: groups coded by many threads at a time are what one thread makes of them, call after call."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

import codec

CHANGED_ONE_IN = (2, 7, 50, 300, 4000)


def pair(number: int) -> tuple[str, np.ndarray, np.ndarray]:
    """Each of another width, size and share of changes than its neighbours, so that memory is used for other things."""
    dtype, bits = (("BF16", np.uint16), ("F32", np.uint32), ("F8_E4M3", np.uint8))[number % 3]
    rng = np.random.default_rng(number)
    base = rng.normal(0, 0.02, 20_000 + 3000 * (number % 11)).astype(np.float32).view(np.uint32)
    base = (base >> (32 - 8 * bits().itemsize)).astype(bits)
    new = base.copy()
    new[rng.random(base.size) < 1 / CHANGED_ONE_IN[number % 5]] += 1
    return dtype, base, new


def test_groups_side_by_side() -> None:
    drawn = [pair(number) for number in range(40)]

    def encode(one: tuple[str, np.ndarray, np.ndarray]) -> codec.EncodedGroup:
        dtype, base, new = one
        return codec.encode_group(base, new, dtype)

    alone = [encode(one) for one in drawn]
    for _ in range(3):
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(encode, drawn)) == alone
    for coded, (dtype, base, new) in zip(alone, drawn, strict=True):
        buffer = base.copy()
        codec.apply_change(buffer, codec.decode_group(base, coded.payload, dtype, base.size))
        assert np.array_equal(buffer, new)
        assert coded.digest == codec.digest(new)

"""The floors are entropies: known cases come out exactly, and no coder gets below one that is exact."""

from __future__ import annotations

import numpy as np
import pytest

import codec
from weightcast.measure import iid
from weightcast.measure.steps import memoryless_bits, ordered, steps_of


def test_ordered_maps_neighbouring_floats_to_neighbouring_integers() -> None:
    codes = np.arange(1 << 16, dtype=np.uint16)
    mapped = ordered(codes)
    assert np.array_equal(np.sort(mapped), np.arange(-(1 << 15), 1 << 15))
    values = (codes.astype(np.uint32) << 16).view(np.float32)
    finite = np.isfinite(values)
    in_order = values[finite][np.argsort(mapped[finite])]
    assert (np.diff(in_order) >= 0).all()


def test_steps_cross_zero_and_exponents_one_at_a_time() -> None:
    base = np.array([0x3F80, 0x3F7F, 0x0000, 0x8000, 0x1234], np.uint16)
    new = np.array([0x3F7F, 0x3F80, 0x8000, 0x0001, 0x1234], np.uint16)
    where, steps = steps_of(base, new, "BF16")
    assert (where.tolist(), steps.tolist()) == ([0, 1, 2, 3], [-1, 1, -1, 2])
    assert steps_of(np.array([250], np.uint8), np.array([3], np.uint8), "U8")[1].tolist() == [9]


def test_the_memoryless_floor_is_the_entropy_within_each_exponent() -> None:
    quarter = np.full(400, 0x3F80, np.uint16)
    changed = quarter.copy()
    changed[::4] += 1
    other = np.full(100, 0x4000, np.uint16)  # a class in which all change alike costs nothing
    expected = 400 * (0.25 * 2 + 0.75 * np.log2(4 / 3))
    base, new = np.concatenate([quarter, other]), np.concatenate([changed, other + np.uint16(1)])
    assert memoryless_bits(base, new, "BF16") == pytest.approx(expected)
    assert memoryless_bits(base, base, "BF16") == 0


@pytest.mark.parametrize(("dtype", "lr"), [("BF16", 1e-6), ("F8_E4M3", 1e-6)])
def test_an_exact_floor_is_what_a_coder_comes_close_to_and_never_beats(dtype: str, lr: float) -> None:
    drawn = iid.generate(lr, dtype, 1 << 19, seed=3)
    floor = iid.floor_bytes(drawn)
    assert floor is not None
    pair = drawn.pair
    payload = codec.encode_group(pair.base, pair.new, dtype).payload
    assert 0.97 * floor < len(payload) < 1.15 * floor
    assert memoryless_bits(pair.base, pair.new, dtype) / 8 == pytest.approx(floor, rel=0.05)


def test_the_exact_floor_agrees_with_counting() -> None:
    """At a rate at which every cell is often hit: the plug-in entropy of many draws, cell by cell of FP8."""
    drawn = iid.generate(3e-4, "F8_E5M2", 1 << 20, seed=1)
    joint = np.bincount(drawn.pair.base.astype(np.int64) << 8 | drawn.pair.new, minlength=1 << 16).reshape(256, 256)
    share = joint / np.maximum(joint.sum(axis=1, keepdims=True), 1)
    counted = -(joint * np.log2(np.where(share > 0, share, 1))).sum() / drawn.pair.new.size
    assert iid.floor_bits("F8_E5M2", drawn.lr, drawn.scale) == pytest.approx(counted, rel=0.01)


def test_the_generator_repeats_itself_by_seed() -> None:
    one, same, other = (iid.generate(1e-6, "BF16", 1000, seed).pair for seed in (1, 1, 2))
    assert np.array_equal(one.new, same.new)
    assert not np.array_equal(one.base, other.base)
    assert iid.floor_bits("F32", 1e-6) is None

"""Promise: of a large dense delta a sample says which method is smallest, and it hardly ever errs."""

from __future__ import annotations

import numpy as np
import pytest

import codec
from codec import choice, kernels, methods

COUNT = 1 << 19


def weights(dtype, seed, scale=0.02):
    values = np.random.default_rng(seed).normal(0, scale, COUNT).astype(np.float32).view(np.uint32)
    return values if dtype == "F32" else (values >> 16).astype(np.uint16)


def pair(dtype, kind):
    base, rng = weights(dtype, 1), np.random.default_rng(2)
    bits = base.dtype.type
    if kind == "steps":
        return base, base + rng.choice(np.array([1, 2, 3, -1, -2]), COUNT).astype(bits)
    if kind == "replaced":
        return base, weights(dtype, 3)
    if kind == "noise":
        return base, rng.integers(0, 1 << 8 * base.itemsize, COUNT, dtype=bits)
    if kind == "one exponent":  # signs and mantissas are noise, so that only planes of the new bits shrink
        return base, rng.integers(0x3F80, 0x4000, COUNT).astype(bits) | rng.integers(0, 2, COUNT).astype(bits) << 15
    return base, np.where(rng.random(COUNT) < 0.2, base ^ bits(1), base)


@pytest.mark.parametrize(
    ("dtype", "kind", "expected"),
    [
        ("BF16", "steps", "ulp_v1"),
        ("BF16", "some", "ulp_v1"),
        ("BF16", "replaced", "ulp_v1"),
        ("BF16", "one exponent", "planes"),
        ("BF16", "noise", "raw"),
        ("F32", "steps", "ulp_v1"),
        ("F32", "noise", "raw"),
        ("U16", "steps", "fields_v1"),
        ("U32", "noise", "raw"),
    ],
)
def test_the_smallest_method_is_chosen(dtype, kind, expected):
    base, new = pair({"U16": "BF16", "U32": "F32"}.get(dtype, dtype), kind)
    coded = codec.encode_group(base, new, dtype)
    assert coded.changed == kernels.count_changed(base, new)
    bodies = [m.encode(base, new, dtype) for m in methods.METHODS if m.name not in ("same", "raw")]
    best = min((len(body) for body in bodies if body is not None), default=new.nbytes)
    assert len(coded.payload) <= 1 + best * 1.01
    assert methods.find_id(coded.payload[0]).name == expected
    result = base.copy()
    codec.apply_change(result, codec.decode_group(base, coded.payload, dtype, COUNT))
    assert np.array_equal(result, new)


def test_only_what_may_win_is_run_and_sparse_deltas_are_not_sampled():
    base, new = pair("BF16", "steps")
    assert choice.sampled(base, new, "BF16", "ulp_v1") == ["ulp_v1"]
    assert choice.sampled(base, pair("BF16", "noise")[1], "BF16", "ulp_v1") == []
    new = base.copy()
    new[::9] += 1
    assert choice.sampled(base, new, "BF16", "ulp_v1") is None
    assert choice.sampled(base[:1000], base[:1000] + np.uint16(1), "BF16", "ulp_v1") is None

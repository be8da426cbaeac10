"""Promise: never larger than raw + 64 bytes a tensor, a few bytes when nothing changed, fulls two thirds of raw."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import codec
from codec import dtypes


@pytest.mark.parametrize("dtype", [d.name for d in dtypes.DTYPES])
def test_noise_never_costs_more_than_64_bytes(dtype):
    rng = np.random.default_rng(0)
    info = dtypes.find(dtype)
    for n in (0, 1, 2, 100, 40_000):
        base, new = (rng.integers(0, 256, n * info.item_bytes, dtype=np.uint8).view(info.bits) for _ in range(2))
        assert len(codec.encode_delta(base, new, dtype=dtype)) <= new.nbytes + 64
        assert len(codec.encode_full(new, dtype=dtype)) <= new.nbytes + 64
        assert len(codec.encode_group(base, new, dtype).payload) <= new.nbytes + 1


def test_nothing_changed_is_one_byte(bf16_pair):
    assert codec.encode_group(bf16_pair.base, bf16_pair.base, "BF16").payload == b"\0"
    assert len(codec.encode_delta(bf16_pair.base, bf16_pair.base)) <= 16 + 2 * codec.DIGEST_BYTES + 4


def test_a_full_is_two_thirds_of_raw():
    weights = torch.from_numpy(np.random.default_rng(0).normal(0, 0.02, 1 << 20)).to(torch.bfloat16)
    assert len(codec.encode_full(weights)) < 0.68 * weights.nbytes


def test_integers_and_dense_updates_shrink():
    rng = np.random.default_rng(0)
    base = rng.integers(-100, 100, 100_000, dtype=np.int32)
    near = base + rng.integers(-3, 4, base.size, dtype=np.int32)
    assert len(codec.encode_delta(base, near)) < 0.3 * base.nbytes
    sparse = base.copy()
    sparse[::500] += 1
    assert len(codec.encode_delta(base, sparse)) < 0.005 * base.nbytes

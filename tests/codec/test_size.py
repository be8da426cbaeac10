"""Promise: what a tensor costs at most, a few bytes when nothing changed, fulls two thirds of raw.

At most: its raw bytes and 64 more, and 5 for each chunk of 2**24 elements after the first.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import codec
from codec import dtypes, header
from codec.streams import varint


@pytest.mark.parametrize("dtype", [d.name for d in dtypes.DTYPES])
def test_noise_never_costs_more_than_64_bytes(dtype):
    rng = np.random.default_rng(0)
    info = dtypes.find(dtype)
    for n in (0, 1, 2, 100, 40_000):
        base, new = (rng.integers(0, 256, n * info.item_bytes, dtype=np.uint8).view(info.bits) for _ in range(2))
        assert len(codec.encode_delta(base, new, dtype=dtype)) <= new.nbytes + 64
        assert len(codec.encode_full(new, dtype=dtype)) <= new.nbytes + 64
        assert len(codec.encode_group(base, new, dtype).payload) <= new.nbytes + 1


@pytest.mark.parametrize("dtype", ["F4", "BF16", "F64"])
def test_every_further_chunk_of_noise_costs_at_most_5_bytes(dtype, monkeypatch):
    info = dtypes.find(dtype)
    longest = header.CHUNK_N * max(d.item_bytes for d in dtypes.DTYPES) + 1
    assert len(varint(longest)) == 4  # beside which there is the method
    monkeypatch.setattr(header, "CHUNK_N", 2000)
    rng = np.random.default_rng(0)
    base, new = (rng.integers(0, 256, 20_001 * info.item_bytes, dtype=np.uint8).view(info.bits) for _ in range(2))
    for n, further in ((2000, 0), (2001, 1), (20_000, 9), (20_001, 10)):
        most = new[:n].nbytes + 64 + 5 * further
        assert len(codec.encode_delta(base[:n], new[:n], dtype=dtype)) <= most
        assert len(codec.encode_full(new[:n], dtype=dtype)) <= most
    mixed = new.copy()
    mixed[4000:] = base[4000:]
    assert len(codec.encode_delta(base, mixed, dtype=dtype)) <= mixed[:4000].nbytes + 64 + 5 * 10


def test_the_bound_is_that_of_large_tensors_too():
    rng = np.random.default_rng(0)
    new = np.frombuffer(rng.bytes((3 << 24) + 1), np.uint8)
    base = np.zeros_like(new)
    assert new.nbytes + 64 < len(codec.encode_delta(base, new)) <= new.nbytes + 64 + 5 * 3
    assert len(codec.encode_full(new)) <= new.nbytes + 64 + 5 * 3


@pytest.mark.parametrize("dims", [0, 1, 6, 21, 22, 32])
def test_a_full_has_room_for_21_dimensions(dims):
    shape = (1,) * max(0, dims - 6) + (128, 1, 1, 2, 1, 1)[:dims]
    new = np.frombuffer(np.random.default_rng(0).bytes(int(np.prod(shape))), np.uint8).reshape(shape)
    assert len(codec.encode_full(new)) <= new.nbytes + 64 + max(0, dims - 21)


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

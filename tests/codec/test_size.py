"""Promise: what a tensor costs at most, a few bytes when nothing changed, fulls two thirds of raw.

At most: its raw bytes and 64 more.
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
def test_further_chunks_of_noise_cost_nothing(dtype, monkeypatch):
    info = dtypes.find(dtype)
    monkeypatch.setattr(header, "CHUNK_N", 2000)
    rng = np.random.default_rng(0)
    base, new = (rng.integers(0, 256, 20_001 * info.item_bytes, dtype=np.uint8).view(info.bits) for _ in range(2))
    for n in (2000, 2001, 20_000, 20_001):
        delta = codec.encode_delta(base[:n], new[:n], dtype=dtype)
        full = codec.encode_full(new[:n], dtype=dtype)
        size_of_n = len(varint(n))
        assert len(delta) == new[:n].nbytes + 48 + size_of_n
        assert len(full) == new[:n].nbytes + 32 + size_of_n
        buffer = base[:n].copy()
        codec.apply_delta(buffer, delta)
        assert np.array_equal(buffer, new[:n])
        assert np.array_equal(codec.decode_full(full, container="numpy").view(info.bits), new[:n])


def test_chunks_are_coded_as_soon_as_that_is_smaller(monkeypatch):
    monkeypatch.setattr(header, "CHUNK_N", 2000)
    base, new = np.random.default_rng(0).integers(0, 256, (2, 20_000), dtype=np.uint8)
    for same, stored in ((0, True), (1, True), (2000, False), (2001, False)):
        mixed = new.copy()
        mixed[:same] = base[:same]
        frame = codec.encode_delta(base, mixed)
        head, _ = header.read(frame)
        assert head.stored == stored
        assert len(frame) <= mixed.nbytes + 64
        buffer = base.copy()
        codec.apply_delta(buffer, frame)
        assert np.array_equal(buffer, mixed)


@pytest.mark.parametrize("size", range(97, 104))
def test_the_smaller_frame_is_written(size):
    head = header.FrameHeader(dtypes.find("U8"), (100,), bytes(16), bytes(16))
    frame = header.write_smallest(head, [bytes(size)], bytes(100))
    assert len(frame) == 48 + 1 + min(1 + size, 100)
    assert header.read(frame)[0].stored == (size >= 100)


LARGE = 5 << 24
"""Bytes; five chunks of one-byte elements."""


@pytest.fixture(scope="module")
def noise():
    """Two arrays of ``LARGE`` bytes that nothing makes smaller."""
    rng = np.random.default_rng(0)
    return tuple(np.frombuffer(rng.bytes(LARGE + 8), np.uint8) for _ in range(2))


@pytest.mark.parametrize("dtype", ["F4", "BF16", "I32"])
def test_large_tensors_cost_no_more_than_64_bytes_either(noise, dtype):
    base, new = (array.view(dtypes.find(dtype).bits) for array in noise)
    delta = codec.encode_delta(base, new, dtype=dtype)
    assert len(delta) <= new.nbytes + 64
    buffer = base.copy()
    codec.apply_delta(buffer, delta)
    assert np.array_equal(buffer, new)
    full = codec.encode_full(new.reshape(1, -1, 1), dtype=dtype)
    assert len(full) <= new.nbytes + 64
    assert np.array_equal(codec.to_bits(codec.decode_full(full)), new)


@pytest.mark.parametrize("dims", [0, 1, 6, 21, 22, 26, 27, 32])
def test_a_full_has_room_for_all_dimensions(dims):
    shape = (1,) * max(0, dims - 6) + (128, 1, 1, 2, 1, 1)[:dims]
    new = np.frombuffer(np.random.default_rng(0).bytes(int(np.prod(shape))), np.uint8).reshape(shape)
    full = codec.encode_full(new)
    assert len(full) <= new.nbytes + (64 if dims <= 26 else 70)
    assert codec.decode_full(full).shape == shape


@pytest.mark.parametrize(
    "shape", [(128,) * 6 + (1,) * 20, (128,) * 6 + (1,) * 26, (0,) * 20 + (128,) * 6, (2**42,), (1,) * 32], ids=str
)
def test_no_shape_takes_the_header_beyond_64_bytes(shape):
    """Of tensors that are beyond any memory too: what stands before the elements."""
    head = header.FrameHeader(dtypes.find("U8"), shape, bytes(16), None, stored=True)
    assert len(header.write(head, [])) <= (64 if len(shape) <= 26 else 70)
    assert len(header.write(header.FrameHeader(head.dtype, (2**42,), bytes(16), bytes(16), stored=True), [])) == 55


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

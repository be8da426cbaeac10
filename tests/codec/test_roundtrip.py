"""Promise: whatever goes in comes out, bit for bit, through every method, type, shape and container."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import codec
from codec import dtypes, methods

TORCH_DTYPES = [getattr(torch, name) for name in (*dtypes.TORCH_NAMES, "complex128") if hasattr(torch, name)]
SHAPES = [(), (0,), (1,), (3, 0, 2), (7,), (33, 5), (2, 3, 4)]
NAMES = ["auto", *(m.name for m in methods.METHODS)]


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    empty = torch.empty(shape, dtype=dtype)
    if empty.numel() == 0:
        return empty
    top = 2 if dtype is torch.bool else 256
    raw = rng.integers(0, top, empty.numel() * empty.element_size(), dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).reshape(shape)


def same_bits(a: object, b: object) -> bool:
    return bool(np.array_equal(codec.to_bits(a), codec.to_bits(b)))


@pytest.mark.parametrize("method", NAMES)
@given(data=st.data())
def test_groups(data, pairs, method):
    pair = data.draw(pairs())
    before = pair.base.copy()
    pair.base.flags.writeable = False
    encoded = codec.encode_group(pair.base, pair.new, pair.dtype, method=method)
    assert len(encoded.payload) <= pair.new.nbytes + 1
    assert encoded.digest == codec.digest(pair.new)
    assert encoded.changed == np.count_nonzero(pair.base != pair.new)

    change = codec.decode_group(pair.base, encoded.payload, pair.dtype, pair.new.size)
    assert change.digest == encoded.digest
    assert np.array_equal(pair.base, before)
    if change.whole is None:
        assert change.index.dtype == np.uint32
        assert change.bits.dtype == pair.base.dtype
        assert (np.diff(change.index.astype(np.int64)) > 0).all()
    buffer = pair.base.copy()
    codec.apply_change(buffer, change)
    assert np.array_equal(buffer, pair.new)


@given(data=st.data())
def test_fulls(data, pairs):
    pair = data.draw(pairs())
    encoded = codec.encode_group(None, pair.new, pair.dtype)
    assert not codec.needs_base(encoded.payload)
    assert encoded.changed == pair.new.size
    change = codec.decode_group(None, encoded.payload, pair.dtype, pair.new.size)
    assert np.array_equal(change.whole, pair.new)


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_torch_frames(dtype, shape):
    base, new = random_tensor(dtype, shape, 1), random_tensor(dtype, shape, 2)
    buffer = base.clone()
    codec.apply_delta(buffer, codec.encode_delta(base, new))
    assert same_bits(buffer, new)
    full = codec.decode_full(codec.encode_full(new))
    assert same_bits(full, new)
    if dtype is not torch.complex128:  # has no name of its own: comes back as bytes
        assert full.dtype == dtype
        assert full.shape == new.shape


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1", "i2", "u2", "i4", "u4", "i8", "u8", "u1", "?", "c8", "c16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_numpy_frames(dtype, shape):
    def make(seed):
        rng = np.random.default_rng(seed)
        size = np.dtype(dtype).itemsize * int(np.prod(shape))
        return rng.integers(0, 2 if dtype == "?" else 256, size, dtype=np.uint8).view(dtype).reshape(shape)

    base, new = make(1), make(2)
    buffer = base.copy()
    codec.apply_delta(buffer, codec.encode_delta(base, new))
    assert buffer.tobytes() == new.tobytes()
    full = codec.decode_full(codec.encode_full(new), container="numpy")
    assert full.tobytes() == new.tobytes()
    if dtype != "c16":
        assert (full.dtype, full.shape) == (new.dtype, new.shape)


@pytest.mark.parametrize(
    "view",
    [lambda t: t.t(), lambda t: t[::2], lambda t: t[:, 1:5], lambda t: t.t()[1::3]],
    ids=["transposed", "strided rows", "columns", "both"],
)
def test_views_that_are_not_contiguous(view):
    for dtype in (torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.complex128):
        base, new = random_tensor(dtype, (12, 20), 1), random_tensor(dtype, (12, 20), 2)
        rest = base.clone()
        frame = codec.encode_delta(view(base), view(new))
        codec.apply_delta(view(rest), frame)
        assert same_bits(view(rest), view(new))
        expected = base.clone().view(torch.uint8)
        view(expected.view(dtype)).copy_(view(new))
        assert same_bits(rest, expected.view(dtype))
        array, target = base.view(torch.uint8).numpy().copy(), new.view(torch.uint8).numpy()
        codec.apply_delta(array.T[1::2], codec.encode_delta(array.T[1::2], target.T[1::2]))
        assert np.array_equal(array.T[1::2], target.T[1::2])


def test_other_byte_order():
    base, new = np.arange(10, dtype=">u4"), np.arange(10, dtype=">u4")[::-1].copy()
    buffer = base.copy()
    codec.apply_delta(buffer, codec.encode_delta(base, new))
    assert np.array_equal(buffer, new)


def test_special_values_of_floats():
    special = torch.tensor([0x7FC1, 0x7F80, 0xFF80, 0x8000, 0x0001, 0x8001, 0xFFFF, 0x7F7F], dtype=torch.int32)
    new = special.to(torch.int16).view(torch.bfloat16)
    for base in (torch.zeros(8, dtype=torch.bfloat16), new.flip(0)):
        buffer = base.clone()
        codec.apply_delta(buffer, codec.encode_delta(base, new))
        assert same_bits(buffer, new)


def test_minus_zero_is_a_change():
    base, new = torch.zeros(100), torch.zeros(100)
    new[50] = -0.0
    buffer = base.clone()
    codec.apply_delta(buffer, codec.encode_delta(base, new))
    assert same_bits(buffer, new)


def test_unsigned_bits_of_a_named_dtype(bf16_pair):
    frame = codec.encode_delta(bf16_pair.base, bf16_pair.new, dtype="BF16")
    tensor = torch.from_numpy(bf16_pair.base.copy()).view(torch.bfloat16)
    codec.apply_delta(tensor, frame)
    assert same_bits(tensor, bf16_pair.new)
    array = bf16_pair.base.copy()
    codec.apply_delta(array, frame)
    assert np.array_equal(array, bf16_pair.new)


def test_several_chunks():
    count = 2 * (1 << 24) + 5
    rng = np.random.default_rng(0)
    base = rng.integers(0, 256, count, dtype=np.uint8)
    new = base.copy()
    new[rng.integers(0, count, 1000)] ^= 3
    new[-5:] += 1
    frame = codec.encode_delta(base, new)
    assert len(frame) < 8000
    codec.apply_delta(base, frame)
    assert np.array_equal(base, new)
    smooth = np.repeat(np.arange(5, dtype=np.uint8), count // 5 + 1)[:count]
    assert np.array_equal(codec.decode_full(codec.encode_full(smooth), container="numpy"), smooth)


def test_grad_and_device_views():
    parameter = torch.nn.Parameter(torch.randn(50))
    new = parameter.detach() + 1
    codec.apply_delta(parameter, codec.encode_delta(parameter, new))
    assert torch.equal(parameter.detach(), new)


def test_ml_dtypes_names_are_known():
    assert dtypes._NUMPY_NAMES["bfloat16"] == "BF16"
    assert dtypes._NUMPY_NAMES["float8_e4m3fn"] == "F8_E4M3"

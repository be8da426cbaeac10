"""Promise: the fast code and the slow decoder written from FORMAT.md agree, in both directions."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import codec
from codec import dtypes, header, methods, reference

GENERAL = [m for m in methods.METHODS if m.name in ("same", "raw", "planes", "fields_v1", "xor_planes")]


def test_tables_agree():
    assert {d.name: (d.code, d.item_bytes, d.exponent_bits, d.mantissa_bits) for d in dtypes.DTYPES} == reference.TYPES


@pytest.mark.parametrize("method", [m.name for m in GENERAL])
@given(data=st.data())
def test_reference_decodes_what_we_encode(data, pairs, method):
    pair = data.draw(pairs())
    payload = codec.encode_group(pair.base, pair.new, pair.dtype, method=method).payload
    decoded = reference.decode_payload(pair.base, payload, pair.dtype, pair.new.size)
    assert np.array_equal(decoded, pair.new)


@pytest.mark.parametrize("compressor", range(4))
@pytest.mark.parametrize("method", [m for m in GENERAL if m.name != "same"], ids=lambda m: m.name)
@given(data=st.data())
def test_we_decode_what_the_reference_encodes(data, pairs, method, compressor):
    pair = data.draw(pairs())
    payload = reference.encode_payload(pair.base, pair.new, pair.dtype, method.id, compressor)
    change = codec.decode_group(pair.base, payload, pair.dtype, pair.new.size)
    buffer = pair.base.copy()
    codec.apply_change(buffer, change)
    assert np.array_equal(buffer, pair.new)
    assert change.digest == codec.digest(pair.new)


@given(data=st.data())
def test_frames(data, pairs):
    pair = data.draw(pairs())
    delta = codec.encode_delta(pair.base, pair.new, dtype=pair.dtype, method="fields_v1")
    name, shape, new = reference.decode_frame(pair.base, delta)
    assert (name, shape) == (pair.dtype, (pair.new.size,))
    assert np.array_equal(new, pair.new)
    full = codec.encode_full(pair.new.reshape(1, -1, 1), dtype=pair.dtype)
    name, shape, new = reference.decode_frame(None, full)
    assert (name, shape) == (pair.dtype, (1, pair.new.size, 1))
    assert np.array_equal(new, pair.new)


@given(data=st.data(), chunk=st.integers(1, 40))
def test_frames_of_several_chunks(data, chunk, pairs):
    pair = data.draw(pairs())
    with mock.patch.object(header, "CHUNK_N", chunk), mock.patch.object(reference, "CHUNK_N", chunk):
        for base in (pair.base, None):
            if base is None:
                frame = codec.encode_full(pair.new, dtype=pair.dtype)
            else:
                frame = codec.encode_delta(base, pair.new, dtype=pair.dtype, method="fields_v1")
            assert frame[5] == (base is not None) + (4 if pair.new.size > chunk else 0) + (2 if frame[5] & 2 else 0)
            name, shape, new = reference.decode_frame(base, frame)
            assert (name, shape) == (pair.dtype, (pair.new.size,))
            assert np.array_equal(new, pair.new)
            if frame[5] & 2:
                assert reference.encode_stored_frame(base, pair.new, pair.dtype, shape) == frame
            buffer = np.zeros_like(pair.new) if base is None else base.copy()
            codec.apply_delta(buffer, frame)
            assert np.array_equal(buffer, pair.new)


@given(data=st.data())
def test_stored_frames(data, pairs):
    pair = data.draw(pairs())
    shape = tuple(data.draw(st.permutations([pair.new.size, *[1] * data.draw(st.integers(0, 31))])))
    info = dtypes.find(pair.dtype)
    for base, dims in ((None, shape), (pair.base, (pair.new.size,))):
        frame = reference.encode_stored_frame(base, pair.new, pair.dtype, dims)
        base_digest = None if base is None else codec.digest(base)
        head = header.FrameHeader(info, dims, codec.digest(pair.new), base_digest, stored=True)
        assert header.write(head, [pair.new]) == frame
        assert header.read(frame)[0] == head
        buffer = np.zeros_like(pair.new) if base is None else base.copy()
        codec.apply_delta(buffer, frame)
        assert np.array_equal(buffer, pair.new)
        name, found, new = reference.decode_frame(base, frame)
        assert (name, found) == (pair.dtype, dims)
        assert np.array_equal(new, pair.new)


@given(data=st.data())
def test_the_same_damage_to_a_stored_frame_is_refused_by_both(data, pairs):
    pair = data.draw(pairs(max_n=60))
    base = data.draw(st.sampled_from([None, pair.base]))
    shape = (2, 3, pair.new.size, 1, 40)[: data.draw(st.integers(1, 5))] if base is None else (pair.new.size,)
    new = np.resize(pair.new, int(np.prod(shape)))
    frame = bytearray(reference.encode_stored_frame(base, new, pair.dtype, shape))
    behind = 32 if base is None else 48
    frame += bytes(data.draw(st.integers(0, 1)))
    for _ in range(data.draw(st.integers(0, 2))):
        at = data.draw(st.sampled_from([5, 7, *range(behind, min(behind + 8, len(frame)))]))
        frame[at] = data.draw(st.integers(0, 255))
    frame[8:16] = xxhash.xxh3_64_digest(bytes(frame[:8] + frame[16:]))[::-1]

    def fast():
        if base is None:
            return codec.to_bits(codec.decode_full(bytes(frame), container="numpy"))
        buffer = base.copy()
        codec.apply_delta(buffer, bytes(frame))
        return buffer

    assert outcome(lambda: reference.decode_frame(base, bytes(frame))[2]) == outcome(fast)


@given(data=st.data())
def test_the_same_damage_is_refused_by_both(data, pairs):
    pair = data.draw(pairs(max_n=60))
    method = data.draw(st.sampled_from(GENERAL))
    payload = bytearray(
        reference.encode_payload(pair.base, pair.new, pair.dtype, method.id, data.draw(st.integers(0, 3)))
    )
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))

    if payload[0] == methods.ULP:
        return  # has its own oracle
    assert outcome(lambda: reference.decode_payload(pair.base, bytes(payload), pair.dtype, pair.new.size)) == outcome(
        lambda: applied(pair.base, codec.decode_group(pair.base, payload, pair.dtype, pair.new.size))
    )


def applied(base, change):
    buffer = base.copy()
    codec.apply_change(buffer, change)
    return buffer


def outcome(decode):
    try:
        return decode().tobytes()
    except codec.CodecError:
        return None

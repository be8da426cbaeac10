"""Promise: bytes that stop too early are refused, wherever they stop."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

import codec
from codec import header, methods

SPARSE_OR_NOT = [m.name for m in methods.METHODS]


@pytest.mark.parametrize("method", SPARSE_OR_NOT)
def test_every_prefix_of_a_delta_frame(bf16_pair, method):
    base, new = bf16_pair.base[:300], bf16_pair.new[:300]
    new = base if method == "same" else new
    frame = codec.encode_delta(base, new, method=method, dtype="BF16")
    for size in range(len(frame)):
        buffer = base.copy()
        with pytest.raises(codec.CorruptFrame):
            codec.apply_delta(buffer, frame[:size])
        assert np.array_equal(buffer, base)


def test_every_prefix_of_a_full_frame(bf16_pair):
    frame = codec.encode_full(bf16_pair.new[:300].reshape(30, 10), dtype="BF16")
    for size in range(len(frame)):
        with pytest.raises(codec.CorruptFrame):
            codec.decode_full(frame[:size])


def test_every_prefix_of_a_stored_frame():
    base, new = np.random.default_rng(0).integers(0, 256, (2, 300), dtype=np.uint8)
    for frame in (codec.encode_delta(base, new), codec.encode_full(new.reshape(30, 10))):
        assert header.read(frame)[0].stored
        for size in range(len(frame)):
            check = xxhash.xxh3_64_digest(frame[:8] + frame[16:size])[::-1]
            for prefix in (frame[:size], (frame[:8] + check + frame[16:])[:size]):
                buffer = base.copy()
                with pytest.raises(codec.CorruptFrame):
                    codec.apply_delta(buffer, prefix)
                assert np.array_equal(buffer, base)


@pytest.mark.parametrize("method", SPARSE_OR_NOT)
def test_every_prefix_of_a_payload(bf16_pair, method):
    base, new = bf16_pair.base[:300], bf16_pair.new[:300]
    new = base if method == "same" else new
    payload = codec.encode_group(base, new, "BF16", method=method).payload
    for size in range(len(payload)):
        with pytest.raises(codec.CorruptFrame):
            codec.decode_group(base, payload[:size], "BF16", 300)


@pytest.mark.parametrize("method", SPARSE_OR_NOT)
def test_bytes_that_follow_are_refused(bf16_pair, method):
    base, new = bf16_pair.base, bf16_pair.new
    payload = codec.encode_group(base, base if method == "same" else new, "BF16", method=method).payload
    with pytest.raises(codec.CorruptFrame):
        codec.decode_group(base, payload + b"\0", "BF16", base.size)
    with pytest.raises(codec.CorruptFrame):
        codec.decode_full(codec.encode_full(new) + b"\0")


def test_an_empty_payload_says_so():
    with pytest.raises(codec.TruncatedFrame, match="empty"):
        codec.decode_group(None, b"", "BF16", 3)
    with pytest.raises(codec.TruncatedFrame):
        codec.needs_base(b"")


@pytest.mark.parametrize("data", [b"no", b"PK", b"x" * 100, b"\x89PNG", b"{}"])
def test_what_never_was_a_frame_is_called_that(data):
    buffer = np.zeros(3, np.uint16)
    with pytest.raises(codec.CorruptFrame, match="not a weightcast frame: the magic number is missing"):
        codec.apply_delta(buffer, data)
    with pytest.raises(codec.CorruptFrame, match="not a weightcast frame: the magic number is missing"):
        codec.decode_full(data)

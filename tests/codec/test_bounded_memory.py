"""Promise: memory is bounded by what the input has earned, and taken only after its claims were checked."""

from __future__ import annotations

import bz2
import tracemalloc
import zlib

import numpy as np
import pytest
import zstandard

import codec
from codec import dtypes, header, streams

MIB = 1 << 20
TB = 1 << 40


def peak_of(work, *errors):
    """The peak of memory that ``work`` takes on top of what is there, in bytes; it must raise one of ``errors``."""
    tracemalloc.start()
    try:
        with pytest.raises(errors):
            work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def full_frame(count, payloads):
    head = header.FrameHeader(dtypes.find("BF16"), (count,), bytes(16), None)
    return header.write(head, payloads)


def test_a_small_frame_that_claims_a_terabyte():
    chunks = TB // 2 // header.CHUNK_N
    frame = full_frame(TB // 2, [b"\x02" * 8] * 100)
    assert len(frame) < 1024
    assert chunks > 1024
    assert peak_of(lambda: codec.decode_full(frame), codec.TruncatedFrame) < MIB


@pytest.mark.parametrize("base_digest", [None, codec.digest(b"")], ids=["full", "delta"])
def test_a_small_stored_frame_that_claims_a_terabyte(base_digest):
    head = header.FrameHeader(dtypes.find("BF16"), (TB // 2,), bytes(16), base_digest, stored=True)
    frame = header.write(head, [bytes(100)])
    assert peak_of(lambda: codec.decode_full(frame), codec.TruncatedFrame) < MIB
    assert peak_of(lambda: codec.apply_delta(np.zeros(3, np.uint16), frame), codec.TruncatedFrame) < MIB


def test_stored_frames_are_decoded_from_where_they_lie():
    base, new = (np.frombuffer(np.random.default_rng(seed).bytes(32 * MIB), np.uint8) for seed in range(2))
    buffer, frame = base.copy(), codec.encode_delta(base, new)
    full = codec.encode_full(new)
    tracemalloc.start()
    try:
        codec.apply_delta(buffer, frame)
        assert tracemalloc.get_traced_memory()[1] < MIB
        decoded = codec.decode_full(full, container="numpy")
        assert tracemalloc.get_traced_memory()[1] < 33 * MIB
    finally:
        tracemalloc.stop()
    assert np.array_equal(buffer, new)
    assert np.array_equal(decoded, new)


def test_a_payload_shorter_than_any_compressor_can_make_it():
    bomb = b"\x02" + stream(streams.ZSTD, zstandard.ZstdCompressor().compress(bytes(1000))) * 2
    frame = full_frame(header.CHUNK_N, [bomb])
    assert peak_of(lambda: codec.decode_full(frame), codec.CorruptFrame) < MIB


def stream(compressor, stored):
    return bytes([compressor]) + streams.varint(len(stored)) + stored


BOMB = bytes(64 * MIB)
BOMBS = {
    streams.ZSTD: lambda: zstandard.ZstdCompressor().compress(BOMB),
    streams.DEFLATE: lambda: zlib.compressobj(9, zlib.DEFLATED, -15),
    streams.BZIP2: lambda: bz2.compress(BOMB),
}


@pytest.mark.parametrize("compressor", BOMBS)
@pytest.mark.parametrize("method", [2, 5])
def test_a_bomb_where_a_small_stream_is_due(compressor, method):
    made = BOMBS[compressor]()
    bomb = made if isinstance(made, bytes) else made.compress(BOMB) + made.flush()
    payload = bytes([method]) + stream(compressor, bomb) * 2
    base = np.zeros(50_000, np.uint16)
    # bzip2 takes a few MiB for its own tables, whatever comes out.
    assert peak_of(lambda: codec.decode_group(base, payload, "BF16", base.size), codec.CorruptFrame) < 8 * MIB


def test_a_zstd_frame_without_content_size():
    unknown = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(100))
    with pytest.raises(codec.CorruptFrame, match="claims another length"):
        codec.decode_group(None, b"\x02" + stream(streams.ZSTD, unknown) * 2, "BF16", 100)


def test_a_zstd_frame_that_claims_too_much():
    claims = zstandard.ZstdCompressor().compress(BOMB)
    body = b"\x03" + streams.varint(100) + b"\x01\x01" + streams.varint(0) + stream(streams.ZSTD, claims) * 2
    base = np.zeros(200, np.uint16)
    assert peak_of(lambda: codec.decode_group(base, body, "BF16", 200), codec.CorruptFrame) < MIB


def test_a_claim_is_checked_before_anything_is_allocated_for_it():
    claims = zstandard.ZstdCompressor().compress(BOMB)[:20]
    reader = streams.Reader(memoryview(stream(streams.ZSTD, claims)))
    assert peak_of(lambda: streams.unpack(reader, len(BOMB)), codec.CorruptFrame) < MIB


def unfinished_deflate(plain):
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return packer.compress(plain) + packer.flush(zlib.Z_SYNC_FLUSH)


def finished_deflate(plain):
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return packer.compress(plain) + packer.flush()


@pytest.mark.parametrize(
    ("compressor", "stored"),
    [
        (streams.DEFLATE, unfinished_deflate(bytes(100))),
        (streams.DEFLATE, finished_deflate(bytes(100)) + b"x"),
        (streams.BZIP2, bz2.compress(bytes(100)) + b"x"),
        (streams.BZIP2, bz2.compress(bytes(100))[:-1]),
        (streams.ZSTD, zstandard.ZstdCompressor().compress(bytes(100)) + b"x"),
        (streams.ZSTD, zstandard.ZstdCompressor().compress(bytes(100)) * 2),
        (streams.STORED, bytes(101)),
    ],
)
def test_a_stream_ends_with_its_last_byte(compressor, stored):
    with pytest.raises(codec.CorruptFrame):
        streams.unpack(streams.Reader(memoryview(stream(compressor, stored))), 100)


def test_fields_cannot_announce_more_changes_than_elements():
    body = b"\x03" + streams.varint(2**60) + b"\x04\x02" + streams.varint(0)
    with pytest.raises(codec.CorruptFrame, match="at most 200"):
        codec.decode_group(np.zeros(200, np.uint16), body, "BF16", 200)


def test_numbers_without_end():
    with pytest.raises(codec.CorruptFrame):
        codec.decode_group(np.zeros(200, np.uint16), b"\x03" + b"\xff" * 100, "BF16", 200)
    with pytest.raises(codec.CorruptFrame, match="longer than it needs"):
        codec.decode_group(np.zeros(200, np.uint16), b"\x03\x80\x00\x00", "BF16", 200)


def test_decoding_a_sparse_delta_makes_no_copy_of_the_tensor():
    base = np.zeros(32 * MIB, np.uint16)
    new = base.copy()
    new[:: 1 << 16] = 1
    payload = codec.encode_group(base, new, "BF16", method="fields_v1").payload
    tracemalloc.start()
    try:
        change = codec.decode_group(base, payload, "BF16", base.size)
        assert tracemalloc.get_traced_memory()[1] < 4 * MIB
    finally:
        tracemalloc.stop()
    assert change.index.size == 512
    assert change.nbytes == 512 * 6


@pytest.mark.parametrize("count", [-1, 2**31, 2**63])
def test_counts_no_group_can_have(count):
    with pytest.raises(codec.InvalidInput):
        codec.decode_group(None, b"\x01", "BF16", count)


@pytest.mark.parametrize("shape", [(0, 2**50), (2**40, 2**40), (1,) * 33, (2**42, 2)], ids=str)
def test_shapes_no_frame_can_have(shape):
    head = header.FrameHeader(dtypes.find("BF16"), shape, bytes(16), None)
    with pytest.raises(codec.InvalidInput):
        head.validate()


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize(
    ("shape", "base_digest"),
    [((0, 2**42, 2**42), None), ((2**42, 2), None), ((1,) * 33, None), ((0, 5), bytes(16)), ((), bytes(16))],
    ids=str,
)
def test_headers_that_only_somebody_hostile_writes(monkeypatch, shape, base_digest, stored):
    head = header.FrameHeader(dtypes.find("BF16"), shape, codec.digest(b""), base_digest, stored)
    with monkeypatch.context() as unchecked:
        unchecked.setattr(header.FrameHeader, "validate", lambda self: None)
        frame = header.write(head, [])
    with pytest.raises(codec.CorruptFrame):
        codec.decode_full(frame)

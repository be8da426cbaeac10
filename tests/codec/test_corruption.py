"""Promise: damaged bytes give a CodecError or the right tensor: never a wrong one, never another exception, and a
buffer that stays as it was."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import codec
from codec import fields, header, methods, streams
from codec.errors import CorruptFrame

METHODS = [m.name for m in methods.METHODS]


def flips(data):
    """``data`` with each of its bits flipped in turn."""
    damaged = bytearray(data)
    for at in range(len(data)):
        for bit in range(8):
            damaged[at] ^= 1 << bit
            yield bytes(damaged)
            damaged[at] ^= 1 << bit


def with_check(frame):
    """``frame`` as somebody hostile would send it: damaged, but with a check that matches."""
    check = xxhash.xxh3_64_intdigest(frame[:8] + frame[16:])
    return frame[:8] + check.to_bytes(8, "little") + frame[16:]


def small(pair, method):
    base = pair.base[:256]
    return base, base if method == "same" else pair.new[:256]


@pytest.mark.parametrize("method", METHODS)
def test_every_flipped_bit_of_a_delta_frame(bf16_pair, method):
    base, new = small(bf16_pair, method)
    buffer = base.copy()
    for damaged in flips(codec.encode_delta(base, new, method=method, dtype="BF16")):
        with pytest.raises(codec.CodecError):
            codec.apply_delta(buffer, damaged)
    assert np.array_equal(buffer, base)


def test_every_flipped_bit_of_a_full_frame(bf16_pair):
    for damaged in flips(codec.encode_full(bf16_pair.new[:256].reshape(16, 16), dtype="BF16")):
        with pytest.raises(codec.CodecError):
            codec.decode_full(damaged)


def applied_or_refused(base, new, frame):
    """Whether the frame was applied: the buffer holds ``new`` then, and ``base`` if it was refused."""
    buffer = base.copy()
    try:
        codec.apply_delta(buffer, frame)
    except codec.CodecError:
        assert np.array_equal(buffer, base)
        return False
    assert np.array_equal(buffer, new)
    return True


@pytest.mark.parametrize("method", METHODS)
def test_every_flipped_bit_behind_a_forged_check(bf16_pair, method):
    base, new = small(bf16_pair, method)
    frame = codec.encode_delta(base, new, method=method, dtype="BF16")
    for damaged in map(with_check, flips(frame)):
        applied_or_refused(base, new, damaged)


def test_every_flipped_bit_of_a_chunk_that_is_raw():
    """As in the frames that were written before there were stored ones."""
    base, new, delta, full = noise()
    for frame in (delta, full):
        head = replace(header.read(frame)[0], stored=False)
        old = header.write(head, [bytes([methods.RAW]) + new.tobytes()])
        for damaged in map(with_check, flips(old)):
            applied_or_refused(base, new, damaged)


def noise():
    """A base and a new tensor that nothing makes smaller, and their frames: a delta and a full."""
    rng = np.random.default_rng(0)
    base, new = rng.integers(0, 1 << 16, (2, 24), dtype=np.uint16)
    frames = codec.encode_delta(base, new), codec.encode_full(new.reshape(2, 1, 12))
    assert [header.read(frame)[0].stored for frame in frames] == [True, True]
    return base, new, *frames


def test_every_flipped_bit_of_a_stored_frame():
    base, new, delta, full = noise()
    for damaged in flips(full):
        with pytest.raises(codec.CodecError):
            codec.decode_full(damaged)
    for frame, forge in ((delta, bytes), (delta, with_check), (full, with_check)):
        for damaged in map(forge, flips(frame)):
            if applied_or_refused(base, new, damaged):
                assert frame is full or forge is with_check


def test_a_stored_frame_of_another_length_than_its_shape():
    base, new, delta, full = noise()
    for frame in (delta, full):
        for lie, error in ((frame[:-1], codec.TruncatedFrame), (frame[:-2], codec.TruncatedFrame)):
            with pytest.raises(error, match="48 bytes wanted"):
                codec.apply_delta(base.copy(), with_check(lie))
        for more in (b"\0", new.tobytes()):
            with pytest.raises(codec.CorruptFrame, match=f"{len(more)} bytes follow"):
                codec.apply_delta(base.copy(), with_check(frame + more))


@pytest.mark.parametrize(("dims", "shape"), [(1, "8000"), (1, "ff" * 9), (1, "ff" * 20), (3, "0101")])
def test_a_shape_has_one_form(dims, shape):
    head = bytes([*header.MAGIC, header.FORMAT_VERSION, header.STORED_FULL, 0, dims])
    frame = with_check(head + bytes(8) + codec.digest(b"\1") + bytes.fromhex(shape))
    with pytest.raises(codec.CorruptFrame):
        codec.decode_full(frame)


def test_what_old_readers_refuse_is_refused_as_unsupported():
    """An unknown kind says "upgrade", as it did in the readers from before kinds 2 to 7."""
    base, _, delta, full = noise()
    for frame, unknown in itertools.product((delta, full), (8, 9, 11, 255)):
        later = bytearray(frame)
        later[5] = unknown
        with pytest.raises(codec.UnsupportedFrame, match="upgrade"):
            codec.apply_delta(base, with_check(bytes(later)))


@pytest.mark.parametrize("method", METHODS)
def test_every_flipped_bit_of_a_payload(bf16_pair, method):
    base, new = small(bf16_pair, method)
    encoded = codec.encode_group(base, new, "BF16", method=method)
    for damaged in flips(encoded.payload):
        try:
            change = codec.decode_group(base, damaged, "BF16", base.size)
        except codec.CodecError:
            continue
        buffer = base.copy()
        codec.apply_change(buffer, change)
        # The digest tells the truth about what was decoded, so comparing it with the receipt's finds the damage.
        assert change.digest == codec.digest(buffer)
        assert (change.digest == encoded.digest) == np.array_equal(buffer, new)


@pytest.mark.parametrize("dtype", ["BF16", "F32", "F8_E4M3", "I64"])
@given(data=st.data())
def test_any_bytes_behind_any_method(data, dtype):
    info = codec.dtypes.find(dtype)
    base = np.arange(40, dtype=info.bits)
    payload = bytes([data.draw(st.integers(0, 7))]) + data.draw(st.binary(max_size=200))
    try:
        change = codec.decode_group(base, payload, dtype, base.size)
    except codec.CodecError:
        return
    buffer = base.copy()
    codec.apply_change(buffer, change)
    assert change.digest == codec.digest(buffer)


@given(frame=st.binary(max_size=200))
def test_any_bytes_as_a_frame(frame):
    for forged in (frame, with_check(b"\x89WCF\x01" + frame)):
        with pytest.raises(codec.CodecError):
            codec.decode_full(forged)
        with pytest.raises(codec.CodecError):
            codec.apply_delta(np.zeros(4, np.uint16), forged)


@pytest.mark.parametrize(
    ("at", "value", "error"),
    [
        (0, 0x88, codec.CorruptFrame),
        (4, 2, codec.UnsupportedFrame),
        (5, 8, codec.UnsupportedFrame),
        (6, 99, codec.UnsupportedFrame),
    ],
    ids=["magic", "version", "kind", "dtype"],
)
def test_what_is_unknown_has_its_own_error(bf16_pair, at, value, error):
    frame = bytearray(codec.encode_full(bf16_pair.new, dtype="BF16"))
    frame[at] = value
    with pytest.raises(error):
        codec.decode_full(with_check(bytes(frame)))
    if at == 4:  # a later version may place its check elsewhere: the version is looked at first
        with pytest.raises(codec.UnsupportedFrame, match="upgrade"):
            codec.decode_full(bytes(frame))


def test_unknown_methods_and_compressors_are_unsupported(bf16_pair):
    for payload in (b"\x06", b"\xff", b"\x02\x04\x00", b"\x05\x09\x00"):
        with pytest.raises(codec.UnsupportedFrame, match="upgrade"):
            codec.decode_group(bf16_pair.base, payload, "BF16", bf16_pair.base.size)


@pytest.mark.parametrize("widths", [(3, 1), (8, 1), (1, 3), (1, 4), (1, 8)], ids=str)
def test_widths_that_fields_cannot_have(widths):
    gaps, steps = (b"\x00\x01\x00" * n for n in widths)
    payload = b"\x03\x01" + bytes(widths) + b"\x00" + gaps + steps
    with pytest.raises(codec.CorruptFrame, match="impossible"):
        codec.decode_group(np.zeros(9, np.uint16), payload, "BF16", 9)


def test_a_weight_that_changes_twice():
    """fields_v1 lists its changes in two classes, each ascending by construction."""
    one = np.ones(1, np.uint8)
    head = (streams.varint(1) + bytes([1, 1])) * 2
    body = head + streams.pack([one * 5, one, one * 5, one], streams.SPARSE_CANDIDATES)
    base = np.zeros(10, np.uint16)
    with pytest.raises(CorruptFrame, match="ascend"):
        fields.decode(base, memoryview(body), "BF16", base.size)
    apart = head + streams.pack([one * 5, one, one * 6, one], streams.SPARSE_CANDIDATES)
    assert fields.decode(base, memoryview(apart), "BF16", base.size).index.tolist() == [5, 6]

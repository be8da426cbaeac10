"""Promise: whatever goes wrong, the buffer is as it was, and the sentence says what to do."""

from __future__ import annotations

import mmap
from dataclasses import replace

import numpy as np
import pytest
import torch

import codec
from codec import dtypes, header


def delta(pair, **more):
    return codec.encode_delta(pair.base, pair.new, dtype="BF16", **more)


def refused(buffer, frame, error, match):
    before = codec.to_bits(buffer).copy()
    with pytest.raises(error, match=match):
        codec.apply_delta(buffer, frame)
    assert np.array_equal(codec.to_bits(buffer), before)


def test_another_base(bf16_pair):
    other = bf16_pair.base.copy()
    other[7] ^= 1
    refused(other, delta(bf16_pair), codec.BaseMismatch, "does not hold the bytes")


def test_applied_twice(bf16_pair):
    buffer = bf16_pair.base.copy()
    codec.apply_delta(buffer, delta(bf16_pair))
    refused(buffer, delta(bf16_pair), codec.BaseMismatch, "does not hold the bytes")


def test_a_result_with_another_digest(bf16_pair):
    head, payloads = header.read(delta(bf16_pair, method="fields_v1"))
    lie = header.FrameHeader(head.dtype, head.shape, bytes(16), head.base_digest)
    refused(bf16_pair.base.copy(), header.write(lie, [bytes(p) for p in payloads]), codec.CorruptFrame, "digest")


def test_a_full_that_holds_a_delta(bf16_pair):
    head, payloads = header.read(delta(bf16_pair, method="fields_v1"))
    lie = header.FrameHeader(head.dtype, head.shape, head.digest, None)
    frame = header.write(lie, [bytes(p) for p in payloads])
    refused(bf16_pair.base.copy(), frame, codec.CorruptFrame, "needs a base")
    with pytest.raises(codec.CorruptFrame, match="needs a base"):
        codec.decode_full(frame)


def stored(kind):
    """A base, a new tensor that nothing makes smaller, and its frame."""
    base, new = np.random.default_rng(0).integers(0, 1 << 16, (2, 500), dtype=np.uint16)
    frame = codec.encode_delta(base, new) if kind == "delta" else codec.encode_full(new)
    head, payloads = header.read(frame)
    assert head.stored
    return base, new, head, payloads


def test_a_stored_delta_fits_its_base_alone():
    base, new, head, payloads = stored("delta")
    frame = header.write(head, payloads)
    other = base.copy()
    other[499] ^= 1
    refused(other, frame, codec.BaseMismatch, "does not hold the bytes")
    refused(new.copy(), frame, codec.BaseMismatch, "does not hold the bytes")
    refused(base[1:].copy(), frame, codec.InvalidInput, "500 elements, the buffer 499")
    with pytest.raises(codec.InvalidInput, match="apply_delta"):
        codec.decode_full(frame)
    codec.apply_delta(base, frame)
    assert np.array_equal(base, new)


@pytest.mark.parametrize("kind", ["full", "delta"])
def test_a_stored_frame_with_another_digest(kind):
    base, _, head, payloads = stored(kind)
    frame = header.write(replace(head, digest=bytes(16)), payloads)
    refused(base.copy(), frame, codec.CorruptFrame, "digest")
    if kind == "full":
        with pytest.raises(codec.CorruptFrame, match="digest"):
            codec.decode_full(frame)


def test_what_is_decoded_does_not_share_memory_with_the_frame():
    _, new, head, payloads = stored("full")
    frame = bytearray(header.write(head, payloads))
    decoded = codec.decode_full(frame, container="numpy")
    frame[-len(new.tobytes()) :] = bytes(new.nbytes)
    assert np.array_equal(decoded, new)
    assert decoded.flags.writeable


def test_a_full_replaces_whatever_is_there(bf16_pair):
    buffer = np.zeros_like(bf16_pair.new)
    codec.apply_delta(buffer, codec.encode_full(bf16_pair.new, dtype="BF16"))
    assert np.array_equal(buffer, bf16_pair.new)


def test_buffers_that_do_not_fit(bf16_pair):
    frame = delta(bf16_pair)
    refused(bf16_pair.base[1:].copy(), frame, codec.InvalidInput, "4000 elements, the buffer 3999")
    refused(torch.zeros(4000, dtype=torch.float16), frame, codec.InvalidInput, "holds BF16, the buffer torch.float16")
    refused(np.zeros(4000, np.int16), frame, codec.InvalidInput, "holds BF16")
    refused(torch.zeros(1, dtype=torch.bfloat16).expand(4000), frame, codec.InvalidInput, "expanded")
    read_only = bf16_pair.base.copy()
    read_only.flags.writeable = False
    refused(read_only, frame, codec.InvalidInput, "read-only")


def test_a_delta_has_no_tensor_of_its_own(bf16_pair):
    with pytest.raises(codec.InvalidInput, match="apply_delta"):
        codec.decode_full(delta(bf16_pair))


@pytest.mark.parametrize(
    ("base", "new", "match"),
    [
        (np.zeros(3, np.uint16), np.zeros(4, np.uint16), "shapes differ"),
        (np.zeros((2, 2), np.uint16), np.zeros(4, np.uint16), "shapes differ"),
        (np.zeros(3, np.float32), np.zeros(3, np.int32), "dtypes differ"),
        (torch.zeros(3), torch.zeros(3, dtype=torch.float64), "dtypes differ"),
        (np.array([None]), np.array([None]), "Python objects"),
        (torch.zeros(3).to_sparse(), torch.zeros(3).to_sparse(), "to_dense"),
    ],
)
def test_tensors_that_cannot_be_encoded(base, new, match):
    with pytest.raises(codec.InvalidInput, match=match):
        codec.encode_delta(base, new)


def test_what_is_no_tensor():
    with pytest.raises(codec.InvalidInput, match="got list"):
        codec.encode_full([1.0, 2.0])


def test_names_nobody_knows(bf16_pair):
    with pytest.raises(codec.InvalidInput, match="known are auto, same"):
        delta(bf16_pair, method="zip")
    with pytest.raises(codec.InvalidInput, match="known are U8"):
        codec.encode_group(None, bf16_pair.new, "BF17")
    with pytest.raises(codec.InvalidInput, match="unsigned integers of its size"):
        codec.encode_full(np.zeros(3, np.float32), dtype="BF16")
    with pytest.raises(codec.InvalidInput, match="container"):
        codec.decode_full(codec.encode_full(bf16_pair.new), container="jax")


@pytest.mark.parametrize(
    "bits",
    [np.zeros(4, np.int16), np.zeros((2, 2), np.uint16), np.zeros(8, np.uint16)[::2], np.zeros(4, np.uint32)],
    ids=["signed", "two dimensions", "strided", "another size"],
)
def test_arrays_a_group_cannot_take(bits):
    with pytest.raises(codec.InvalidInput, match="to_bits"):
        codec.encode_group(None, bits, "BF16")
    with pytest.raises(codec.InvalidInput, match="to_bits"):
        codec.decode_group(bits, b"\0", "BF16", bits.size)


def test_groups_with_the_wrong_base(bf16_pair):
    payload = codec.encode_group(bf16_pair.base, bf16_pair.new, "BF16").payload
    assert codec.needs_base(payload)
    with pytest.raises(codec.InvalidInput, match="needs its base"):
        codec.decode_group(None, payload, "BF16", 4000)
    with pytest.raises(codec.InvalidInput, match="layout says 5"):
        codec.decode_group(bf16_pair.base, payload, "BF16", 5)
    with pytest.raises(codec.InvalidInput, match="equal sizes"):
        codec.encode_group(bf16_pair.base[1:], bf16_pair.new, "BF16")


def test_changes_that_do_not_fit_the_buffer(bf16_pair):
    change = codec.decode_group(
        bf16_pair.base, codec.encode_group(bf16_pair.base, bf16_pair.new, "BF16").payload, "BF16", 4000
    )
    whole = codec.decode_group(None, b"\x01" + bytes(8), "BF16", 4)
    read_only = bf16_pair.base.copy()
    read_only.flags.writeable = False
    twice = np.append(change.index[1:], change.index[-1])
    for buffer, what in (
        (bf16_pair.base[:10].copy(), change),
        (np.zeros(4000, np.uint32), change),
        (read_only, change),
        (np.zeros(5, np.uint16), whole),
        (bf16_pair.base.copy(), codec.Change(change.index, change.bits[1:], None, b"")),
        (bf16_pair.base.copy(), codec.Change(change.index[::-1].copy(), change.bits, None, b"")),
        (
            bf16_pair.base.copy(),
            codec.Change(twice, change.bits, None, b""),
        ),
    ):
        before = buffer.copy()
        with pytest.raises(codec.InvalidInput):
            codec.apply_change(buffer, what)
        assert np.array_equal(buffer, before)


def test_a_read_only_map_serves_as_base(bf16_pair, tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(bf16_pair.base.tobytes())
    encoded = codec.encode_group(bf16_pair.base, bf16_pair.new, "BF16")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        base = np.frombuffer(mapped, np.uint16)
        change = codec.decode_group(base, memoryview(encoded.payload), "BF16", base.size)
        assert change.digest == encoded.digest
        del base


def test_payloads_do_not_depend_on_who_else_is_running(bf16_pair):
    from concurrent.futures import ThreadPoolExecutor

    large = np.tile(bf16_pair.base, 300)
    new = large.copy()
    new[::50] += 1
    for base in (None, large):
        with ThreadPoolExecutor(4) as pool:
            payloads = set(pool.map(lambda _, base=base: codec.encode_group(base, new, "BF16").payload, range(4)))
        assert len(payloads) == 1


def test_dtype_table_has_unique_codes():
    assert len(dtypes.BY_CODE) == len(dtypes.BY_NAME) == len(dtypes.DTYPES)

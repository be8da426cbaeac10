"""Targets: the codec's frames, and group payloads of each method, against the slow decoders written from FORMAT.md."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any
from unittest import mock

import numpy as np
import xxhash
from numpy.typing import NDArray

import codec
from codec import dtypes, header, methods, reference, reference_ulp, streams, ulp
from codec.errors import CodecError, CorruptFrame, InvalidInput, UnsupportedFrame
from tests.fuzz.reshaping import either, repaired
from tests.fuzz.target import Plain, Target, require

MAX_COMPARED = 9000
"""Elements up to which the slow decoder is asked too."""
SMALL_CHUNK_N = 200
NAMES = [dtype.name for dtype in dtypes.DTYPES]
PREFIX = struct.Struct("<BBH")  # dtype, base, elements

Array = NDArray[Any]


@cache
def base_of(dtype: str, kind: int, count: int) -> Array | None:
    """A fixed base: none, zeros, weights as a model has them, or any bits."""
    info = dtypes.find(dtype)
    rng = np.random.default_rng(count)
    if kind % 4 == 0:
        return None
    if kind % 4 == 1:
        found = np.zeros(count, info.bits)
    elif kind % 4 == 2 and info.is_float:
        exponent = (1 << info.exponent_bits) // 2 - rng.geometric(0.5, count)
        mantissa = rng.integers(0, 1 << info.mantissa_bits, count)
        sign = rng.integers(0, 2, count) << (8 * info.item_bytes - 1)
        found = (np.maximum(exponent, 0) << info.mantissa_bits | mantissa).astype(np.uint64)
        found = (found | sign.astype(np.uint64)).astype(info.bits)
    else:
        found = rng.integers(0, 1 << 8 * info.item_bytes, count, np.uint64, endpoint=False).astype(info.bits)
    found.flags.writeable = False
    return found


def changed(base: Array, every: int, seed: int = 1) -> Array:
    """``base`` with about one element in ``every`` a step away, and a few replaced."""
    rng, new = np.random.default_rng(seed), base.copy()
    if new.size:
        where = rng.choice(new.size, max(1, new.size // every), replace=False)
        new[where] += rng.integers(1, 3, where.size).astype(new.dtype)
        new[where[: len(where) // 4]] ^= np.array(1 << (8 * new.itemsize - 1), new.dtype)
    return new


# Groups


def _take_apart(data: bytes) -> tuple[str, int, Array | None, bytes]:
    dtype, kind, count = PREFIX.unpack_from(data)
    name, count = NAMES[dtype % len(NAMES)], count % MAX_COMPARED
    return name, count, base_of(name, kind, count), data[PREFIX.size :]


def _group(method: int, data: bytes) -> None:
    if len(data) < PREFIX.size:
        return
    dtype, count, base, body = _take_apart(data)
    payload = bytes([method]) + body
    try:
        change = codec.decode_group(base, payload, dtype, count)
    except (CorruptFrame, UnsupportedFrame):
        change = None
    except InvalidInput:
        require(base is None, "a payload is refused as if the caller were wrong")
        return
    expected = _slow(base, payload, dtype, count)
    require((change is None) == (expected is None), f"fast: {change is not None}, slow: {expected is not None}")
    if change is None:
        return
    result = np.zeros(count, dtypes.find(dtype).bits) if base is None else base.copy()
    codec.apply_change(result, change)
    require(change.digest == codec.digest(result), "the digest is not that of the result")
    require(np.array_equal(result, expected), "fast and slow decoders disagree")
    again = codec.encode_group(base, result, dtype)
    require(codec.decode_group(base, again.payload, dtype, count).digest == change.digest, "no round trip")


def _slow(base: Array | None, payload: bytes, dtype: str, count: int) -> Array | None:
    try:
        if payload[0] != methods.ULP:
            return reference.decode_payload(base, payload, dtype, count)
        if base is None or not ulp.applies_to(dtype):
            return None
        info = dtypes.find(dtype)
        fields = reference_ulp.Fields(8 * info.item_bytes, info.exponent_bits, info.mantissa_bits)
        return reference_ulp.decode(base, payload[1:], fields)
    except CodecError:
        return None


def _group_seeds(method: methods.Method) -> Iterator[bytes]:
    for dtype, count in (("BF16", 40), ("BF16", 3000), ("BF16", 8300), ("F32", 500), ("F8_E4M3", 700), ("I64", 9)):
        for kind in (0, 1, 2):
            base = base_of(dtype, kind, count)
            if base is None and method.needs_base:
                continue
            new = changed(base_of(dtype, 2, count) if base is None else base, 20)  # type: ignore[arg-type]
            if method.id == methods.SAME and base is not None:
                new = base
            if method.name == "ulp_v1" and base is not None and ulp.applies_to(dtype):
                body = ulp.encode_counted(base, new, dtype).body
            else:
                found = method.encode(base, new, dtype)
                if found is None:
                    continue
                body = found
            if len(body) < 4000:
                yield PREFIX.pack(NAMES.index(dtype), kind, count) + body


def reshape_streams(data: bytes, rng: random.Random, plain: Plain, *, fields: bool) -> bytes:
    """Damage the plain bytes of one stream and compress them again, by any compressor."""
    dtype, count, _, body = _take_apart(data)
    item_bytes = dtypes.find(dtype).item_bytes
    reader = streams.Reader(memoryview(body))
    sizes = [count] * item_bytes
    if fields:
        sizes = []
        for _ in range(2):
            n = reader.varint(count)
            widths = (reader.u8(), reader.u8()) if n else (0, 0)
            sizes += [n] * sum(widths)
    head = body[: len(body) - reader.left]
    chosen, out = rng.randrange(len(sizes)), bytearray(head)
    for i, size in enumerate(sizes):
        at = reader.left
        decoded = bytes(streams.unpack(reader, size))
        if i != chosen:
            out += body[len(body) - at : len(body) - reader.left]
            continue
        damaged = plain(decoded)[:size].ljust(size, b"\0") if rng.random() < 0.9 else plain(decoded)
        out += _compressed(damaged, rng.randrange(4))
    return data[: PREFIX.size] + bytes(out)


def _compressed(plain: bytes, compressor: int) -> bytes:
    candidates = dict(streams.SPARSE_CANDIDATES) | {streams.DEFLATE: _deflate}
    stored = candidates[compressor](memoryview(plain)) if compressor else plain
    return bytes([compressor]) + streams.varint(len(stored)) + stored


def _deflate(plain: memoryview) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return packer.compress(plain) + packer.flush()


# Frames


def _full(frame: bytes) -> None:
    try:
        result = codec.decode_full(frame, container="numpy")
    except CodecError:
        result = None
    else:
        torch = codec.decode_full(frame)
        require(codec.encode_full(torch) == codec.encode_full(result, dtype=_name(frame)), "containers disagree")
    _compare_frame(frame, None, result)
    if result is not None:
        again = codec.encode_full(result, dtype=_name(frame))
        require(np.array_equal(_bits(codec.decode_full(again, container="numpy")), _bits(result)), "no round trip")


def _delta(frame: bytes) -> None:
    base = _frame_base(frame)
    buffer = base.copy()
    try:
        codec.apply_delta(buffer, frame)
    except CodecError:
        require(np.array_equal(buffer, base), "a refused frame changed the buffer")
        result = None
    else:
        result = buffer
        found, _ = header.read(frame)
        require(found.digest_of(dtypes.to_bits(result)) == found.digest, "the buffer does not hold what is promised")
    _compare_frame(frame, base, result)


def _compare_frame(frame: bytes, base: Array | None, result: Any) -> None:
    try:
        found, payloads = header.read(frame)
    except CodecError:
        require(result is None, "a frame without a valid header decodes")
    else:
        # The slow decoder of frames knows nothing of ulp_v1; group-ulp_v1 compares that.
        coded_by_ulp = not found.stored and any(payload[:1] == bytes([methods.ULP]) for payload in payloads)
        if found.count > MAX_COMPARED or coded_by_ulp or (found.base_digest is None) != (base is None):
            return
    try:
        name, shape, expected = reference.decode_frame(base, frame)
    except CodecError:
        require(result is None, "only the fast decoder accepts this")
        return
    require(result is not None, "only the slow decoder accepts this")
    require(name == _name(frame) and np.array_equal(_bits(result), expected), "fast and slow decoders disagree")
    require(base is not None or result.shape == shape, "the shape differs")


def _bits(array: Any) -> Array:
    return dtypes.to_bits(array)


def _name(frame: bytes) -> str:
    return dtypes.find_code(frame[6]).name


def _frame_base(frame: bytes) -> Array:
    """The buffer that a delta frame is applied to: of the dtype and element count that it names, as far as it does."""
    name, count = "BF16", 300
    try:
        found, _ = header.read(_checked(frame))
        name, count = found.dtype.name, min(found.count, MAX_COMPARED)
    except CodecError:
        pass
    base = base_of(name, 2, count)
    if base is None:
        raise AssertionError("kind 2 is a base")
    return base


def _checked(frame: bytes) -> bytes:
    head, rest = frame[:8], frame[16:]
    return head + xxhash.xxh3_64_intdigest(head + rest).to_bytes(8, "little") + rest


def repair_frame(frame: bytes) -> bytes:
    """Put the digests right, as far as the payloads decode, and then the check."""
    frame = _checked(frame)
    try:
        found, payloads = header.read(frame)
        if found.count > MAX_COMPARED:
            return frame
        base = None if found.base_digest is None else _frame_base(frame)
        result = np.zeros(found.count, found.dtype.bits) if base is None else base.copy()
        for chunk, payload in zip(found.chunks, payloads, strict=True):
            if found.stored:
                result[chunk] = np.frombuffer(payload, found.dtype.bits)
                continue
            old = None if base is None else base[chunk]
            codec.apply_change(
                result[chunk], codec.decode_group(old, payload, found.dtype.name, chunk.stop - chunk.start)
            )
    except CodecError:
        return frame
    digests = found.digest_of(result) + (b"" if base is None else found.digest_of(base))
    return _checked(frame[:16] + digests + frame[16 + len(digests) :])


def _full_seeds() -> Iterator[bytes]:
    for dtype, shape in (("BF16", (8, 40)), ("F32", ()), ("U8", (0, 7)), ("F4", (3, 2)), ("BOOL", (5,)), ("C64", (4,))):
        count = int(np.prod(shape))
        bits = base_of(dtype, 2, count)
        if bits is not None:
            bits = bits & 1 if dtype == "BOOL" else bits
            yield codec.encode_full(dtypes.from_bits(bits.copy(), dtypes.find(dtype), shape, "torch"))
    for dtype, shape in (("U8", (1,) * 29 + (9, 2, 1)), ("I32", (3, 20)), ("BF16", ())):
        noise = base_of(dtype, 3, int(np.prod(shape)))
        if noise is not None:
            yield codec.encode_full(noise.reshape(shape), dtype=dtype)


def _delta_seeds() -> Iterator[bytes]:
    for dtype, count in (("BF16", 300), ("BF16", 0), ("F32", 100), ("I16", 50), ("F8_E5M2", 600)):
        base = base_of(dtype, 2, count)
        if base is not None:
            for method in ("auto", "fields_v1", "planes", "raw"):
                yield codec.encode_delta(base, changed(base, 10), method=method, dtype=dtype)
            noise = base_of(dtype, 3, count)
            if noise is not None:
                yield codec.encode_delta(base, noise, dtype=dtype)


# Frames of several chunks, which are tiny here


@contextmanager
def _small_chunks() -> Iterator[None]:
    with mock.patch.object(header, "CHUNK_N", SMALL_CHUNK_N), mock.patch.object(reference, "CHUNK_N", SMALL_CHUNK_N):
        yield


def _several(data: bytes) -> None:
    with _small_chunks():
        (_delta if data[5:6] and data[5] % 2 else _full)(data)  # by the kind


def _repair_several(frame: bytes) -> bytes:
    with _small_chunks():
        return repair_frame(frame)


def _several_seeds() -> Iterator[bytes]:
    with _small_chunks():
        for dtype, count in (
            ("BF16", 3 * SMALL_CHUNK_N),
            ("F8_E4M3", 5 * SMALL_CHUNK_N + 1),
            ("I32", SMALL_CHUNK_N + 9),
        ):
            base, noise = base_of(dtype, 2, count), base_of(dtype, 3, count)
            if base is None or noise is None:
                raise AssertionError("kinds 2 and 3 are bases")
            new = changed(base, 10)
            new[:SMALL_CHUNK_N] = base[:SMALL_CHUNK_N]
            yield codec.encode_delta(base, new, dtype=dtype)
            yield codec.encode_delta(base, noise, dtype=dtype)
            yield codec.encode_full(new & 1, dtype=dtype)
            yield codec.encode_full(noise, dtype=dtype)


def _targets() -> Iterator[Target]:
    yield Target("frame-full", _full, _full_seeds, repaired(repair_frame), covers=("decode_full",), ci_runs=1000)
    yield Target("frame-delta", _delta, _delta_seeds, repaired(repair_frame), covers=("apply_delta",), ci_runs=1000)
    yield Target(
        "frame-several",
        _several,
        _several_seeds,
        repaired(_repair_several),
        covers=("decode_full", "apply_delta"),
        ci_runs=500,
    )
    for method in methods.METHODS:
        with_streams = method.name in ("planes", "xor_planes", "fields_v1")
        packed = partial(reshape_streams, fields=method.name == "fields_v1")
        yield Target(
            f"group-{method.name}",
            partial(_group, method.id),
            partial(_group_seeds, method),
            either(packed, lambda data, rng, plain: plain(data)) if with_streams else None,
            covers=("decode_group", "reference_ulp.decode" if method.id == methods.ULP else "reference.decode_payload"),
            ci_runs=250 if method.id == methods.ULP else 600,
        )


TARGETS = tuple(_targets())

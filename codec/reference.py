"""A slow decoder and encoder in the order of FORMAT.md, and the oracle of the tests.

Shares nothing with the fast code but the errors: plain Python integers, one element at a time, the tables of FORMAT.md
written out again. Only the general compressors are libraries. The encoder takes the compressor of its streams as an
argument, so that every one of them can be exercised. Where FORMAT.md and this file disagree, FORMAT.md is right.
"""

from __future__ import annotations

import bz2
import zlib
from typing import Any

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from codec.errors import BaseMismatch, CorruptFrame, TruncatedFrame, UnsupportedFrame

# name: (code, bytes, exponent bits, mantissa bits)
TYPES = {
    "U8": (0, 1, 0, 0),
    "BF16": (1, 2, 8, 7),
    "F16": (2, 2, 5, 10),
    "F32": (3, 4, 8, 23),
    "F64": (4, 8, 11, 52),
    "F8_E4M3": (5, 1, 4, 3),
    "F8_E5M2": (6, 1, 5, 2),
    "F8_E4M3FNUZ": (7, 1, 4, 3),
    "F8_E5M2FNUZ": (8, 1, 5, 2),
    "F8_E8M0": (9, 1, 0, 0),
    "F4": (10, 1, 0, 0),
    "BOOL": (11, 1, 0, 0),
    "I8": (12, 1, 0, 0),
    "I16": (13, 2, 0, 0),
    "U16": (14, 2, 0, 0),
    "I32": (15, 4, 0, 0),
    "U32": (16, 4, 0, 0),
    "I64": (17, 8, 0, 0),
    "U64": (18, 8, 0, 0),
    "C64": (19, 8, 0, 0),
}

Array = NDArray[Any]


# Conventions


class _Cursor:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def take(self, size: int) -> bytes:
        if size > len(self.data):
            raise TruncatedFrame(f"{size} bytes wanted, {len(self.data)} left")
        head, self.data = self.data[:size], self.data[size:]
        return head

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.take(1)[0]
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
            if shift == 63:
                raise CorruptFrame("a number of more than nine bytes")
        if byte == 0 and shift > 7:
            raise CorruptFrame("a number that is longer than it needs to be")
        return value

    def end(self) -> None:
        if self.data:
            raise CorruptFrame(f"{len(self.data)} bytes too many")


def _varint(value: int) -> bytes:
    if value < 128:
        return bytes([value])
    return bytes([value % 128 + 128]) + _varint(value // 128)


def _digest(elements: list[int], size: int) -> bytes:
    return xxhash.xxh3_128_digest(_to_bytes(elements, size))


def _to_bytes(elements: list[int], size: int) -> bytes:
    return b"".join(x.to_bytes(size, "little") for x in elements)


def _from_bytes(data: bytes, size: int) -> list[int]:
    return [int.from_bytes(data[i : i + size], "little") for i in range(0, len(data), size)]


# Payloads


def decode_payload(base: Array | None, payload: bytes, dtype: str, count: int) -> Array:
    """The result of ``payload`` over ``base``: unsigned, 1-D, ``count`` elements. Raises CodecError."""
    size = TYPES[dtype][1]
    elements = _decode(None if base is None else [int(x) for x in base], payload, dtype, count)
    return np.array(elements, f"u{size}")


def encode_payload(base: Array | None, new: Array, dtype: str, method: int, compressor: int = 0) -> bytes:
    """A payload of this method id whose streams all use ``compressor``; methods 0 to 3 and 5."""
    now = [int(x) for x in new]
    old = None if base is None else [int(x) for x in base]
    return bytes([method]) + _encode(old, now, dtype, method, compressor)


def _decode(base: list[int] | None, payload: bytes, dtype: str, count: int) -> list[int]:
    size = TYPES[dtype][1]
    cursor = _Cursor(payload)
    method = cursor.take(1)[0]
    if method == 0 and base is not None:
        new = list(base)
    elif method == 1:
        new = _from_bytes(cursor.take(count * size), size)
    elif method == 2:
        new = _planes_in(cursor, dtype, count)
    elif method == 3 and base is not None:
        new = _fields_in(cursor, base, dtype)
    elif method == 5 and base is not None:
        new = [a ^ b for a, b in zip(_planes_in(cursor, dtype, count), base, strict=True)]
    else:
        raise UnsupportedFrame(f"method {method}")
    cursor.end()
    return new


def _encode(base: list[int] | None, new: list[int], dtype: str, method: int, compressor: int) -> bytes:
    if method == 0:
        return b""
    if method == 1:
        return _to_bytes(new, TYPES[dtype][1])
    if method == 2:
        return _planes_out(new, dtype, compressor)
    if base is not None and method == 3:
        return _fields_out(base, new, dtype, compressor)
    if base is not None and method == 5:
        return _planes_out([a ^ b for a, b in zip(new, base, strict=True)], dtype, compressor)
    raise UnsupportedFrame(f"method {method}")


# Streams


def _stream_in(cursor: _Cursor, n: int) -> bytes:
    compressor = cursor.take(1)[0]
    stored = cursor.take(cursor.varint())
    if compressor > 3:
        raise UnsupportedFrame(f"compressor {compressor}")
    if compressor < 3 and n > len(stored) * (1, 32768, 1032)[compressor]:
        raise CorruptFrame("more than its stored bytes can hold")
    try:
        plain = (_plain, _unzstd, _inflate, _unbzip2)[compressor](stored, n)
    except (zstandard.ZstdError, zlib.error, OSError) as error:
        raise CorruptFrame(str(error)) from error
    if len(plain) != n:
        raise CorruptFrame(f"{len(plain)} bytes where {n} are due")
    return plain


def _stream_out(plain: bytes, compressor: int) -> bytes:
    if compressor == 1:
        stored = zstandard.ZstdCompressor().compress(plain)
    elif compressor == 2:
        packer = zlib.compressobj(wbits=-15)
        stored = packer.compress(plain) + packer.flush()
    elif compressor == 3:
        stored = bz2.compress(plain)
    else:
        stored = plain
    return bytes([compressor]) + _varint(len(stored)) + stored


def _plain(stored: bytes, n: int) -> bytes:
    return stored


def _unzstd(stored: bytes, n: int) -> bytes:
    if zstandard.frame_content_size(stored) != n:
        raise CorruptFrame("another content size than due")
    return zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)


def _inflate(stored: bytes, n: int) -> bytes:
    unpacker = zlib.decompressobj(-15)
    plain = unpacker.decompress(stored, n + 1)
    if not unpacker.eof or unpacker.unused_data:
        raise CorruptFrame("the stream does not end with its last byte")
    return plain


def _unbzip2(stored: bytes, n: int) -> bytes:
    unpacker = bz2.BZ2Decompressor()
    plain = unpacker.decompress(stored, n + 1)
    if not unpacker.eof or unpacker.unused_data:
        raise CorruptFrame("the stream does not end with its last byte")
    return plain


# Planes


def _planes_in(cursor: _Cursor, dtype: str, count: int) -> list[int]:
    _, size, exponent_bits, _ = TYPES[dtype]
    elements = [0] * count
    for _ in range(size):
        elements = [x << 8 | byte for x, byte in zip(elements, _stream_in(cursor, count), strict=True)]
    if exponent_bits:
        elements = [x >> 1 | (x & 1) << (8 * size - 1) for x in elements]
    return elements


def _planes_out(elements: list[int], dtype: str, compressor: int) -> bytes:
    _, size, exponent_bits, _ = TYPES[dtype]
    top = 8 * size - 1
    if exponent_bits:
        elements = [(x << 1 | x >> top) & ((2 << top) - 1) for x in elements]
    return b"".join(_stream_out(bytes(x >> 8 * k & 255 for x in elements), compressor) for k in reversed(range(size)))


# Method 3: fields_v1


def _fields_in(cursor: _Cursor, base: list[int], dtype: str) -> list[int]:
    size = TYPES[dtype][1]
    heads = []
    for _ in range(2):
        n = cursor.varint()
        if n > len(base):
            raise CorruptFrame("more changes than elements")
        gap_bytes, step_bytes = cursor.take(2) if n else (1, 1)
        if gap_bytes not in (1, 2, 4) or step_bytes not in (1, 2, 4, 8) or step_bytes > size:
            raise CorruptFrame("impossible widths")
        heads.append((n, gap_bytes, step_bytes))
    new = list(base)
    seen = set()
    for n, gap_bytes, step_bytes in heads:
        position = -1
        gaps, steps = _numbers_in(cursor, n, gap_bytes), _numbers_in(cursor, n, step_bytes)
        for gap, z in zip(gaps, steps, strict=True):
            position += gap + 1
            if position >= len(base) or position in seen:
                raise CorruptFrame(f"a change at element {position} is impossible")
            seen.add(position)
            step = z // 2 if z % 2 == 0 else -(z + 1) // 2
            new[position] = (base[position] + step) % (1 << 8 * size)
    return new


def _fields_out(base: list[int], new: list[int], dtype: str, compressor: int) -> bytes:
    _, size, _, mantissa_bits = TYPES[dtype]
    head = body = b""
    for mantissa_only in (True, False):
        gaps, steps, before = [], [], -1
        for i, (old, now) in enumerate(zip(base, new, strict=True)):
            if old != now and ((old ^ now) >> mantissa_bits == 0) == mantissa_only:
                step = (now - old) % (1 << 8 * size)
                if step >> (8 * size - 1):
                    step -= 1 << 8 * size
                gaps.append(i - before - 1)
                steps.append(2 * step if step >= 0 else -2 * step - 1)
                before = i
        head += _varint(len(gaps))
        if gaps:
            for numbers in (gaps, steps):
                width = next(w for w in (1, 2, 4, 8) if max(numbers) < 1 << 8 * w)
                head += bytes([width])
                body += b"".join(
                    _stream_out(bytes(x >> 8 * k & 255 for x in numbers), compressor) for k in reversed(range(width))
                )
    return head + body


def _numbers_in(cursor: _Cursor, n: int, width: int) -> list[int]:
    numbers = [0] * n
    for _ in range(width if n else 0):
        numbers = [x << 8 | byte for x, byte in zip(numbers, _stream_in(cursor, n), strict=True)]
    return numbers


# Frames

CHUNK_N = 1 << 24


def decode_frame(base: Array | None, frame: bytes) -> tuple[str, tuple[int, ...], Array]:
    """Dtype name, shape and elements (unsigned, 1-D) of a frame over ``base``; None for a full. Raises CodecError."""
    cursor = _Cursor(frame)
    head = cursor.take(8)
    if head[:4] != b"\x89WCF":
        raise CorruptFrame("no magic")
    if head[4] != 1:
        raise UnsupportedFrame(f"format version {head[4]}")
    check = int.from_bytes(cursor.take(8), "little")
    if check != xxhash.xxh3_64_intdigest(head + cursor.data):
        raise CorruptFrame("the check differs")
    kind, code, dims = head[5:]
    names = [name for name, row in TYPES.items() if row[0] == code]
    if kind > 7 or not names:
        raise UnsupportedFrame(f"kind {kind}, dtype {code}")
    digest = cursor.take(16)
    base_digest = cursor.take(16) if kind % 2 == 1 else None
    if dims > 32 or (kind % 2 == 1 and dims != 1):
        raise CorruptFrame(f"{dims} dimensions")
    shape = tuple(cursor.varint() for _ in range(dims))
    count = bounded = 1
    for n in shape:
        count, bounded = count * n, bounded * max(n, 1)
    if bounded > 2**42:
        raise CorruptFrame(f"{bounded} elements")
    if kind > 3 and count <= CHUNK_N:
        raise CorruptFrame("a digest of chunks of which there is one")
    size = TYPES[names[0]][1]
    fits = base is not None and kind % 2 == 1 and base.itemsize == size
    old = [int(x) for x in base] if base is not None and fits else None
    if base_digest is not None and (old is None or len(old) != count or _frame_digest(old, size, kind) != base_digest):
        raise BaseMismatch("another base")
    new = _chunks_in(cursor, old, names[0], count) if kind % 4 < 2 else _from_bytes(cursor.take(count * size), size)
    cursor.end()
    if _frame_digest(new, size, kind) != digest:
        raise CorruptFrame("the digest of the result differs")
    return names[0], shape, np.array(new, f"u{size}")


def _frame_digest(elements: list[int], size: int, kind: int) -> bytes:
    if kind < 4:
        return _digest(elements, size)
    of_chunks = [_digest(elements[i : i + CHUNK_N], size) for i in range(0, len(elements), CHUNK_N)]
    return xxhash.xxh3_128_digest(b"".join(of_chunks))


def _chunks_in(cursor: _Cursor, base: list[int] | None, dtype: str, count: int) -> list[int]:
    starts = range(0, count, CHUNK_N)
    if len(starts) > len(cursor.data):
        raise TruncatedFrame("not even the lengths of the chunks follow")
    lengths = [cursor.varint() for _ in starts]
    new: list[int] = []
    for start, length in zip(starts, lengths, strict=True):
        n = min(CHUNK_N, count - start)
        payload = cursor.take(length)
        if base is None and n * TYPES[dtype][1] > 32768 * length:
            raise CorruptFrame("more than the payload can hold")
        new += _decode(None if base is None else base[start : start + n], payload, dtype, n)
    return new


def encode_stored_frame(base: Array | None, new: Array, dtype: str, shape: tuple[int, ...]) -> bytes:
    """The stored frame that holds ``new``, whose dimensions are ``shape``: its element count in a delta."""
    code, size, _, _ = TYPES[dtype]
    kind = (2 if base is None else 3) + (4 if len(new) > CHUNK_N else 0)
    head = b"\x89WCF" + bytes([1, kind, code, len(shape)])
    digests = b"".join(_frame_digest([int(x) for x in side], size, kind) for side in (new, base) if side is not None)
    dims = b"".join(_varint(n) for n in shape)
    rest = digests + dims + _to_bytes([int(x) for x in new], size)
    return head + xxhash.xxh3_64_intdigest(head + rest).to_bytes(8, "little") + rest

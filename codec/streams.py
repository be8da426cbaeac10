"""Byte streams inside a method's body: each compressed on its own, by whichever compressor makes it smallest.

A stream is ``u8 compressor | varint stored length | stored bytes``; its decoded length is never stored, the
method knows it (FORMAT.md, "Streams"). What decides between compressors is their output alone, never a clock.
"""

from __future__ import annotations

import bz2
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from codec.digest import as_bytes
from codec.errors import CorruptFrame, TruncatedFrame, UnsupportedFrame
from codec.threads import in_order

STORED, ZSTD, DEFLATE, BZIP2 = range(4)

# The most that one stored byte can become, by the formats themselves: a zstd block of 128 KiB takes 4 bytes
# (RFC 8878), deflate codes 258 bytes in 2 bits (RFC 1951). A claim beyond it is refused before memory is taken.
# bzip2 has no useful bound; its output is taken in steps instead.
_MAX_RATIO = {STORED: 1, ZSTD: 32768, DEFLATE: 1032}

_THREADS_FROM_BYTES = 1 << 20  # below this, starting a thread costs more than it saves
_SAMPLE_FROM_BYTES = 1 << 20
_SAMPLE_SLICES = 16
_SAMPLE_SLICE_BYTES = 16 << 10


class Reader:
    """A cursor over bytes nobody has checked: every read is bounded, and short input is a TruncatedFrame."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        """Bytes not read yet."""
        return len(self._data) - self._at

    def take(self, size: int) -> memoryview:
        """The next ``size`` bytes, as a view."""
        if size > self.left:
            raise TruncatedFrame(f"{size} bytes wanted where {self.left} are left")
        self._at += size
        return self._data[self._at - size : self._at]

    def peek(self) -> memoryview:
        """What is left, as a view; nothing is consumed."""
        return self._data[self._at :]

    def u8(self) -> int:
        """The next byte."""
        return self.take(1)[0]

    def varint(self, limit: int) -> int:
        """An LEB128 number of at most ``limit``; only the shortest form of a number is accepted."""
        value = 0
        for shift in range(0, 63, 7):
            byte = self.u8()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if byte == 0 and shift:
                    raise CorruptFrame("a number is written longer than it needs to be")
                if value > limit:
                    raise CorruptFrame(f"a number is {value} where at most {limit} is possible")
                return value
        raise CorruptFrame("a number is longer than 63 bits")

    def end(self) -> None:
        """Raise :class:`CorruptFrame` unless everything has been read."""
        if self.left:
            raise CorruptFrame(f"{self.left} bytes follow where the payload should end")


def varint(value: int) -> bytes:
    """LEB128: seven bits a byte, low bits first, the top bit set on all bytes but the last."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _zstd(level: int) -> Callable[[memoryview], bytes]:
    def compress(data: memoryview) -> bytes:
        return zstandard.ZstdCompressor(level=level, write_content_size=True).compress(data)

    return compress


def _zstd_order0(data: memoryview) -> bytes:
    """zstd that finds next to no matches, so that almost everything becomes Huffman-coded literals.

    What exponent planes want: matches of a few bytes cost more than their literals (measured: 0.365 of the plane at
    level 1, 0.333 here, which is the order-0 entropy, and twice as fast). Each block of 2**17 has its own code.
    """
    parameters = zstandard.ZstdCompressionParameters(
        strategy=zstandard.STRATEGY_FAST, window_log=17, hash_log=6, min_match=7, write_content_size=True
    )
    return zstandard.ZstdCompressor(compression_params=parameters).compress(data)


def _huffman(data: memoryview) -> bytes:
    """Deflate without matches: an order-0 code with next to no overhead, for short streams."""
    packer = zlib.compressobj(6, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
    return packer.compress(data) + packer.flush()


def _bzip2(data: memoryview) -> bytes:
    return bz2.compress(data, 9)


Candidate = tuple[int, Callable[[memoryview], bytes]]

PLANE_CANDIDATES: tuple[Candidate, ...] = ((ZSTD, _zstd(1)), (ZSTD, _zstd_order0))
"""For large planes of weights: matches against order-0 entropy."""
SPARSE_CANDIDATES: tuple[Candidate, ...] = ((ZSTD, _zstd(9)), (BZIP2, _bzip2), (DEFLATE, _huffman))
"""For the short streams that describe sparse changes."""


def pack(planes: Sequence[NDArray[np.uint8]], candidates: Sequence[Candidate]) -> bytes:
    """All planes as streams, one after the other, each as small as the best of ``candidates`` makes it.

    The candidates run side by side, on no more threads than cores, where the planes are large enough to pay for them.
    """
    views = [as_bytes(np.ascontiguousarray(p)) for p in planes]
    jobs = [(view, candidate) for view in views if len(view) for candidate in _promising(view, candidates)]
    pay = sum(len(view) for view, _ in jobs) >= _THREADS_FROM_BYTES
    packed = list(in_order([partial(compress, view) for view, (_, compress) in jobs], threads=pay))
    out = []
    for view in views:
        tried = [(number, stored) for (seen, (number, _)), stored in zip(jobs, packed, strict=True) if seen is view]
        compressor, stored = min(tried, key=lambda t: len(t[1]), default=(STORED, b""))
        if len(stored) >= len(view):
            compressor, stored = STORED, bytes(view)
        out += [bytes([compressor]), varint(len(stored)), stored]
    return b"".join(out)


def _promising(view: memoryview, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """The candidates worth running over all of ``view``: for a large one, the best on an even sample of it."""
    if len(view) < _SAMPLE_FROM_BYTES:
        return candidates
    step = len(view) // _SAMPLE_SLICES
    sample = memoryview(b"".join(view[i * step :][:_SAMPLE_SLICE_BYTES] for i in range(_SAMPLE_SLICES)))
    return [min(candidates, key=lambda c: len(c[1](sample)))]


def unpack(reader: Reader, size: int) -> NDArray[np.uint8]:
    """The next stream, which must decode to exactly ``size`` bytes. Memory is bounded by ``size``."""
    compressor = reader.u8()
    stored = reader.take(reader.varint(reader.left))
    if compressor > BZIP2:
        raise UnsupportedFrame(f"compressor {compressor} is unknown; a newer weightcast wrote this: upgrade")
    if size > len(stored) * _MAX_RATIO.get(compressor, size):
        raise CorruptFrame(f"{len(stored)} bytes cannot hold the {size} bytes they stand for")
    if compressor == STORED:
        plain: Any = stored
    elif compressor == ZSTD:
        plain = _unzstd(stored, size)
    else:
        plain = _inflate(stored, size) if compressor == DEFLATE else _unbzip2(stored, size)
    if len(plain) != size:
        raise CorruptFrame(f"a stream decodes to {len(plain)} bytes where {size} are due")
    return np.frombuffer(plain, np.uint8)


def _unzstd(stored: memoryview, size: int) -> bytes:
    try:
        # Checked first: the library allocates what the frame claims, whatever max_output_size says.
        if zstandard.frame_content_size(stored) != size:
            raise CorruptFrame("a zstd stream claims another length than it should have")
        return zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptFrame(f"a zstd stream does not decode: {error}") from error


def _inflate(stored: memoryview, size: int) -> bytes:
    unpacker = zlib.decompressobj(-15)
    try:
        plain = unpacker.decompress(stored, size + 1)
    except zlib.error as error:
        raise CorruptFrame(f"a deflate stream does not decode: {error}") from error
    if not unpacker.eof or unpacker.unused_data:
        raise CorruptFrame("a deflate stream does not end where it should")
    return plain


def _unbzip2(stored: memoryview, size: int) -> bytes:
    unpacker = bz2.BZ2Decompressor()
    try:
        plain = unpacker.decompress(stored, size + 1)
    except (OSError, ValueError) as error:
        raise CorruptFrame(f"a bzip2 stream does not decode: {error}") from error
    if not unpacker.eof or unpacker.unused_data:
        raise CorruptFrame("a bzip2 stream does not end where it should")
    return plain

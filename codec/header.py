"""What stands before the payloads of a stand-alone frame: built, checked and read here, nowhere else.

The byte layout is FORMAT.md's "Frames"; the ``struct`` strings below are held to its tables by a test.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import xxhash

from codec.digest import DIGEST_BYTES, Buffer, as_bytes, digest
from codec.dtypes import Bits, DType, find_code
from codec.errors import CorruptFrame, InvalidInput, TruncatedFrame, UnsupportedFrame
from codec.streams import Reader, varint

MAGIC = b"\x89WCF"
FORMAT_VERSION = 1
FULL, DELTA, STORED_FULL, STORED_DELTA = range(4)
BY_CHUNK = 4
"""Added to one of these kinds: digests are taken of each chunk, and then of those."""
CHUNK_N = 1 << 24
"""Elements in every chunk of a frame but the last."""

PREAMBLE = struct.Struct("<4sBBBB")  # magic, format version, kind, dtype code, number of dimensions
CHECK = struct.Struct("<Q")  # XXH3-64 of the frame without these eight bytes
MAX_DIMS = 32
"""As numpy 1 has it."""
MAX_FRAME_ELEMENTS = 1 << 42
MAX_RATIO = 32768
"""No payload decodes to more than this many times its length: zstd's bound, the weakest of the compressors."""


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """The description of one tensor's frame; ``base_digest`` is None in a full.

    ``shape`` is the tensor's in a full, and one dimension, the element count, in a delta. After the header of a
    ``stored`` frame come the bytes of all elements, after that of any other the chunks' payloads with their lengths.
    With ``by_chunk`` there are several chunks, and the digests are :func:`joined` from theirs.
    """

    dtype: DType
    shape: tuple[int, ...]
    digest: bytes
    base_digest: bytes | None
    stored: bool = False
    by_chunk: bool = False

    @property
    def kind(self) -> int:
        """The frame's kind on the wire."""
        full, delta = (STORED_FULL, STORED_DELTA) if self.stored else (FULL, DELTA)
        return (full if self.base_digest is None else delta) + (BY_CHUNK if self.by_chunk else 0)

    @property
    def count(self) -> int:
        """Elements in the tensor."""
        return math.prod(self.shape)

    @property
    def chunks(self) -> list[slice]:
        """The element ranges that are coded on their own; none for an empty tensor."""
        return chunks_of(self.count)

    def validate(self) -> None:
        """Raise :class:`InvalidInput` unless the header can be written; readers translate it to CorruptFrame."""
        if len(self.shape) > MAX_DIMS:
            raise InvalidInput(f"{len(self.shape)} dimensions; a frame holds at most {MAX_DIMS}")
        # Zeros count as ones: (0, 2**60) is empty, and still no shape a tensor library takes.
        if math.prod(max(n, 1) for n in self.shape) > MAX_FRAME_ELEMENTS:
            raise InvalidInput(f"shape {self.shape} is beyond the {MAX_FRAME_ELEMENTS} elements of a frame")
        if self.base_digest is not None and len(self.shape) != 1:
            raise InvalidInput("a delta has one dimension, the element count")
        if any(len(d) != DIGEST_BYTES for d in (self.digest, self.base_digest) if d is not None):
            raise InvalidInput(f"a digest has {DIGEST_BYTES} bytes")
        if self.by_chunk and self.count <= CHUNK_N:
            raise InvalidInput(f"{self.count} elements are one chunk, whose digest is the frame's")

    def digest_of(self, bits: Bits) -> bytes:
        """The digest of the elements ``bits``, as this frame has it."""
        return joined([digest(bits[chunk]) for chunk in self.chunks]) if self.by_chunk else digest(bits)


def joined(digests: Sequence[bytes]) -> bytes:
    """What a frame has for the ``digests`` of its chunks: of one its own, of several theirs."""
    return digests[0] if len(digests) == 1 else digest(b"".join(digests))


def chunks_of(count: int) -> list[slice]:
    """The element ranges into which a tensor of ``count`` elements is cut."""
    return [slice(at, min(at + CHUNK_N, count)) for at in range(0, count, CHUNK_N)]


def write(header: FrameHeader, payloads: Sequence[Buffer]) -> bytes:
    """The whole frame: header, lengths of the chunks' payloads, payloads; in a stored one their elements alone."""
    header.validate()
    head = PREAMBLE.pack(MAGIC, FORMAT_VERSION, header.kind, header.dtype.code, len(header.shape))
    rest = _rest(header, payloads)
    return b"".join([head, CHECK.pack(_check_of(head, *rest)), *rest])


def write_smallest(header: FrameHeader, payloads: Sequence[Buffer], elements: Buffer) -> bytes:
    """The frame of these payloads; where that is smaller, the stored one of the ``elements`` they stand for."""
    stored = replace(header, stored=True)
    if sum(map(len, _rest(stored, [elements]))) < sum(map(len, _rest(header, payloads))):
        return write(stored, [elements])
    return write(header, payloads)


def _rest(header: FrameHeader, payloads: Sequence[Buffer]) -> list[memoryview]:
    """What follows the check; nothing large is copied."""
    views = [as_bytes(payload) for payload in payloads]
    lengths = () if header.stored else map(len, views)
    sizes = b"".join(map(varint, [*header.shape, *lengths]))
    return [memoryview(header.digest + (header.base_digest or b"") + sizes), *views]


def read(frame: Buffer) -> tuple[FrameHeader, list[memoryview]]:
    """The header and a view of each chunk's payload, in a stored frame of its elements.

    Raises :class:`UnsupportedFrame` for a later format version before anything else is believed, and
    :class:`CorruptFrame` if a byte anywhere in the frame has changed. A frame made up by somebody hostile gets past
    the check, so every number is bounded all the same.
    """
    reader = Reader(as_bytes(frame))
    begin = bytes(reader.peek()[: len(MAGIC)])
    if begin != MAGIC[: len(begin)]:  # one that is only cut short says so below
        raise CorruptFrame("this is not a weightcast frame: the magic number is missing")
    head = reader.take(PREAMBLE.size)
    _, version, kind, dtype_code, dims = PREAMBLE.unpack(head)
    if version != FORMAT_VERSION:
        raise UnsupportedFrame(f"frame format {version}; this weightcast reads {FORMAT_VERSION}: upgrade")
    (check,) = CHECK.unpack(reader.take(CHECK.size))
    if check != _check_of(head, reader.peek()):
        raise CorruptFrame("the frame is damaged or incomplete: its check does not match; fetch it again")
    by_chunk, plain_kind = divmod(kind, BY_CHUNK)
    if by_chunk > 1:
        raise UnsupportedFrame(f"frame kind {kind} is unknown; a newer weightcast wrote this: upgrade")
    of_result = bytes(reader.take(DIGEST_BYTES))
    of_base = bytes(reader.take(DIGEST_BYTES)) if plain_kind in (DELTA, STORED_DELTA) else None
    if dims > MAX_DIMS:
        raise CorruptFrame(f"{dims} dimensions; a frame holds at most {MAX_DIMS}")
    stored = plain_kind in (STORED_FULL, STORED_DELTA)
    shape = tuple(reader.varint(MAX_FRAME_ELEMENTS) for _ in range(dims))
    header = FrameHeader(find_code(dtype_code), shape, of_result, of_base, stored, by_chunk == 1)
    try:
        header.validate()
    except InvalidInput as error:
        raise CorruptFrame(str(error)) from None
    return header, _elements(reader, header) if stored else _payloads(reader, header)


def _elements(reader: Reader, header: FrameHeader) -> list[memoryview]:
    item_bytes = header.dtype.item_bytes
    elements = reader.take(header.count * item_bytes)
    reader.end()
    return [elements[chunk.start * item_bytes : chunk.stop * item_bytes] for chunk in header.chunks]


def _payloads(reader: Reader, header: FrameHeader) -> list[memoryview]:
    if -(-header.count // CHUNK_N) > reader.left:  # every length takes a byte; checked before the list is made
        raise TruncatedFrame(f"{header.count} elements announced, but not even the lengths of their chunks follow")
    sizes = [reader.varint(reader.left) for _ in header.chunks]
    payloads = [reader.take(size) for size in sizes]
    reader.end()
    for chunk, payload in zip(header.chunks, payloads, strict=True):
        plain = (chunk.stop - chunk.start) * header.dtype.item_bytes
        if header.base_digest is None and plain > len(payload) * MAX_RATIO:
            raise CorruptFrame(f"{len(payload)} bytes cannot hold the {plain} bytes they stand for")
    return payloads


def _check_of(*parts: bytes | memoryview) -> int:
    hasher = xxhash.xxh3_64()
    for part in parts:
        hasher.update(part)
    return hasher.intdigest()

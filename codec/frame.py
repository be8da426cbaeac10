"""Stand-alone frames: one tensor's delta or full that carries its own description and digests.

For files, queues and interop; the agents use groups (:mod:`codec.group`), whose description lies in layout and receipt.
Tensors may be torch or numpy, of any shape and dtype, contiguous or not, on any device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np

from codec import dtypes, header
from codec._native import Digests
from codec.change import Change, apply_change, whole_change
from codec.digest import Buffer
from codec.dtypes import ArrayLike, Bits, DType
from codec.errors import BaseMismatch, CodecError, CorruptFrame, InvalidInput
from codec.group import decode_fed, encode_payload, needs_base
from codec.header import FrameHeader, chunks_of
from codec.threads import in_order, to_the_end

R = TypeVar("R")


def encode_delta(base: ArrayLike, new: ArrayLike, *, method: str = "auto", dtype: str | None = None) -> bytes:
    """The frame that turns ``base`` into ``new``: same shape, same dtype. Chunks are coded on all cores.

    Each frame pays some 150 bytes for its header, digests and model, which is much beside what one step changes in a
    tensor of 1 MB: 2 to 70 % more than in a large one, the less changed the more. Code many small tensors as one of
    16 MiB or more, ``torch.cat([t.flatten() for t in tensors])``; to the agents, groups are the same
    (:func:`codec.encode_group`, of raw bits and without header). Whatever the bits, a frame is never larger than the
    raw bytes and 64 more: what nothing makes smaller is stored.

    ``method`` is as in :func:`codec.encode_group`. ``dtype`` says what the bits of unsigned numpy arrays mean ("BF16",
    "F8_E4M3", ...). Raises :class:`InvalidInput`.
    """
    info = _meaning(new, dtype)
    if _meaning(base, dtype) != info or base.dtype != new.dtype:
        raise InvalidInput(f"dtypes differ: base {base.dtype}, new {new.dtype}; convert one of them first")
    old, now = dtypes.to_bits(base), dtypes.to_bits(new)
    if tuple(base.shape) != tuple(new.shape):
        raise InvalidInput(f"shapes differ: base {tuple(base.shape)}, new {tuple(new.shape)}")
    return _encode(old, now, info, (now.size,), method)


def encode_full(new: ArrayLike, *, dtype: str | None = None) -> bytes:
    """The frame that holds ``new`` itself, compressed. Arguments, largest size, errors as for :func:`encode_delta`.

    A full of more than 26 dimensions may take 6 bytes more.
    """
    info = _meaning(new, dtype)
    now = dtypes.to_bits(new)
    shape = tuple(new.shape) if now.size == np.prod(new.shape, dtype=object) else (now.size,)
    return _encode(None, now, info, shape, "auto")


def _encode(old: Bits | None, now: Bits, info: DType, shape: tuple[int, ...], method: str) -> bytes:
    """The frame; each chunk is hashed by who codes it."""

    def code(chunk: slice) -> tuple[bytes, bytes, bytes]:
        digests = Digests(base=old is not None, result=True)
        base = None if old is None else old[chunk]
        payload, _ = encode_payload(base, now[chunk], info.name, method=method, digests=digests)
        return payload, digests.result(), b"" if old is None else digests.base()

    coded = list(in_order([partial(code, chunk) for chunk in chunks_of(now.size)], threads=True))
    of_now, of_old = (header.joined([part[side] for part in coded]) for side in (1, 2))
    head = FrameHeader(info, shape, of_now, None if old is None else of_old, by_chunk=len(coded) > 1)
    return header.write_smallest(head, [payload for payload, _, _ in coded], now)


def apply_delta(buffer: ArrayLike, frame: Buffer) -> None:
    """Turn ``buffer``, which holds the frame's base, into the frame's result, in place.

    Everything is decoded against the untouched buffer and the result's digest compared first: whatever the frame, if an
    error is raised the buffer has not changed. An interrupt while the result is stored is raised once it is: the buffer
    holds its old bytes or the new ones. A full is stored over whatever the buffer holds. Beyond the frame, takes memory
    for the changed elements (dense methods: for one more copy; what the frame stores is copied from there).
    Raises :class:`BaseMismatch` if the buffer holds other bytes than the frame's base, :class:`CorruptFrame`,
    :class:`UnsupportedFrame`, or :class:`InvalidInput` for a buffer of another size or dtype or that cannot be written.
    """
    head, payloads = header.read(frame)
    dtypes.check_writable(buffer)
    bits = dtypes.to_bits(buffer)
    if not _fits(dtypes.dtype_of(buffer), head.dtype):
        raise InvalidInput(f"the frame holds {head.dtype.name}, the buffer {buffer.dtype}")
    if bits.size != head.count:
        raise InvalidInput(f"the frame has {head.count} elements, the buffer {bits.size}")
    changes = _decode(head, payloads, bits)
    stores = [partial(apply_change, bits[chunk], change) for chunk, change in zip(head.chunks, changes, strict=True)]
    to_the_end(stores)
    dtypes.store(buffer, bits)


def decode_full(frame: Buffer, *, container: str = "torch") -> ArrayLike:
    """The tensor in a full frame.

    ``container`` is "torch", or "numpy", where BF16, FP8 and FP4 come back as their unsigned bits.
    Raises :class:`CorruptFrame` or :class:`UnsupportedFrame`, and :class:`InvalidInput` for a delta.
    """
    head, payloads = header.read(frame)
    if head.base_digest is not None:
        raise InvalidInput("the frame is a delta: apply_delta() it to its base")
    bits = np.empty(head.count, head.dtype.bits)  # header.read has checked that the payloads can hold as much

    def fill(chunk: slice, payload: memoryview, digests: Digests) -> None:
        apply_change(bits[chunk], _decode_chunk(head, payload, None, chunk, digests))

    digests = _in_chunks(head, payloads, fill)[1]
    _compare(header.joined([d.result() for d in digests]), head)
    return dtypes.from_bits(bits, head.dtype, head.shape, container)


def _decode(head: FrameHeader, payloads: list[memoryview], base: Bits) -> list[Change]:
    """The change of every chunk, once the digests of base and result have been compared."""
    is_delta = head.base_digest is not None

    def decode(chunk: slice, payload: memoryview, digests: Digests) -> Change:
        return _decode_chunk(head, payload, base[chunk] if is_delta else None, chunk, digests)

    try:
        changes, digests = _in_chunks(head, payloads, decode)
    except CodecError:
        # Of a buffer with other bytes that is what is said, whatever came of decoding against them.
        if is_delta and head.digest_of(base) != head.base_digest:
            raise _other_base() from None
        raise
    if is_delta and header.joined([d.base() for d in digests]) != head.base_digest:
        raise _other_base()
    _compare(header.joined([d.result() for d in digests]), head)
    return changes


def _in_chunks(
    head: FrameHeader, payloads: list[memoryview], decode: Callable[[slice, memoryview, Digests], R]
) -> tuple[list[R], list[Digests]]:
    """``decode`` for each chunk, on all cores, and the digests that it has fed.

    Those are one for all chunks unless the frame has one of each; then they are decoded one after the other.
    """
    count = len(payloads) if head.by_chunk else 1
    digests = [Digests(base=head.base_digest is not None, result=True) for _ in range(count)]
    fed = digests if head.by_chunk else digests * len(payloads)
    jobs = [partial(decode, *parts) for parts in zip(head.chunks, payloads, fed, strict=True)]
    return list(in_order(jobs, threads=head.by_chunk)), digests


def _other_base() -> BaseMismatch:
    return BaseMismatch(
        "the buffer does not hold the bytes this delta starts from; apply the deltas before it, or a full"
    )


def _decode_chunk(head: FrameHeader, payload: memoryview, base: Bits | None, chunk: slice, digests: Digests) -> Change:
    if head.stored:
        return whole_change(base, np.frombuffer(payload, head.dtype.bits), digests)
    if base is None and needs_base(payload):
        raise CorruptFrame("a full frame holds a payload that needs a base")
    return decode_fed(base, payload, head.dtype.name, chunk.stop - chunk.start, digests)


def _compare(found: bytes, head: FrameHeader) -> None:
    if found != head.digest:
        raise CorruptFrame("the frame decodes to other bytes than its digest says; fetch it again")


def _meaning(array: ArrayLike, dtype: str | None) -> DType:
    """What the elements of ``array`` are: its own dtype, or ``dtype`` if it holds plain unsigned bits of that size."""
    own = dtypes.dtype_of(array)
    if dtype is None:
        return own
    info = dtypes.find(dtype)
    if not _fits(own, info):
        raise InvalidInput(f"{array.dtype} elements are no {dtype}; pass that dtype, or unsigned integers of its size")
    return info


def _fits(own: DType, wanted: DType) -> bool:
    return own == wanted or (own.name in ("U8", "U16", "U32", "U64") and own.item_bytes == wanted.item_bytes)

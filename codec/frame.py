"""Stand-alone frames: one tensor's delta or full that carries its own description and digests.

For files, queues and interop; the agents use groups (:mod:`codec.group`), whose description lies in layout and receipt.
Tensors may be torch or numpy, of any shape and dtype, contiguous or not, on any device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import xxhash

from codec import dtypes, header
from codec.change import Change, apply_change
from codec.digest import Buffer, as_bytes, digest, update_patched
from codec.dtypes import ArrayLike, Bits, DType
from codec.errors import BaseMismatch, CorruptFrame, InvalidInput
from codec.group import decode_group, encode_payload, needs_base
from codec.header import FrameHeader, chunks_of
from codec.threads import in_order


def encode_delta(base: ArrayLike, new: ArrayLike, *, method: str = "auto", dtype: str | None = None) -> bytes:
    """The frame that turns ``base`` into ``new``: same shape, same dtype. Chunks are coded on all cores.

    Each frame pays some 150 bytes for its header, digests and model, which is much beside what one step changes in a
    tensor of 1 MB: 2 to 70 % more than in a large one, the less changed the more. Code many small tensors as one of
    16 MiB or more, ``torch.cat([t.flatten() for t in tensors])``; to the agents, groups are the same
    (:func:`codec.encode_group`, of raw bits and without header). Whatever the bits, a frame is never larger than the
    raw bytes and 64 more, and 5 for each chunk of 2**24 elements after the first.

    ``method`` is as in :func:`codec.encode_group`. ``dtype`` says what the bits of unsigned numpy arrays mean ("BF16",
    "F8_E4M3", ...). Raises :class:`InvalidInput`.
    """
    info = _meaning(new, dtype)
    if _meaning(base, dtype) != info or base.dtype != new.dtype:
        raise InvalidInput(f"dtypes differ: base {base.dtype}, new {new.dtype}; convert one of them first")
    old, now = dtypes.to_bits(base), dtypes.to_bits(new)
    if tuple(base.shape) != tuple(new.shape):
        raise InvalidInput(f"shapes differ: base {tuple(base.shape)}, new {tuple(new.shape)}")
    (of_new, of_old), payloads = _encode([now, old], old, now, info, method)
    return header.write(FrameHeader(info, (now.size,), of_new, of_old), payloads)


def encode_full(new: ArrayLike, *, dtype: str | None = None) -> bytes:
    """The frame that holds ``new`` itself, compressed. Arguments, largest size and errors as for :func:`encode_delta`.

    Past 21 dimensions each takes one byte more.
    """
    info = _meaning(new, dtype)
    now = dtypes.to_bits(new)
    shape = tuple(new.shape) if now.size == np.prod(new.shape, dtype=object) else (now.size,)
    (of_new,), payloads = _encode([now], None, now, info, "auto")
    return header.write(FrameHeader(info, shape, of_new, None), payloads)


def _encode(
    hashed: list[Bits], old: Bits | None, now: Bits, info: DType, method: str
) -> tuple[list[bytes], list[bytes]]:
    """The digests of ``hashed``, one thread's work each, which therefore begin first; the payload of each chunk."""

    def code(chunk: slice) -> bytes:
        return encode_payload(None if old is None else old[chunk], now[chunk], info.name, method=method)[0]

    chunks = chunks_of(now.size)
    jobs: list[Callable[[], bytes]] = [partial(digest, bits) for bits in hashed]
    jobs += [partial(code, chunk) for chunk in chunks]
    done = list(in_order(jobs, threads=len(chunks) > 1))
    return done[: len(hashed)], done[len(hashed) :]


def apply_delta(buffer: ArrayLike, frame: Buffer) -> None:
    """Turn ``buffer``, which holds the frame's base, into the frame's result, in place.

    Everything is decoded against the untouched buffer and the result's digest compared first: whatever is raised, the
    buffer has not changed. A full is stored over whatever the buffer holds. Beyond the frame, takes memory
    for the changed elements (dense methods: for one more copy).
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
    list(in_order(stores, threads=True))
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

    def fill(chunk: slice, payload: memoryview) -> slice:
        apply_change(bits[chunk], _decode_chunk(head, payload, None, chunk))
        return chunk

    hasher = xxhash.xxh3_128()
    jobs = [partial(fill, chunk, payload) for chunk, payload in zip(head.chunks, payloads, strict=True)]
    for chunk in in_order(jobs, threads=True):
        hasher.update(as_bytes(bits[chunk]))
    _compare(hasher.digest(), head)
    return dtypes.from_bits(bits, head.dtype, head.shape, container)


def _decode(head: FrameHeader, payloads: list[memoryview], base: Bits) -> list[Change]:
    """The change of every chunk, once the digests of base and result have been compared."""
    is_delta = head.base_digest is not None
    jobs: list[Callable[[], Any]] = [partial(digest, base)] if is_delta else []
    for chunk, payload in zip(head.chunks, payloads, strict=True):
        jobs.append(partial(_decode_chunk, head, payload, base[chunk] if is_delta else None, chunk))
    results = in_order(jobs, threads=len(payloads) > 1)
    if is_delta and next(results) != head.base_digest:
        raise BaseMismatch(
            "the buffer does not hold the bytes this delta starts from; apply the deltas before it, or a full"
        )
    changes: list[Change] = []
    hasher = xxhash.xxh3_128()
    for chunk, change in zip(head.chunks, results, strict=True):
        changes.append(change)
        if len(payloads) > 1:
            _update(hasher, base[chunk], change)  # while later chunks are decoded
    _compare(hasher.digest() if len(changes) != 1 else changes[0].digest, head)
    return changes


def _update(hasher: xxhash.xxh3_128, base: Bits, change: Change) -> None:
    if change.whole is not None:
        hasher.update(as_bytes(change.whole))
    else:
        update_patched(hasher, base, change.index, change.bits)


def _decode_chunk(head: FrameHeader, payload: memoryview, base: Bits | None, chunk: slice) -> Change:
    if base is None and needs_base(payload):
        raise CorruptFrame("a full frame holds a payload that needs a base")
    return decode_group(base, payload, head.dtype.name, chunk.stop - chunk.start)


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

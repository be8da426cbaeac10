"""``ulp_v1``, the default for deltas of floats: an entropy coder of which weight changes next, and by how many ulps.

The model, the bytes and the arithmetic are in FORMAT-ulp.md; the kernels are in ``native/``. Applies to floats of 8, 16
and 32 bits. Everything else, and whatever this would make larger than the raw bytes, is left to the other methods.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from codec import _native, dtypes
from codec._native import Digests
from codec.change import Change
from codec.digest import Buffer, as_bytes
from codec.dtypes import Bits
from codec.errors import CodecError, CorruptFrame, InvalidInput, TruncatedFrame, UnsupportedFrame

_FAULTS: dict[str, tuple[type[CodecError], str]] = {
    "truncated": (TruncatedFrame, "the ulp_v1 body ends before its lengths say so; fetch it again"),
    "corrupt": (CorruptFrame, "the ulp_v1 body is damaged, or was coded against another base; fetch it again"),
    "unsupported": (UnsupportedFrame, "the ulp_v1 body has a model or flags of a newer weightcast; upgrade"),
}


@dataclass(frozen=True, slots=True)
class Encoded:
    """A body, and how many elements ``changed``, which costs nothing extra to know here.

    ``clustered``: the changes are in fewer places than if each weight were as likely to change as another.
    """

    body: bytes
    changed: int
    clustered: bool


def applies_to(dtype: str) -> bool:
    """True for the float dtypes of 8, 16 and 32 bits."""
    info = dtypes.find(dtype)
    return info.is_float and info.item_bytes <= 4


def encode(base: Bits | None, new: Bits, dtype: str) -> bytes | None:
    """The body of ``base`` -> ``new``; None for a full, for another dtype, or if it is no smaller than the raw bytes.

    Arrays are 1-D, C-contiguous, unsigned, of the item size of ``dtype`` and of equal size. Releases the GIL.
    """
    if base is None or not applies_to(dtype):
        return None
    body = encode_counted(base, new, dtype).body
    return body if len(body) < new.nbytes else None


def encode_counted(
    base: Bits, new: Bits, dtype: str, *, portable: bool = False, digests: Digests | None = None
) -> Encoded:
    """The body of ``base`` -> ``new`` whatever its size; :class:`InvalidInput` if ``dtype`` or sizes do not fit, or if
    it is noticed that somebody writes into the arrays meanwhile.

    ``digests`` are fed as the coder passes, which costs half of what a pass of its own does. ``portable`` uses the
    kernels that run on every processor; the bytes are the same.
    """
    info = _info(dtype)
    if base.size != new.size:
        raise InvalidInput(f"base has {base.size} elements, new has {new.size}; a delta needs equal sizes")
    coded = _native.ulp_encode(
        _bytes(base, info), _bytes(new, info), info.exponent_bits, info.mantissa_bits, portable, digests
    )
    if isinstance(coded, str):
        raise InvalidInput("the arrays changed while they were encoded; encode a copy, or what nobody trains meanwhile")
    body, changed, clustered = coded
    return Encoded(body, changed, clustered)


def decode(
    base: Bits | None,
    body: Buffer,
    dtype: str,
    count: int,
    digests: Digests | None = None,
    *,
    portable: bool = False,
) -> Change:
    """What ``body`` makes of ``base`` (``count`` elements, only read): indices, new bits, and the result's digest.

    Takes at most ``count`` indices and values of memory, and that only after the body has claimed as many changes.
    Raises :class:`CorruptFrame`, :class:`TruncatedFrame`, :class:`UnsupportedFrame`, and nothing else whatever the
    bytes. A body that was altered so that it still decodes gives some result: its digest is that of the result, and
    the caller compares; ``digests`` are fed instead, if given. Releases the GIL.
    """
    if not applies_to(dtype):
        raise CorruptFrame(f"an ulp_v1 body cannot stand for {dtype}: it codes floats of 8, 16 and 32 bits")
    info = dtypes.find(dtype)
    if base is None or base.size != count:
        raise InvalidInput(f"an ulp_v1 body of {count} elements needs a base of {count} elements")
    source = np.frombuffer(as_bytes(body), np.uint8)
    changes = _native.ulp_changes(source, count)
    if isinstance(changes, str):
        raise _error(changes)
    index, bits = np.empty(changes, np.uint32), np.empty(changes, info.bits)
    taken = Digests(base=False, result=True) if digests is None else digests
    fault = _native.ulp_decode(
        _bytes(base, info), source, info.exponent_bits, info.mantissa_bits, index, bits.view(np.uint8), portable, taken
    )
    if fault is not None:
        raise _error(fault)
    return Change(index, bits, None, taken.result() if digests is None else b"")


def _info(dtype: str) -> dtypes.DType:
    if not applies_to(dtype):
        raise InvalidInput(f"ulp_v1 codes floats of 8, 16 and 32 bits, not {dtype}")
    return dtypes.find(dtype)


def _bytes(bits: Bits, info: dtypes.DType) -> Bits:
    if bits.dtype != info.bits or bits.ndim != 1 or not bits.flags.c_contiguous:
        raise InvalidInput(f"{info.name} is coded as contiguous 1-D {info.bits}, not {bits.ndim}-D {bits.dtype}")
    return (bits if bits.flags.aligned else bits.copy()).view(np.uint8)


def _error(fault: str) -> CodecError:
    kind, sentence = _FAULTS[fault]
    return kind(sentence)

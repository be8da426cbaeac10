"""Groups: what the agents code. Arrays of raw bits in, payloads out, and back.

A payload is ``u8 method id | body``. It carries no count, dtype or digest: those are the layout's and the receipt's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from codec import choice, kernels, methods, ulp
from codec._native import Digests
from codec.change import MAX_ELEMENTS, Change
from codec.digest import Buffer, as_bytes
from codec.dtypes import Bits, DType, find
from codec.errors import InvalidInput, TruncatedFrame


@dataclass(frozen=True, slots=True)
class EncodedGroup:
    """One coded group: its ``payload``, the XXH3-128 ``digest`` of the new bytes, and how many elements ``changed``."""

    payload: bytes
    digest: bytes
    changed: int


def encode_group(base: Bits | None, new: Bits, dtype: str, *, method: str = "auto") -> EncodedGroup:
    """Code ``new`` as a delta from ``base``, or as a full where ``base`` is None.

    Arrays are 1-D, C-contiguous, unsigned integers of the item size of ``dtype`` (a safetensors name), at most
    2**31 - 1 elements. ``method`` "auto" takes the delta method and falls back on general ones where it loses;
    another name prefers that method. The payload never exceeds the raw bytes by more than one, and depends on
    the arguments alone. ``changed`` counts elements whose bits differ: all of them in a full.
    Heavy loops release the GIL. Raises :class:`InvalidInput`.
    """
    digests = Digests(base=False, result=True)
    payload, changed = encode_payload(base, new, dtype, method=method, digests=digests)
    return EncodedGroup(payload, digests.result(), changed)


def encode_payload(
    base: Bits | None, new: Bits, dtype: str, *, method: str = "auto", digests: Digests | None = None
) -> tuple[bytes, int]:
    """As :func:`encode_group`: the payload, and how many changed; ``digests``, if given, are fed both arrays."""
    info = find(dtype)
    _check(new, info, "new")
    if method != "auto":
        methods.find(method)
    if base is None:
        names = ["planes"] if method == "auto" else [method]
        _hash(digests, None, new)
        return _smallest(names, None, new, dtype, {}), new.size
    _check(base, info, "base")
    if base.size != new.size:
        raise InvalidInput(f"base has {base.size} elements, new has {new.size}; a delta needs equal sizes")
    default = "ulp_v1" if ulp.applies_to(dtype) else "fields_v1"
    likely = choice.sampled(base, new, dtype, default) if method == "auto" else [method]
    known, clustered = {}, False
    if ulp.applies_to(dtype) and "ulp_v1" in ([default] if likely is None else likely):
        coded = ulp.encode_counted(base, new, dtype, digests=digests)  # counts and hashes in the pass that codes
        changed, clustered, known = coded.changed, coded.clustered, {"ulp_v1": coded.body}
    else:
        _hash(digests, base, new)
        changed = kernels.count_changed(base, new)
    if changed == 0:
        return bytes([methods.SAME]), 0
    if likely is None:
        likely = choice.candidates(base, new, dtype, default, changed=changed, clustered=clustered)
    return _smallest(likely, base, new, dtype, known), changed


def _hash(digests: Digests | None, base: Bits | None, new: Bits) -> None:
    if digests is not None:
        kernels.hash_both(digests, base, new)


def _smallest(names: list[str], base: Bits | None, new: Bits, dtype: str, known: dict[str, bytes]) -> bytes:
    """The payload of the method with the smallest body, raw if none is smaller; ``known`` bodies are not made again."""
    best_id, best = methods.RAW, None
    for method in map(methods.find, names):
        body = known.get(method.name) or method.encode(base, new, dtype)
        if body is not None and len(body) < (new.nbytes if best is None else len(best)):
            best_id, best = method.id, body
    return bytes([best_id]) + (new.tobytes() if best is None else best)


def decode_group(base: Bits | None, payload: Buffer, dtype: str, count: int) -> Change:
    """What ``payload`` makes of ``base``: ``count`` elements of ``dtype``.

    ``base`` is only read, and may be a read-only map.
    Memory is O(count), bounded before it is taken. The digest in the result is that of the bytes decoded, not a
    promise about them: compare it with the receipt's. Raises :class:`CorruptFrame` or :class:`UnsupportedFrame` for
    any bytes that no encoder wrote, :class:`InvalidInput` for a base that is missing or does not fit.
    """
    return decode_fed(base, payload, dtype, count, None)


def decode_fed(base: Bits | None, payload: Buffer, dtype: str, count: int, digests: Digests | None) -> Change:
    """As :func:`decode_group`; with ``digests`` feeds those instead, and the change has no digest of its own."""
    info = find(dtype)
    if not isinstance(count, int | np.integer) or not 0 <= count <= MAX_ELEMENTS:
        raise InvalidInput(f"a group has 0 to {MAX_ELEMENTS} elements, not {count}")
    view = _view(payload)
    method = methods.find_id(view[0])
    if method.needs_base:
        if base is None:
            raise InvalidInput(f"the payload is a delta ({method.name}) and needs its base")
        _check(base, info, "base")
        if base.size != count:
            raise InvalidInput(f"base has {base.size} elements where the layout says {count}")
    return method.decode(base, view[1:], dtype, count, digests)


def needs_base(payload: Buffer) -> bool:
    """True if ``payload`` is a delta; looks at its first byte only."""
    return methods.find_id(_view(payload)[0]).needs_base


def _view(payload: Buffer) -> memoryview:
    view = as_bytes(payload)
    if not len(view):
        raise TruncatedFrame("the payload is empty; even 'nothing changed' takes one byte")
    return view


def _check(bits: Bits, info: DType, role: str) -> None:
    if not isinstance(bits, np.ndarray):
        raise InvalidInput(
            f"{role} is a {type(bits).__name__}; {info.name} is coded as {info.bits} (codec.to_bits makes it)"
        )
    if bits.dtype != info.bits or bits.ndim != 1 or not bits.flags.c_contiguous:
        raise InvalidInput(
            f"{role} is {bits.ndim}-D {bits.dtype}; {info.name} is coded as contiguous 1-D {info.bits} "
            "(codec.to_bits makes it)"
        )
    if bits.size > MAX_ELEMENTS:
        raise InvalidInput(f"{role} has {bits.size} elements; a group has at most {MAX_ELEMENTS}")

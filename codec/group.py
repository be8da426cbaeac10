"""Groups: what the agents code. Arrays of raw bits in, payloads out, and back.

A payload is ``u8 method id | body``. It carries no count, dtype or digest: those are the layout's and the receipt's.
"""

from __future__ import annotations

from dataclasses import dataclass

from codec import kernels, methods
from codec.change import MAX_ELEMENTS, Change
from codec.digest import Buffer, as_bytes, digest
from codec.dtypes import Bits, DType, find
from codec.errors import InvalidInput, TruncatedFrame

_DELTAS = [name for name in ("ulp_v1", "fields_v1") if name in methods.BY_NAME]
"""Delta methods, the default first; each later one is for what those before it do not apply to."""
_DENSE_ONE_IN = 8
"""From one changed element in this many on, the methods for dense updates are tried as well."""
_SMALL_BYTES = 64 << 10
"""Up to this size all delta methods are tried: a model of the changes may cost more than the changes."""


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
    info = find(dtype)
    _check(new, info, "new")
    wanted = None if method == "auto" else methods.find(method)
    if base is not None:
        _check(base, info, "base")
        if base.size != new.size:
            raise InvalidInput(f"base has {base.size} elements, new has {new.size}; a delta needs equal sizes")
    changed = new.size if base is None else kernels.count_changed(base, new)
    if base is not None and changed == 0:
        return EncodedGroup(bytes([methods.SAME]), digest(new), 0)
    rounds = [[wanted.name]] if wanted else _rounds(base is None, changed, new)
    return EncodedGroup(_payload(rounds, base, new, dtype), digest(new), changed)


def _rounds(full: bool, changed: int, new: Bits) -> list[list[str]]:
    """The methods to try: the smallest body of the first round in which a method applies."""
    if full:
        return [["planes"]]
    if changed * _DENSE_ONE_IN >= new.size:
        return [[*_DELTAS, "xor_planes", "planes"]]
    if new.nbytes <= _SMALL_BYTES:
        return [list(_DELTAS)]
    return [[name] for name in _DELTAS]


def _payload(rounds: list[list[str]], base: Bits | None, new: Bits, dtype: str) -> bytes:
    for names in rounds:
        bodies = [(m.id, m.encode(base, new, dtype)) for m in map(methods.find, names)]
        applied = [(method_id, body) for method_id, body in bodies if body is not None]
        if applied:
            method_id, body = min(applied, key=lambda b: len(b[1]))
            if len(body) < new.nbytes:
                return bytes([method_id]) + body
    return bytes([methods.RAW]) + new.tobytes()


def decode_group(base: Bits | None, payload: Buffer, dtype: str, count: int) -> Change:
    """What ``payload`` makes of ``base``: ``count`` elements of ``dtype``.

    ``base`` is only read, and may be a read-only map.
    Memory is O(count), bounded before it is taken. The digest in the result is that of the bytes decoded, not a
    promise about them: compare it with the receipt's. Raises :class:`CorruptFrame` or :class:`UnsupportedFrame` for
    any bytes that no encoder wrote, :class:`InvalidInput` for a base that is missing or does not fit.
    """
    info = find(dtype)
    if not 0 <= count <= MAX_ELEMENTS:
        raise InvalidInput(f"a group has 0 to {MAX_ELEMENTS} elements, not {count}")
    view = _view(payload)
    method = methods.find_id(view[0])
    if method.needs_base:
        if base is None:
            raise InvalidInput(f"the payload is a delta ({method.name}) and needs its base")
        _check(base, info, "base")
        if base.size != count:
            raise InvalidInput(f"base has {base.size} elements where the layout says {count}")
    return method.decode(base, view[1:], dtype, count)


def needs_base(payload: Buffer) -> bool:
    """True if ``payload`` is a delta; looks at its first byte only."""
    return methods.find_id(_view(payload)[0]).needs_base


def _view(payload: Buffer) -> memoryview:
    view = as_bytes(payload)
    if not len(view):
        raise TruncatedFrame("the payload is empty; even 'nothing changed' takes one byte")
    return view


def _check(bits: Bits, info: DType, role: str) -> None:
    if bits.dtype != info.bits or bits.ndim != 1 or not bits.flags.c_contiguous:
        raise InvalidInput(
            f"{role} is {bits.ndim}-D {bits.dtype}; {info.name} is coded as contiguous 1-D {info.bits} "
            "(codec.to_bits makes it)"
        )
    if bits.size > MAX_ELEMENTS:
        raise InvalidInput(f"{role} has {bits.size} elements; a group has at most {MAX_ELEMENTS}")

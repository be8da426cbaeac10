"""The methods a payload can be coded with: their ids on the wire, their names, their modules.

A method module has two functions over 1-D arrays of raw bits: ``encode(base, new, dtype)`` returns the body, or
None if the method does not apply or does not pay; ``decode(base, body, dtype, count, digests)`` returns the
:class:`~codec.change.Change`, never touches ``base`` and raises nothing but ``CodecError``\\ s whatever the body.
With ``digests`` it feeds those with base and result, and the change has no digest of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from codec import fields, planes, raw, same, ulp, xor_planes
from codec._native import Digests
from codec.change import Change
from codec.dtypes import Bits
from codec.errors import InvalidInput, UnsupportedFrame

Encode = Callable[[Bits | None, Bits, str], bytes | None]
Decode = Callable[[Bits | None, memoryview, str, int, Digests | None], Change]


@dataclass(frozen=True, slots=True)
class Method:
    """One row of FORMAT.md's table of methods."""

    id: int
    name: str
    needs_base: bool
    encode: Encode
    decode: Decode


SAME, RAW, PLANES, FIELDS, ULP, XOR_PLANES = range(6)

METHODS: tuple[Method, ...] = (
    Method(SAME, "same", True, same.encode, same.decode),
    Method(RAW, "raw", False, raw.encode, raw.decode),
    Method(PLANES, "planes", False, planes.encode, planes.decode),
    Method(FIELDS, "fields_v1", True, fields.encode, fields.decode),
    Method(ULP, "ulp_v1", True, ulp.encode, ulp.decode),
    Method(XOR_PLANES, "xor_planes", True, xor_planes.encode, xor_planes.decode),
)
BY_ID = {m.id: m for m in METHODS}
BY_NAME = {m.name: m for m in METHODS}


def find(name: str) -> Method:
    """The method of this name; :class:`InvalidInput` if there is none."""
    try:
        return BY_NAME[name]
    except (KeyError, TypeError):
        raise InvalidInput(f"unknown method {name!r}; known are auto, {', '.join(BY_NAME)}") from None


def find_id(method_id: int) -> Method:
    """The method of this wire id; :class:`UnsupportedFrame` if a newer format must have written it."""
    try:
        return BY_ID[method_id]
    except KeyError:
        raise UnsupportedFrame(f"method {method_id} is unknown; a newer weightcast wrote this: upgrade") from None

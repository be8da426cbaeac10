"""Method 5, ``xor_planes``: new XOR base, cut into byte planes. For dense updates, integers and packed types."""

from __future__ import annotations

from codec import planes, streams
from codec._native import Digests
from codec.change import Change, whole_change
from codec.dtypes import Bits
from codec.errors import InvalidInput


def encode(base: Bits | None, new: Bits, dtype: str) -> bytes | None:
    """The planes of the XOR; None without a base, or if that is no smaller than the raw bytes."""
    return None if base is None else planes.encode(None, base ^ new, dtype)


def decode(base: Bits | None, body: memoryview, dtype: str, count: int, digests: Digests | None = None) -> Change:
    """The whole new array; ``base`` is only read."""
    if base is None:
        raise InvalidInput("xor_planes needs the base")
    reader = streams.Reader(body)
    bits = planes.join(reader, dtype, count)
    reader.end()
    bits ^= base
    return whole_change(base, bits, digests)

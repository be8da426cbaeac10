"""``ulp_v1`` in the order of FORMAT-ulp.md: a slow decoder, the oracle of the tests.

Plain Python integers, one weight at a time, no loop shared with the native kernels and no floats. Its encoder is
:mod:`codec.reference_ulp_encoder`. Where FORMAT-ulp.md and this file disagree, FORMAT-ulp.md is right.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from math import isqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from codec.errors import CorruptFrame, TruncatedFrame, UnsupportedFrame

Array = NDArray[Any]

SEGMENT, CLASSES, SYMBOLS, ESCAPE = 4096, 16, 125, 124
UNIT = 1 << 20  # a bit of hazard
LIMIT = 8 * UNIT
CHANCE_BITS = 29  # probabilities of events are in units of 2^-29
CODES = 176
LOW = 1 << 31  # the smallest state
TOTAL_BITS = 12


@dataclass(frozen=True)
class Fields:
    """Width, exponent bits and mantissa bits of a dtype."""

    width: int
    exponent: int
    mantissa: int

    def key(self, bits: int) -> int:
        """The exponent of a weight."""
        return bits >> self.mantissa & ((1 << self.exponent) - 1)

    def ordered(self, bits: int) -> int:
        """The bits as a number that grows with the value, and back."""
        top = self.width - 1
        return bits ^ ((1 << top) - 1) if bits >> top else bits


# Tables


@cache
def _roots() -> list[int]:
    roots = [1 << 199]  # 2^(-2^-k) in 200 bits
    for _ in range(20):
        roots.append(isqrt(roots[-1] << 200))
    return roots


@cache
def power(i: int, bits: int) -> int:
    """floor(2^31 * 2^(-i / 2^bits))."""
    product = 1 << 200
    for k in range(1, bits + 1):
        if i >> (bits - k) & 1:
            product = product * _roots()[k] >> 200
    return product >> 169


def survival(x: int) -> int:
    """2^-x in units of 2^-29, for x <= LIMIT in units of 2^-20."""
    return (power(x >> 10 & 1023, 10) * power(x & 1023, 20) >> 33) >> (x >> 20)


def hazard_of(code: int) -> int:
    """The hazard of a code."""
    eighths = (32768, 35734, 38968, 42495, 46341, 50535, 55109, 60097)
    return (eighths[code % 8] << code // 8) >> 14 if code else 0


# Bits and varints


class Reader:
    """Bytes, varints and bit fields, least significant bit first."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at, self.bit = data, 0, 0

    def byte(self) -> int:
        """The next byte; :class:`TruncatedFrame` at the end."""
        if self.at >= len(self.data):
            raise TruncatedFrame("the body ends too early")
        self.at += 1
        return self.data[self.at - 1]

    def varint(self) -> int:
        """A varint in its shortest form, of at most 9 bytes."""
        value = 0
        for shift in range(0, 63, 7):
            b = self.byte()
            value |= (b & 127) << shift
            if b < 128:
                if shift and not b:
                    raise CorruptFrame("a varint is longer than it needs to be")
                return value
        raise CorruptFrame("a varint is too long")

    def bits(self, count: int) -> int:
        """A field of ``count`` bits."""
        value = 0
        for i in range(count):
            if not self.bit:
                self.current = self.byte()
            value |= (self.current >> self.bit & 1) << i
            self.bit = (self.bit + 1) % 8
        return value

    def gamma(self, most: int) -> int:
        """Elias gamma of a number below 2^(most + 1)."""
        below = 0
        while not self.bits(1):
            below += 1
            if below > most:
                raise CorruptFrame("a number in the model is too large")
        return 1 << below | self.bits(below)

    def align(self) -> None:
        """Skip to the next byte over zero bits."""
        if self.bit and self.current >> self.bit:
            raise CorruptFrame("bits behind the model are not zero")
        self.bit = 0


# Model


def step_symbol(m: int) -> int:
    """Symbol of magnitude - 1 of a step."""
    if m < 16:
        return m
    octave = m.bit_length() - 1
    return 16 + (octave - 4) * 4 + (m >> (octave - 2) & 3)


def step_range(symbol: int) -> tuple[int, int]:
    """The smallest magnitude - 1 of a symbol, and how many raw bits follow it."""
    if symbol < 16:
        return symbol, 0
    raw = symbol // 4 - 2
    return (4 | symbol & 3) << raw, raw


@dataclass
class ValueModel:
    """How new values are coded: ``mode`` 0 step, 1 exponent."""

    mode: int
    top: int = 0
    rest: int = 0
    frequency: list[int] = field(default_factory=lambda: [0] * SYMBOLS)

    def start(self, symbol: int) -> int:
        """The first slot of a symbol."""
        return sum(self.frequency[:symbol])

    def symbol_at(self, slot: int) -> int:
        """The symbol that owns a slot."""
        symbol = 0
        while slot >= self.frequency[symbol]:
            slot -= self.frequency[symbol]
            symbol += 1
        return symbol


@dataclass
class Model:
    """The model of a chunk."""

    fields: Fields
    lowest: int = 0
    code: list[int] = field(default_factory=lambda: [0] * CLASSES)
    values: list[ValueModel] = field(default_factory=list)
    value_of: list[int] = field(default_factory=lambda: [0] * CLASSES)

    def class_of(self, bits: int) -> int:
        """The class of an old weight."""
        return min(max(self.fields.key(bits) - self.lowest, 0), CLASSES - 1)

    def hazard(self, bits: int) -> int:
        """The hazard of an old weight."""
        return hazard_of(self.code[self.class_of(bits)])

    def value_model(self, bits: int) -> ValueModel:
        """The value model of an old weight."""
        return self.values[self.value_of[self.class_of(bits)]]


def read_model(r: Reader, fields: Fields) -> Model:
    """Read a chunk's model."""
    m = Model(fields, lowest=r.bits(8))
    low, high = r.bits(4), r.bits(4)
    if m.lowest >> fields.exponent or low > high:
        raise CorruptFrame("the classes are out of range")
    m.code[low : high + 1] = [r.bits(8) for _ in range(low, high + 1)]
    if max(m.code) >= CODES or not m.code[low] or not m.code[high]:
        raise CorruptFrame("a hazard is out of range")
    for c in range(low, high + 1):
        if not m.code[c]:
            continue
        if not m.values or not r.bits(1):
            m.values.append(_read_value_model(r, fields))
        m.value_of[c] = len(m.values) - 1
    r.align()
    return m


def _read_value_model(r: Reader, fields: Fields) -> ValueModel:
    v = ValueModel(mode=r.bits(1))
    if v.mode:
        v.top = r.bits(8)
    last, v.rest = r.bits(7), r.bits(7)
    if v.top >> fields.exponent or last > (ESCAPE if v.mode else ESCAPE - 1) or v.rest > last:
        raise CorruptFrame("a value model is out of range")
    for s in range(last + 1):
        if s == v.rest:
            continue
        length = r.gamma(3) - 1
        if length > TOTAL_BITS:
            raise CorruptFrame("a frequency is too large")
        if length:
            kept = min(length - 1, 3)
            v.frequency[s] = (1 << kept | r.bits(kept)) << (length - 1 - kept)
        if sum(v.frequency) >= 1 << TOTAL_BITS:
            raise CorruptFrame("the frequencies leave no rest")
    v.frequency[v.rest] = (1 << TOTAL_BITS) - sum(v.frequency)
    return v


# Streams


class Decoder:
    """Two rANS states in turn over the words of one stream."""

    def __init__(self, states: tuple[int, int], words: list[int]) -> None:
        self.state, self.next, self.words, self.at = *states, words, 0

    def take(self, start: int, width: int, bits: int) -> None:
        """Leave the interval that the state's low ``bits`` lie in."""
        self.state = width * (self.state >> bits) + self.state % (1 << bits) - start
        if self.state < LOW:
            if self.at == len(self.words):
                raise CorruptFrame("a stream ends too early")
            self.state = self.state << 32 | self.words[self.at]
            self.at += 1

    def raw(self, bits: int) -> int:
        """A number of ``bits`` bits."""
        value = self.state % (1 << bits)
        if bits:
            self.take(value, 1, bits)
        return value

    def turn(self) -> None:
        """Change states."""
        self.state, self.next = self.next, self.state

    def finish(self) -> None:
        """:class:`CorruptFrame` unless the stream ends here."""
        if (self.state, self.next) != (LOW, LOW) or self.at != len(self.words):
            raise CorruptFrame("a stream does not end where it should")


# Positions


def lanes_of(count: int) -> list[list[int]]:
    """The weights of each lane."""
    return [[i for i in range(count) if i // SEGMENT % 2 == lane] for lane in range(2)]


def decode_positions(base: list[int], model: Model, lane: list[int], changes: int, d: Decoder) -> Iterator[int]:
    """The changed weights of a lane."""
    at, hazard, start = 0, 0, 0  # `hazard` from the last event, at weight `start`, to weight `at`
    while changes:
        point = d.state % (1 << CHANCE_BITS)
        while True:
            if at == len(lane):
                raise CorruptFrame("an event lies behind the last weight")
            further = hazard + model.hazard(base[lane[at]])
            if further > LIMIT:
                d.take(0, survival(hazard), CHANCE_BITS)
                start = at
                break
            if survival(further) <= point:
                d.take(survival(further), survival(hazard) - survival(further), CHANCE_BITS)
                yield lane[at]
                changes -= 1
                start = at + 1
                break
            at, hazard = at + 1, further
        at, hazard = start, 0
        d.turn()


# Values


def decode_value(old: int, model: Model, d: Decoder) -> int:
    """The new bits of a changed weight."""
    f, v = model.fields, model.value_model(old)
    symbol = v.symbol_at(d.state % (1 << TOTAL_BITS))
    if v.mode == 0:
        falls = d.state >> TOTAL_BITS & 1
        d.take((falls << TOTAL_BITS) + v.start(symbol), v.frequency[symbol], TOTAL_BITS + 1)
        smallest, raw = step_range(symbol)
        step = smallest + 1 + d.raw(raw)
        return f.ordered((f.ordered(old) + (-step if falls else step)) % (1 << f.width))
    d.take(v.start(symbol), v.frequency[symbol], TOTAL_BITS)
    if symbol == ESCAPE:
        low = d.raw(f.width // 2)
        return d.raw(f.width // 2) << f.width // 2 | low
    exponent = (v.top - symbol // 2) % (1 << f.exponent)
    sign = old >> (f.width - 1) ^ symbol & 1
    return sign << (f.width - 1) | exponent << f.mantissa | d.raw(f.mantissa)


# Chunks and bodies


def decode_chunk(base: list[int], chunk: bytes, fields: Fields) -> dict[int, int]:
    """The new bits by position within the chunk."""
    r = Reader(chunk)
    changes = [r.varint(), r.varint() if len(base) > SEGMENT else 0]
    if sum(changes) > len(base):
        raise CorruptFrame("more changes than weights")
    if not sum(changes):
        if r.at != len(chunk):
            raise CorruptFrame("bytes behind an unchanged chunk")
        return {}
    model = read_model(r, fields)
    states, sizes = [], []
    for n in changes:
        states.append(_read_states(r) if n else (LOW, LOW))
        sizes.append(r.varint() if n else 0)
    states.append(_read_states(r))
    words, left = _read_words(r)
    if left or sum(sizes) > len(words):
        raise TruncatedFrame("the body ends within its words")
    cuts = [0, sizes[0], sum(sizes), len(words)]
    streams = [Decoder(s, words[a:b]) for s, a, b in zip(states, cuts, cuts[1:], strict=False)]
    positions: list[int] = []
    for lane, n, d in zip(lanes_of(len(base)), changes, streams, strict=False):
        positions += decode_positions(base, model, lane, n, d)
    result = {}
    for i in sorted(positions):
        result[i] = decode_value(base[i], model, streams[2])
        streams[2].turn()
    for d in streams:
        d.finish()
    return result


def _read_states(r: Reader) -> tuple[int, int]:
    states = LOW + r.varint(), LOW + r.varint()
    if max(states) >= 1 << 63:
        raise CorruptFrame("a state is out of range")
    return states


def _read_words(r: Reader) -> tuple[list[int], int]:
    rest = r.data[r.at :]
    whole = len(rest) // 4 * 4
    return np.frombuffer(rest[:whole], "<u4").tolist(), len(rest) - whole


def decode(base: Array, body: bytes, fields: Fields) -> Array:
    """The new array: unsigned integers like ``base``."""
    r = Reader(body)
    if r.byte() != 0:
        raise UnsupportedFrame("a model or flag that this version does not know")
    chunk_log2 = r.byte()
    if not 12 <= chunk_log2 <= 24:
        raise CorruptFrame("the chunk size is out of range")
    starts = range(0, base.size, 1 << chunk_log2)
    sizes = [r.varint() for _ in starts[1:]]
    new = base.copy()
    for i, start in enumerate(starts):
        size = sizes[i] if i < len(sizes) else len(body) - r.at
        if size > len(body) - r.at:
            raise TruncatedFrame("the body ends within a chunk")
        part = base[start : start + (1 << chunk_log2)].tolist()
        for at, bits in decode_chunk(part, body[r.at : r.at + size], fields).items():
            new[start + at] = bits
        r.at += size
    if r.at != len(body):
        raise CorruptFrame("bytes behind the last chunk")
    return new

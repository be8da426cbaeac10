"""The encoder beside :mod:`codec.reference_ulp`: same bytes as the native one, so that they can be compared.

An encoder may choose any model, and :func:`write_chunk` writes by any; :func:`encode` chooses as FORMAT-ulp.md's
section "What the encoder chooses" says, in integers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from codec.reference_ulp import (
    CHANCE_BITS,
    CLASSES,
    CODES,
    ESCAPE,
    LIMIT,
    LOW,
    SEGMENT,
    SYMBOLS,
    TOTAL_BITS,
    Fields,
    Model,
    ValueModel,
    hazard_of,
    lanes_of,
    step_range,
    step_symbol,
    survival,
)
from codec.reference_ulp_sample import Sample, choice_cost, choose_chunk, log2, sample_stride, take_sample

Array = NDArray[Any]


class Writer:
    """What :class:`Reader` reads."""

    def __init__(self) -> None:
        self.data, self.pending = bytearray(), ""

    def varint(self, value: int) -> None:
        """Append a varint."""
        while value > 127:
            self.data.append(value & 127 | 128)
            value >>= 7
        self.data.append(value)

    def bits(self, value: int, count: int) -> None:
        """Append a field of ``count`` bits."""
        self.pending += "".join(str(value >> i & 1) for i in range(count))

    def gamma(self, value: int) -> None:
        """Append an Elias gamma code."""
        below = value.bit_length() - 1
        self.bits(1 << below, below + 1)
        self.bits(value & ((1 << below) - 1), below)

    def align(self) -> None:
        """Fill up the byte with zeros."""
        text = self.pending + "0" * (-len(self.pending) % 8)
        self.data += bytes(int(text[i : i + 8][::-1], 2) for i in range(0, len(text), 8))
        self.pending = ""


# Model


def write_model(w: Writer, m: Model) -> None:
    """Write a chunk's model."""
    used = [c for c in range(CLASSES) if m.code[c]]
    low, high = used[0], used[-1]
    w.bits(m.lowest, 8)
    w.bits(low, 4)
    w.bits(high, 4)
    for c in range(low, high + 1):
        w.bits(m.code[c], 8)
    written = 0
    for c in used:
        if written:
            w.bits(m.value_of[c] < written, 1)
        if m.value_of[c] >= written:
            _write_value_model(w, m.values[m.value_of[c]])
            written += 1
    w.align()


def _write_value_model(w: Writer, v: ValueModel) -> None:
    w.bits(v.mode, 1)
    if v.mode:
        w.bits(v.top, 8)
    last = max(s for s in range(SYMBOLS) if v.frequency[s])
    w.bits(last, 7)
    w.bits(v.rest, 7)
    for s in range(last + 1):
        if s == v.rest:
            continue
        length = v.frequency[s].bit_length()
        w.gamma(length + 1)
        if length:
            kept = min(length - 1, 3)
            w.bits(v.frequency[s] >> (length - 1 - kept) & ((1 << kept) - 1), kept)


# Streams


class Encoder:
    """Writes what :class:`Decoder` reads, the last symbol first: ``puts`` are (start, width, bits) by state."""

    def __init__(self, puts: list[tuple[int, list[tuple[int, int, int]]]]) -> None:
        self.states, words = [LOW, LOW], []
        for turn, parts in reversed(puts):
            for start, width, bits in reversed(parts):
                state = self.states[turn]
                if state >= width << (63 - bits):
                    words.append(state % (1 << 32))
                    state >>= 32
                self.states[turn] = (state // width << bits) + state % width + start
        self.words = words[::-1]


def encode_positions(base: list[int], new: list[int], model: Model, lane: list[int]) -> list[tuple[int, int]]:
    """The events of a lane: (start, width)."""
    events: list[tuple[int, int]] = []
    last, hazard = 0, 0
    for i in lane:
        further = hazard + model.hazard(base[i])
        if further > LIMIT:
            events.append((0, survival(hazard)))
            hazard, further = 0, further - hazard
        if base[i] != new[i]:
            events.append((survival(further), survival(hazard) - survival(further)))
            last, further = len(events), 0
        hazard = further
    return events[:last]


def encode_value(old: int, new: int, model: Model) -> list[tuple[int, int, int]]:
    """The puts of a new value, in the order in which they are read."""
    f, v = model.fields, model.value_model(old)
    if v.mode == 0:
        falls, m = step_of(old, new, f)
        s = step_symbol(m)
        smallest, raw = step_range(s)
        puts = [((falls << TOTAL_BITS) + v.start(s), v.frequency[s], TOTAL_BITS + 1)]
        return puts + ([(m - smallest, 1, raw)] if raw else [])
    s = exponent_symbol(old, new, v.top, f)
    puts = [(v.start(s), v.frequency[s], TOTAL_BITS)]
    if s == ESCAPE:
        half = f.width // 2
        return [*puts, (new % (1 << half), 1, half), (new >> half, 1, half)]
    return [*puts, (new % (1 << f.mantissa), 1, f.mantissa)]


def step_of(old: int, new: int, f: Fields) -> tuple[int, int]:
    """Direction and magnitude - 1 of a step, the shorter way round."""
    step = (f.ordered(new) - f.ordered(old)) % (1 << f.width)
    falls = step >> (f.width - 1)
    return falls, (-step % (1 << f.width) if falls else step) - 1


def exponent_symbol(old: int, new: int, top: int, f: Fields) -> int:
    """Symbol of a new value in mode exponent."""
    s = 2 * (top - f.key(new)) + (old >> (f.width - 1) ^ new >> (f.width - 1))
    return s if f.key(new) <= top and s < ESCAPE else ESCAPE


# What the encoder chooses


def choose_hazards(sample: Sample, model: Model) -> None:
    """Set ``lowest`` and ``code``."""
    exponents = 1 << model.fields.exponent
    seen, changed = sample.seen.tolist(), sample.changed.tolist()
    if exponents > CLASSES:
        costs = []
        for lowest in range(exponents - CLASSES + 1):
            cuts = [0, *range(lowest + 1, lowest + CLASSES), exponents]
            spans = list(pairwise(cuts))
            costs.append(sum(choice_cost(sum(changed[a:b]), sum(seen[a:b])) for a, b in spans))
        most = min(costs) + (min(costs) >> 11)
        model.lowest = next(i for i, cost in enumerate(costs) if cost <= most)
    for c in range(CLASSES):
        mine = [e for e in range(exponents) if model.class_of(e << model.fields.mantissa) == c]
        k, n = sum(changed[e] for e in mine), sum(seen[e] for e in mine)
        model.code[c] = 0 if sample.stride == 1 and not k else code_for(k, n)


def code_for(k: int, n: int) -> int:
    """The code whose probability of change is nearest to (8k + 1) / (8n + 8)."""
    for code in range(1, CODES - 1):
        nearer = (2 << CHANCE_BITS) - survival(hazard_of(code)) - survival(hazard_of(code + 1))
        if (8 * n + 8) * nearer >= (8 * k + 1) << CHANCE_BITS + 1:
            return code
    return CODES - 1


@dataclass
class Candidate:
    """A value model in the making: how often each symbol occurs."""

    mode: int
    width: int
    mantissa: int
    top: int = 0
    count: list[int] = field(default_factory=lambda: [0] * SYMBOLS)

    def cost(self) -> int:
        """Bits, in units of 2^-32, the model's own roughly included."""
        total = log2(sum(self.count))
        bits, cost = 16, 0
        for s, k in enumerate(self.count):
            bits += 9 if k else 1
            if k:
                cost += k * (total - log2(k))
                raw = 1 + step_range(s)[1] if not self.mode else self.width if s == ESCAPE else self.mantissa
                bits += k * raw
        return cost + (bits << 32)


def choose_values(changes: list[tuple[int, int]], model: Model) -> None:
    """Set ``values`` and ``value_of`` from the (old, new) of all changed weights."""
    chosen: list[Candidate] = []
    for c in range(CLASSES):
        mine = [(old, new) for old, new in changes if model.class_of(old) == c]
        if mine:
            own = _candidate(mine, model.fields)
            joint = None
            if chosen and chosen[-1].mode == own.mode == 0:
                both = [a + b for a, b in zip(chosen[-1].count, own.count, strict=True)]
                joint = Candidate(0, own.width, own.mantissa, count=both)
            if joint and joint.cost() <= chosen[-1].cost() + own.cost():
                chosen[-1] = joint
            else:
                chosen.append(own)
        model.value_of[c] = max(len(chosen) - 1, 0)
    model.values = [normalise(c) for c in chosen]


def _candidate(changes: list[tuple[int, int]], f: Fields) -> Candidate:
    steps = Candidate(0, f.width, f.mantissa)
    for old, new in changes:
        steps.count[step_symbol(step_of(old, new, f)[1])] += 1
    if len(changes) <= 8 or sum(steps.count[4:]) * 8 <= len(changes):
        return steps
    exponents = Candidate(1, f.width, f.mantissa, top=max(f.key(new) for _, new in changes))
    for old, new in changes:
        exponents.count[exponent_symbol(old, new, exponents.top, f)] += 1
    return min(steps, exponents, key=Candidate.cost)


def normalise(c: Candidate) -> ValueModel:
    """Frequencies of 2^12 in all, in four significant bits but for the most frequent symbol, which takes the rest."""
    total, rest = sum(c.count), c.count.index(max(c.count))
    for half in (1, 0):
        v = ValueModel(c.mode, c.top, rest)
        for s, k in enumerate(c.count):
            if k and s != rest:
                f = max(1, (k << TOTAL_BITS) // total)
                drop = max(0, f.bit_length() - 4)
                v.frequency[s] = (f + (half << drop >> 1)) >> drop << drop
        v.frequency[rest] = (1 << TOTAL_BITS) - sum(v.frequency)
        if v.frequency[rest] > 0:
            break
    return v


# Chunks and bodies


def encode_chunk(base: list[int], new: list[int], sample: Sample, fields: Fields) -> bytes:
    """One chunk."""
    changes = [(old, now) for old, now in zip(base, new, strict=True) if old != now]
    model = Model(fields)
    if changes:
        choose_hazards(sample, model)
        choose_values(changes, model)
    return write_chunk(base, new, model)


def write_chunk(base: list[int], new: list[int], model: Model) -> bytes:
    """One chunk by a model in which every change has a hazard, and its symbol a frequency."""
    changed = [i for i in range(len(base)) if base[i] != new[i]]
    w = Writer()
    lanes = lanes_of(len(base))[: 1 + (len(base) > SEGMENT)]
    counts = [sum(base[i] != new[i] for i in lane) for lane in lanes]
    for n in counts:
        w.varint(n)
    if not changed:
        return bytes(w.data)
    write_model(w, model)
    streams = []
    for lane in lanes:
        events = encode_positions(base, new, model, lane)
        streams.append(Encoder([(i % 2, [(*event, CHANCE_BITS)]) for i, event in enumerate(events)]))
    values = [encode_value(base[i], new[i], model) for i in changed]
    streams.append(Encoder([(i % 2, puts) for i, puts in enumerate(values)]))
    for n, stream in zip([*counts, 0], streams, strict=True):
        is_lane = stream is not streams[-1]
        if is_lane and not n:
            continue
        for state in stream.states:
            w.varint(state - LOW)
        if is_lane:
            w.varint(len(stream.words))
    words = [word for stream in streams for word in stream.words]
    return bytes(w.data) + np.array(words, "<u4").tobytes()


def encode(base: Array, new: Array, fields: Fields, *, chunk_log2: int | None = None) -> bytes:
    """The body of ``base`` -> ``new``, in the chunks that the native encoder takes unless told otherwise."""
    log = choose_chunk(base, new, fields) if chunk_log2 is None else chunk_log2
    size = 1 << log
    chunks = []
    for i in range(0, base.size, size):
        n = min(size, base.size - i)
        sample = take_sample(base, new, i, n, sample_stride(n), fields)
        chunks.append(encode_chunk(base[i : i + n].tolist(), new[i : i + n].tolist(), sample, fields))
    return join_chunks(log, chunks)


def join_chunks(chunk_log2: int, chunks: list[bytes]) -> bytes:
    """The body of these chunks, each of 2^chunk_log2 weights but the last."""
    w = Writer()
    for chunk in chunks[:-1]:
        w.varint(len(chunk))
    return bytes([0, chunk_log2]) + bytes(w.data) + b"".join(chunks)

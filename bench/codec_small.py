"""What many small tensors cost over one large one of the same weights: size, and CPU time with digests.

"As groups" is what agents do (weight_store/grouping.py); the other two are for comparison.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import codec
from weightcast.measure import iid
from weightcast.measure.cases import in_small_tensors
from weightcast.measure.pairs import Group, Pair, groups

COUNT = 1 << 26
"""Weights: 128 MiB."""
MOST_SIZE, MOST_TIME = 1.03, 1.20


@dataclass(frozen=True)
class Row:
    """One arrangement of the same weights. Ratios are to one tensor, in groups as agents make them."""

    name: str
    parts: int
    size_bytes: int
    size_ratio: float
    encode_gbps: float
    encode_ratio: float
    decode_gbps: float
    decode_ratio: float


@dataclass(frozen=True)
class Arrangement:
    """A way to code the weights: encodes to frames or payloads, then decodes them, in place and verified."""

    name: str
    parts: int
    encode: Callable[[], tuple[int, object]]
    decode: Callable[[Any], object]


def rows(rounds: int) -> Iterator[Row]:
    """All arrangements at two learning rates, taking turns."""
    for lr in (1e-7, 1e-6):
        drawn = iid.generate(lr, "BF16", COUNT, seed=1).pair
        small = list(in_small_tensors(drawn))
        yield from measure(
            [
                in_groups(f"lr {lr:g}: one tensor of {COUNT >> 19} MiB", groups([drawn])),
                in_groups("1 MiB tensors, norms and biases, as groups", groups(small)),
                in_groups("each a group", [Group(pair.dtype, pair.base, pair.new) for pair in small]),
                in_frames("each a stand-alone frame", small),
            ],
            2 * COUNT,
            rounds,
        )


def in_groups(name: str, joined: Sequence[Group]) -> Arrangement:
    """Groups, 16 bytes of digest each."""
    work = [group.base.copy() for group in joined]

    def encode() -> tuple[int, object]:
        coded = [codec.encode_group(group.base, group.new, group.dtype) for group in joined]
        return sum(len(one.payload) + len(one.digest) for one in coded), coded

    def decode(coded: list[codec.EncodedGroup]) -> None:
        for group, one, bits in zip(joined, coded, work, strict=True):
            change = codec.decode_group(group.base, one.payload, group.dtype, bits.size)
            if change.digest != one.digest:
                raise SystemExit(f"{name}: the result is wrong")
            codec.apply_change(bits, change)

    return Arrangement(name, len(joined), encode, decode)


def in_frames(name: str, pairs: Sequence[Pair]) -> Arrangement:
    """Stand-alone frames. Each is decoded into a copy of its base, and the copy is in the time."""

    def encode() -> tuple[int, object]:
        frames = [codec.encode_delta(pair.base, pair.new, dtype=pair.dtype) for pair in pairs]
        return sum(map(len, frames)), frames

    def decode(frames: list[bytes]) -> None:
        for pair, frame in zip(pairs, frames, strict=True):
            codec.apply_delta(pair.base.copy(), frame)

    return Arrangement(name, len(pairs), encode, decode)


def measure(arrangements: Sequence[Arrangement], nbytes: int, rounds: int) -> Iterator[Row]:
    """The least CPU time of each; the first is what the others are compared with."""
    sizes = [0] * len(arrangements)
    best = [[math.inf, math.inf] for _ in arrangements]
    for _ in range(rounds):
        for i, one in enumerate(arrangements):
            start = time.process_time()
            sizes[i], coded = one.encode()
            middle = time.process_time()
            one.decode(coded)
            best[i] = [min(best[i][0], middle - start), min(best[i][1], time.process_time() - middle)]
    for one, size, (encode, decode) in zip(arrangements, sizes, best, strict=True):
        yield Row(
            one.name,
            one.parts,
            size,
            size / sizes[0],
            nbytes / encode / 1e9,
            encode / best[0][0],
            nbytes / decode / 1e9,
            decode / best[0][1],
        )


def table(measured: Sequence[Row]) -> str:
    """Markdown; wanted are at most 3 % more bytes and 20 % more time, as groups."""
    columns = [
        "the same weights as",
        "parts",
        "bytes",
        "to one",
        "encode GB/s",
        "time to one",
        "decode GB/s",
        "time to one",
    ]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in measured:
        promised = "as groups" in row.name
        ratios = (row.size_ratio, MOST_SIZE), (row.encode_ratio, MOST_TIME), (row.decode_ratio, MOST_TIME)
        size, encode, decode = (f"{r:.3f}{' MISSED' if promised and r > most else ''}" for r, most in ratios)
        lines.append(
            f"| {row.name} | {row.parts} | {row.size_bytes} | {size} | {row.encode_gbps:.2f} | {encode}"
            f" | {row.decode_gbps:.2f} | {decode} |"
        )
    return "\n".join(lines)

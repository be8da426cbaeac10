"""What a second core gains, by wall clock: pieces side by side, and one large piece whose chunks are.

With one core the process is pinned to one (Linux). Memory is shared by the cores: what memcpy and XXH3 themselves gain
from a second one is printed beside, and is about all that a coder at memory speed can gain. Pieces small enough to stay
in the caches show what the coder gains where memory is not in the way. CPU time shows what two cores cost each other,
and tells something even where the machine has other work.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

import codec
from codec._native import Digests
from codec.dtypes import Bits
from codec.group import decode_fed, encode_payload
from codec.header import chunks_of
from weightcast.measure import iid
from weightcast.measure.timing import one_thread

COUNT = 1 << 26
"""Weights: 128 MiB, four chunks or eight pieces."""
PIECES = 8
CACHED = 1 << 20
"""Weights of a piece that stays in the caches: 4 MiB with its base, done again and again."""
WANTED = 1.8


@dataclass(frozen=True)
class Row:
    """One piece of work. Speeds are GB/s of BF16 bytes by wall clock."""

    name: str
    one_gbps: float
    two_gbps: float
    cpu_growth: float
    """CPU seconds on two cores over those on one, for the same work."""

    @property
    def ratio(self) -> float:
        """How much faster two cores are."""
        return self.two_gbps / self.one_gbps


def rows(rounds: int) -> Iterator[Row]:
    """memcpy and XXH3 first: what the machine itself gains."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit("two cores are needed to compare one with two")
    with one_thread():
        yield Row("memcpy", *speeds(copying(), cores, rounds))
        yield Row("XXH3-128 of two arrays", *speeds(hashing(), cores, rounds))
        for lr in (1e-7, 1e-6):
            drawn = iid.generate(lr, "BF16", COUNT, seed=3).pair
            for name, work in works(drawn.base, drawn.new).items():
                yield Row(f"lr {lr:g}: {name}", *speeds(work, cores, rounds))


def works(base: Bits, new: Bits) -> dict[str, Callable[[], object]]:
    """Name -> work on all cores that the process may use."""
    cuts = [slice(at, at + COUNT // PIECES) for at in range(0, COUNT, COUNT // PIECES)]
    chunks = chunks_of(COUNT)
    payloads = [encode_payload(base[chunk], new[chunk], "BF16")[0] for chunk in chunks]
    undigested = Digests(base=False, result=False)
    frame = codec.encode_delta(base, new, dtype="BF16")
    coded = [codec.encode_group(base[cut], new[cut], "BF16") for cut in cuts]
    cached = [codec.encode_group(base[cut][:CACHED], new[cut][:CACHED], "BF16") for cut in cuts]
    full = codec.encode_delta(new, base, dtype="BF16")  # back again, so that a round of apply ends where it began
    buffer = base.copy()

    def there_and_back() -> None:
        codec.apply_delta(buffer, frame)
        codec.apply_delta(buffer, full)

    def encode(cut: slice) -> object:
        return codec.encode_group(base[cut], new[cut], "BF16")

    def decode(i: int) -> object:
        return codec.decode_group(base[cuts[i]], coded[i].payload, "BF16", COUNT // PIECES)

    def encode_again(cut: slice) -> None:
        small = slice(cut.start, cut.start + CACHED)
        for _ in range((cut.stop - cut.start) // CACHED):
            codec.encode_group(base[small], new[small], "BF16")

    def decode_again(i: int) -> None:
        small = slice(cuts[i].start, cuts[i].start + CACHED)
        for _ in range((cuts[i].stop - cuts[i].start) // CACHED):
            codec.decode_group(base[small], cached[i].payload, "BF16", CACHED)

    def encode_chunk(chunk: slice) -> object:
        return encode_payload(base[chunk], new[chunk], "BF16")

    def decode_chunk(i: int) -> object:
        chunk = chunks[i]
        return decode_fed(base[chunk], payloads[i], "BF16", chunk.stop - chunk.start, undigested)

    return {
        "chunks of one piece, encoded": lambda: on_all_cores(encode_chunk, chunks),
        "chunks of one piece, decoded": lambda: on_all_cores(decode_chunk, range(len(chunks))),
        "one piece, encode_delta": lambda: codec.encode_delta(base, new, dtype="BF16"),
        "one piece, apply_delta and back": there_and_back,
        "pieces, encode_group": lambda: on_all_cores(encode, cuts),
        "pieces, decode_group": lambda: on_all_cores(decode, range(PIECES)),
        "pieces in the caches, encode_group": lambda: on_all_cores(encode_again, cuts),
        "pieces in the caches, decode_group": lambda: on_all_cores(decode_again, range(PIECES)),
    }


def copying() -> Callable[[], object]:
    """Halves of an array, as many at a time as there are cores."""
    source = np.arange(COUNT, dtype=np.uint16)
    target = np.empty_like(source)
    parts = list(zip(np.split(target, PIECES), np.split(source, PIECES), strict=True))
    return lambda: on_all_cores(lambda pair: np.copyto(*pair), parts)


def hashing() -> Callable[[], object]:
    """XXH3 is serial within one array."""
    halves = np.split(np.arange(COUNT, dtype=np.uint16), 2)
    return lambda: on_all_cores(codec.digest, halves)


def on_all_cores(work: Callable[..., object], jobs: Sequence[object]) -> None:
    """``work`` for each job, in as many threads as the process may use cores."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(work, jobs))


def speeds(work: Callable[[], object], cores: Sequence[int], rounds: int) -> tuple[float, float, float]:
    """GB/s with the first core and with both, and the growth of CPU time; the best of ``rounds`` taken in turns.

    Threads inherit the pinning.
    """
    allowed = os.sched_getaffinity(0)
    best, cpu = [math.inf, math.inf], [math.inf, math.inf]
    try:
        for _ in range(rounds):
            for i, some in enumerate((cores[:1], cores)):
                os.sched_setaffinity(0, some)
                start, cpu_start = time.perf_counter(), time.process_time()
                work()
                best[i] = min(best[i], time.perf_counter() - start)
                cpu[i] = min(cpu[i], time.process_time() - cpu_start)
    finally:
        os.sched_setaffinity(0, allowed)
    return 2 * COUNT / best[0] / 1e9, 2 * COUNT / best[1] / 1e9, cpu[1] / cpu[0]


def table(measured: Sequence[Row]) -> str:
    """Markdown; ``measured`` begins with memcpy and XXH3."""
    copy, xxh3 = measured[:2]
    lines = [
        "| work | one core GB/s | two cores GB/s | two to one | memcpy's | XXH3's | CPU time |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in measured:
        missed = f" MISSED (wanted {WANTED})" if row not in (copy, xxh3) and row.ratio < WANTED else ""
        lines.append(
            f"| {row.name} | {row.one_gbps:.2f} | {row.two_gbps:.2f} | {row.ratio:.2f}{missed}"
            f" | {copy.ratio:.2f} | {xxh3.ratio:.2f} | x {row.cpu_growth:.2f} |"
        )
    return "\n".join(lines)

"""What a second core gains, by wall clock: pieces side by side, and one large piece whose chunks are.

With one core the process is pinned to one (Linux). Each time on two cores is set against those on one just before and
just after it, and the median of these ratios is reported: between the best times of a whole run lie other clock speeds
and, on a virtual machine, other neighbours.

What the machine calls two cores may be less: two threads of one core, or cores with busy neighbours. So beside each
time stands that of arithmetic that needs no memory at all (SHA-256 again and again, in registers); what the second core
is worth to it is what there was to gain in that round. Rounds in which it gains next to all of a core are reported on
their own. Memory is shared by the cores as well: what memcpy and XXH3 gain is printed too, and pieces small enough to
stay in the caches are measured. How busy two cores are kept, and whether the same work costs more CPU time there,
tells threads that wait for each other from cores that hold each other up.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import NamedTuple

import numpy as np

import codec
from codec._native import Digests
from codec.dtypes import Bits
from codec.group import decode_fed, encode_payload
from codec.header import chunks_of
from weightcast.measure import iid
from weightcast.measure.timing import one_thread

COUNT = 1 << 27
"""Weights: 256 MiB, eight chunks or sixteen pieces."""
PIECES = 16
CACHED = 1 << 20
"""Weights of a piece that stays in the caches: 4 MiB with its base, done again and again."""
WANTED = 1.8
GIVEN = 1.85
"""What arithmetic in registers has to gain in a round for the machine to have had two cores then."""
CONTROL_ROUNDS = 20_000
"""Of SHA-256, in each of eight parts: some 10 ms each."""


@dataclass(frozen=True)
class Row:
    """One piece of work. Speeds are GB/s of BF16 bytes by wall clock; all but ``ratios`` are medians of the rounds."""

    name: str
    one_gbps: float
    two_gbps: float
    ratios: tuple[float, float, float]
    """How much faster two cores are: the quartiles of the rounds."""
    control: float
    """How much faster arithmetic in registers was on two cores, in the same rounds."""
    given: int
    """In how many rounds that was at least ``GIVEN``."""
    given_ratio: float | None
    """The median of the ratios in those rounds."""
    cpu_growth: float
    """CPU seconds on two cores over those on one, for the same work."""
    busy: float
    """CPU seconds on two cores over the wall clock there: how many cores were at work."""

    @property
    def ratio(self) -> float:
        """The median of ``ratios``."""
        return self.ratios[1]


def rows(rounds: int) -> Iterator[Row]:
    """memcpy and XXH3 first: what the machine itself gains."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit("two cores are needed to compare one with two")
    with one_thread():
        yield compare("memcpy", copying(), cores, rounds)
        yield compare("XXH3-128 of two arrays", hashing(), cores, rounds)
        for lr in (1e-7, 1e-6):
            drawn = iid.generate(lr, "BF16", COUNT, seed=3).pair
            for name, work in works(drawn.base, drawn.new).items():
                yield compare(f"lr {lr:g}: {name}", work, cores, rounds)


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


def control() -> None:
    """Arithmetic that stays in registers, in all threads; the standard library releases the GIL for it."""
    part = partial(hashlib.pbkdf2_hmac, "sha256", b"control", iterations=CONTROL_ROUNDS)
    on_all_cores(part, [bytes([i]) for i in range(8)])


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
        for _ in pool.map(work, jobs):
            pass  # results are let go, as whoever stores or sends them does


def compare(name: str, work: Callable[[], object], cores: Sequence[int], rounds: int) -> Row:
    """``work`` on one core, on both, and on the other one, ``rounds`` times. Threads inherit the pinning."""
    allowed = os.sched_getaffinity(0)
    try:
        found = [[sample(work, some) for some in (cores[:1], cores, cores[1:])] for _ in range(rounds + 1)][1:]
    finally:
        os.sched_setaffinity(0, allowed)
    ratios = [gain([of.work.wall_s for of in round_]) for round_ in found]
    controls = [gain([of.control_s for of in round_]) for round_ in found]
    given = [ratio for ratio, of_control in zip(ratios, controls, strict=True) if of_control >= GIVEN]
    low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75)).tolist()
    gigabytes = 2 * COUNT / 1e9
    return Row(
        name,
        gigabytes / median(round_[0].work.wall_s for round_ in found),
        gigabytes / median(round_[1].work.wall_s for round_ in found),
        (low, middle, high),
        median(controls),
        len(given),
        median(given) if given else None,
        1 / median(gain([of.work.cpu_s for of in round_]) for round_ in found),
        median(round_[1].work.cpu_s / round_[1].work.wall_s for round_ in found),
    )


def gain(times: Sequence[float]) -> float:
    """Times on one core, on two, and on one again -> how much faster two are."""
    before, both, after = times
    return fmean((before, after)) / both


class Times(NamedTuple):
    """Of one call, in seconds."""

    wall_s: float
    cpu_s: float


class Sample(NamedTuple):
    """Work, and the control just before and after it, in seconds."""

    work: Times
    control_s: float


def sample(work: Callable[[], object], cores: Sequence[int]) -> Sample:
    """Run ``work`` on these cores, between two controls."""
    before = timed(control, cores).wall_s
    of_work = timed(work, cores)
    return Sample(of_work, fmean((before, timed(control, cores).wall_s)))


def timed(work: Callable[[], object], cores: Sequence[int]) -> Times:
    """Run ``work`` on these cores."""
    os.sched_setaffinity(0, cores)
    start_s, cpu_s = time.perf_counter(), time.process_time()
    work()
    return Times(time.perf_counter() - start_s, time.process_time() - cpu_s)


def table(measured: Sequence[Row]) -> str:
    """Markdown; ``measured`` begins with memcpy and XXH3."""
    columns = ["work", "one core GB/s", "two cores GB/s", "two to one (quartiles)", "registers"]
    columns += [f"two to one where registers gain {GIVEN} (rounds)", "CPU time", "cores busy"]
    lines = [f"| {' | '.join(columns)} |", "|---|" + "---:|" * (len(columns) - 1)]
    for row in measured:
        low, middle, high = row.ratios
        of_given = "none" if row.given_ratio is None else f"{row.given_ratio:.2f} ({row.given})"
        missed = row not in measured[:2] and (row.ratio if row.given_ratio is None else row.given_ratio) < WANTED
        lines.append(
            f"| {row.name} | {row.one_gbps:.2f} | {row.two_gbps:.2f} | {middle:.2f} ({low:.2f} to {high:.2f})"
            f" | {row.control:.2f} | {of_given}{f' MISSED (wanted {WANTED})' if missed else ''}"
            f" | x {row.cpu_growth:.2f} | {row.busy:.2f} |"
        )
    return "\n".join(lines)

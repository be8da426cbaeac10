"""One run of the benchmark: every coder on every delta, checked bit for bit, beside memcpy, XXH3-128 and the floor."""

from __future__ import annotations

import contextlib
import platform
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np

from codec.digest import digest
from weightcast.measure.coders import AUTO, LAYOUTS, OURS, Coded, Coder, Delta
from weightcast.measure.errors import MeasureError
from weightcast.measure.pairs import Pair, groups
from weightcast.measure.peers import PEERS
from weightcast.measure.steps import memoryless_bits
from weightcast.measure.timing import Budget, best_of, one_thread

PACKAGES = ("weightcast", "numpy", "torch", "zstandard", "xxhash", "fireworks-delta-compression", "basilica-sdk")


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A delta to measure. ``floor_bytes`` is the exact entropy where it is known; else it is estimated."""

    name: str
    pairs: Sequence[Pair]
    floor_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One coder on one delta. Either ``note`` says why there is nothing, or sizes and speeds are there.

    Speeds are GB (10^9 bytes) of new weights a second of CPU time; ``*_bare_gbps`` are those without the time that
    one XXH3-128 of the new weights takes, for coders that compute it.
    """

    coder: str
    note: str | None = None
    size_bytes: int | None = None
    percent: float | None = None
    bits_per_change: float | None = None
    encode_gbps: float | None = None
    decode_gbps: float | None = None
    encode_bare_gbps: float | None = None
    decode_bare_gbps: float | None = None


@dataclass(frozen=True, slots=True)
class CaseResult:
    """All rows of one delta, and its limits: memcpy and XXH3-128 of its new weights, and the floor of its size."""

    name: str
    dtypes: tuple[str, ...]
    tensors: int
    elements: int
    raw_bytes: int
    changed: int
    floor_bytes: float
    floor: str
    memcpy_gbps: float
    xxh3_gbps: float
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """The whole run: on what, and what came out."""

    processor: str
    python: str
    versions: dict[str, str | None]
    cases: tuple[CaseResult, ...]


def run(cases: Iterable[Case], *, budget: Budget | None = None, progress: Callable[[str], object] = len) -> Report:
    """Measure every coder on every case; ``progress`` hears what comes next.

    Raises :class:`MeasureError` if a coder does not reproduce the new bits.
    """
    with one_thread(), warnings.catch_warnings():
        # What one of the peers provokes in torch, for every tensor.
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        results = [_case(case, budget or Budget(), progress) for case in cases]
    return Report(_processor(), platform.python_version(), dict(_versions()), tuple(results))


def _case(case: Case, budget: Budget, progress: Callable[[str], object]) -> CaseResult:
    delta = Delta(case.pairs, groups(case.pairs))
    raw = sum(pair.nbytes for pair in case.pairs)
    changed = sum(int(np.count_nonzero(pair.base != pair.new)) for pair in case.pairs)
    hash_s = _hash_s(delta, budget)
    copy_s = _copy_s(delta, budget)
    is_bf16 = delta.dtypes <= {"BF16"}
    rows = []
    for coder in (*(() if is_bf16 else (AUTO,)), *OURS, *PEERS, *LAYOUTS):
        progress(f"{case.name}: {coder.name}")
        rows.append(_row(coder, delta, raw, changed, hash_s, budget))
    floor, kind = case.floor_bytes, "exact"
    if floor is None:
        floor, kind = sum(memoryless_bits(g.base, g.new, g.dtype) for g in delta.groups) / 8, "empirical"
    return CaseResult(
        name=case.name,
        dtypes=tuple(sorted(delta.dtypes)),
        tensors=len(case.pairs),
        elements=sum(pair.new.size for pair in case.pairs),
        raw_bytes=raw,
        changed=changed,
        floor_bytes=floor,
        floor=kind,
        memcpy_gbps=raw / copy_s / 1e9,
        xxh3_gbps=raw / hash_s / 1e9,
        rows=tuple(rows),
    )


def _row(coder: Coder, delta: Delta, raw: int, changed: int, hash_s: float, budget: Budget) -> Row:
    refusal = coder.refusal(delta)
    if refusal is not None:
        return Row(coder.name, refusal)
    encoded = best_of(lambda state: coder.encode(delta, state), lambda: coder.before_encode(delta), _smaller, budget)
    coded = coder.smallest(delta, encoded.result)
    decoded = best_of(
        lambda state: coder.decode(delta, coded, state), lambda: coder.before_decode(delta), _never, budget
    )
    if not all(np.array_equal(new, found) for new, found in coder.decoded(delta, decoded.result)):
        raise MeasureError(f"{coder.name} does not reproduce the new weights")
    hashed = hash_s if coder.hashes else 0.0
    return Row(
        coder.name,
        size_bytes=coded.size,
        percent=100 * coded.size / raw,
        bits_per_change=8 * coded.size / changed if changed else None,
        encode_gbps=_gbps(raw, encoded.cpu_s),
        decode_gbps=_gbps(raw, decoded.cpu_s),
        encode_bare_gbps=_gbps(raw, encoded.cpu_s - hashed),
        decode_bare_gbps=_gbps(raw, decoded.cpu_s - hashed),
    )


def _smaller(candidate: Coded, kept: Coded) -> bool:
    """Should a size differ from call to call, as that of ARCv3 does, everybody gets their best."""
    return candidate.size < kept.size


def _never(candidate: object, kept: object) -> bool:
    return False


def _gbps(size: int, seconds: float) -> float | None:
    """None where so little is left to measure that a rate would be noise."""
    return size / seconds / 1e9 if seconds > 1e-7 else None


def _hash_s(delta: Delta, budget: Budget) -> float:
    def hash_all(_: None) -> None:
        for group in delta.groups:
            digest(group.new)

    return max(best_of(hash_all, lambda: None, _never, budget).cpu_s, 1e-9)


def _copy_s(delta: Delta, budget: Budget) -> float:
    copies = [np.zeros_like(group.new) for group in delta.groups]

    def copy_all(_: None) -> None:
        for group, copy in zip(delta.groups, copies, strict=True):
            np.copyto(copy, group.new)

    return max(best_of(copy_all, lambda: None, _never, budget).cpu_s, 1e-9)


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _versions() -> Iterator[tuple[str, str | None]]:
    for name in PACKAGES:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            yield name, None

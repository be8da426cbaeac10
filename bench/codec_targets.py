"""How ulp_v1 stands against its targets: ``python -m bench.codec_targets DELTAS [--json]``.

DELTAS is a folder of real deltas: ``base.safetensors`` and, for each regime, ``<regime>/stepNNN.safetensors`` with
``<tensor>.index`` (int32, flat) and ``<tensor>.bits`` (int16), what changed since the step before. Without one only
generated deltas are measured. Times are CPU seconds of one thread, the least of several rounds in which memcpy takes
turns with the coder; the digest that decoding computes along the way is left out and shown on its own. After that
comes what many small tensors cost over one (``--only small``), and what a second core gains (``--only threads``): wall
clock, so only on a machine that has nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from bench import codec_small, codec_threads
from codec import _native, digest, ulp

Bits = NDArray[np.uint16]

ROUNDS = 9
IID_N = 1 << 24


@dataclass(frozen=True)
class Target:
    """Largest size in per cent of BF16, least speeds as shares of memcpy."""

    percent: float
    encode: float
    decode: float


# Sizes of peers in per cent of BF16 on the same tensors (ARCv3, PULSEPT1 v3), and the factors wanted.
REAL = {
    ("steady", 4): Target(min(0.39 * 0.321, 0.66 * 0.1858), 0.40, 0.50),
    ("steady", 7): Target(min(0.39 * 0.272, 0.66 * 0.1636), 0.40, 0.50),
    ("early", 4): Target(min(0.22 * 0.196, 0.49 * 0.0886), 0.40, 0.50),
    ("pure", 4): Target(min(0.165 * 0.129, 0.37 * 0.0562), 0.40, 0.50),
    ("pure", 7): Target(min(0.165 * 0.118, 0.37 * 0.0505), 0.40, 0.50),
}
IID = {1e-7: (0.35, 0.50), 1e-6: (0.16, 0.20), 3e-6: (0.09, 0.10)}


@dataclass(frozen=True)
class Row:
    """One delta measured. Speeds in GB/s of BF16 bytes."""

    name: str
    changed_percent: float
    percent: float
    bits_per_change: float
    encode: float
    decode: float
    decode_with_digest: float
    xxh3: float
    memcpy: float
    target: Target

    @property
    def verdicts(self) -> tuple[bool, bool, bool]:
        """Whether size, encode and decode meet their targets."""
        target = self.target
        encode, decode = self.encode / self.memcpy, self.decode / self.memcpy
        return self.percent <= target.percent, encode >= target.encode, decode >= target.decode


def least(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The least CPU seconds of each call; the calls take turns, so that all see the same machine."""
    best = dict.fromkeys(calls, math.inf)
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.thread_time()
            call()
            best[name] = min(best[name], time.thread_time() - start)
    return best


def measure(name: str, base: Bits, new: Bits, target: Target, rounds: int) -> Row:
    """Code, check and time one delta."""
    coded = ulp.encode_counted(base, new, "BF16")
    body = np.frombuffer(coded.body, np.uint8)
    index, bits, copy = np.empty(coded.changed, np.uint32), np.empty(coded.changed, np.uint16), np.empty_like(base)
    change = ulp.decode(base, coded.body, "BF16", base.size)
    copy[:] = base
    copy[change.index] = change.bits
    if not np.array_equal(copy, new) or change.digest != digest(new):
        raise SystemExit(f"{name}: the result is wrong")

    def decode(wants_digest: bool) -> object:
        return _native.ulp_decode(
            base.view(np.uint8), body, 8, 7, index, bits.view(np.uint8), False, _native.Digests(False, wants_digest)
        )

    seconds = least(
        {
            "memcpy": lambda: np.copyto(copy, new),
            "encode": lambda: ulp.encode_counted(base, new, "BF16"),
            "decode": lambda: decode(False),
            "decode_with_digest": lambda: decode(True),
            "xxh3": lambda: digest(new),
        },
        rounds,
    )
    return Row(
        name,
        100 * coded.changed / base.size,
        100 * len(coded.body) / base.nbytes,
        8 * len(coded.body) / max(1, coded.changed),
        **{key: base.nbytes / s / 1e9 for key, s in seconds.items()},
        target=target,
    )


def checkpoints(folder: Path, regime: str) -> Iterator[tuple[int, Bits]]:
    """(step, all weights one after another) of a regime, step 0 being the base."""
    tensors = {
        name: value.view(np.uint16).reshape(-1) for name, value in load_bits(folder / "base.safetensors").items()
    }
    yield 0, np.concatenate([tensors[name] for name in sorted(tensors)])
    for file in sorted((folder / regime).glob("step*.safetensors")):
        delta = load_file(file)
        for key, index in delta.items():
            if key.endswith(".index"):
                name = key.removesuffix(".index")
                tensors[name][index] = delta[f"{name}.bits"].view(np.uint16)
        yield int(file.stem.removeprefix("step")), np.concatenate([tensors[name] for name in sorted(tensors)])


def load_bits(file: Path) -> dict[str, NDArray[np.uint16]]:
    """BF16 tensors of a safetensors file as bits: numpy has no BF16, so the header is read here."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    entries = {name: e["data_offsets"] for name, e in json.loads(data[8:start]).items() if name != "__metadata__"}
    return {name: np.frombuffer(data[start + a : start + b], np.uint16).copy() for name, (a, b) in entries.items()}


def bf16(values: NDArray[np.float32]) -> Bits:
    """Round to nearest even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def iid(lr: float, seed: int) -> tuple[Bits, Bits]:
    """w ~ N(0, 0.02), update 0.6 lr clamp(N(0, 1), -1.5, 1.5), both in FP32 and rounded to BF16."""
    rng = np.random.default_rng(seed)
    weights = rng.normal(0, 0.02, IID_N).astype(np.float32)
    update = (0.6 * lr * np.clip(rng.normal(0, 1, IID_N), -1.5, 1.5)).astype(np.float32)
    return bf16(weights), bf16(weights + update)


def iid_floor(lr: float) -> float:
    """Exact H(new | old) of the generator in per cent of BF16 bits, by integrating over every BF16 interval."""
    # The update has mass at both ends; weights are flat over an interval, whose mass comes from the normal density.
    cuts = np.linspace(-1.5, 1.5, 1201)
    erf = np.vectorize(math.erf)
    cdf = 0.5 * (1 + erf(cuts / math.sqrt(2)))
    probability = np.diff(cdf)
    probability[0] += cdf[0]
    probability[-1] += 1 - cdf[-1]
    moves = 0.6 * lr * (cuts[:-1] + cuts[1:]) / 2
    moves[0], moves[-1] = -0.9 * lr, 0.9 * lr
    total = 0.0
    for exponent in range(70, 127):
        ulp_size = 2.0 ** (exponent - 127 - 7)
        edges = 2.0 ** (exponent - 127) * (1 + np.arange(129) / 128)
        mass = 2 * 0.5 * float(np.diff(erf(edges[[0, -1]] / (0.02 * math.sqrt(2))))[0])
        if mass > 0:
            total += mass * conditional_entropy(moves / ulp_size, probability)
    return 100 * total / 16


def conditional_entropy(moves: NDArray[np.float64], probability: NDArray[np.float64]) -> float:
    """H of how many grid points a uniform position moves, ``moves`` being in units of the grid."""
    low = np.floor(moves).astype(np.int64)
    share = moves - low
    steps: dict[int, float] = {}
    for at, part, p in zip(low.tolist(), share.tolist(), probability.tolist(), strict=True):
        steps[at] = steps.get(at, 0.0) + p * (1 - part)
        steps[at + 1] = steps.get(at + 1, 0.0) + p * part
    return -sum(p * math.log2(p) for p in steps.values() if p > 0)


def rows(folder: Path | None, rounds: int) -> Iterator[Row]:
    """All deltas with a target."""
    for regime in ("steady", "early", "pure"):
        before: Bits | None = None
        for step, weights in checkpoints(folder, regime) if folder else ():
            target = REAL.get((regime, step))
            if target and before is not None:
                yield measure(f"{regime} {step - 1}->{step}", before, weights, target, rounds)
            before = weights
    for lr, (encode, decode) in IID.items():
        target = Target(1.01 * iid_floor(lr), encode, decode)
        yield measure(f"i.i.d. lr {lr:g}", *iid(lr, 1), target, rounds)
    same = iid(1e-7, 2)[0]
    yield measure("nothing changed", same, same.copy(), Target(100 * 40 / same.nbytes, 0.5, 0.5), rounds)


PARTS = ("targets", "small", "threads")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("deltas", nargs="?", type=Path)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", choices=PARTS, action="append", help="may be repeated; usually all")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    parts = arguments.only or PARTS
    measured = list(rows(arguments.deltas, arguments.rounds)) if "targets" in parts else []
    small = list(codec_small.rows(arguments.rounds)) if "small" in parts else []
    threads = list(codec_threads.rows(arguments.rounds)) if "threads" in parts else []
    if arguments.json:
        targets = [asdict(row) | {"meets": row.verdicts} for row in measured]
        found = {"targets": targets, "small": list(map(asdict, small)), "threads": list(map(asdict, threads))}
        print(json.dumps(found, indent=1))
        return
    if measured:
        print(table(measured))
    if small:
        print(f"\n{codec_small.table(small)}")
    if threads:
        print(f"\n{codec_threads.table(threads)}")


def table(measured: list[Row]) -> str:
    """Markdown."""
    columns = ["delta", "changed", "% of BF16 (target)", "bits a change", "encode GB/s", "of memcpy", "decode GB/s"]
    columns += ["of memcpy", "with digest", "XXH3", "memcpy"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in measured:
        size, encode, decode = ("" if met else " MISSED" for met in row.verdicts)
        lines.append(
            f"| {row.name} | {row.changed_percent:.3f} % | {row.percent:.4f} ({row.target.percent:.4f}){size}"
            f" | {row.bits_per_change:.2f} | {row.encode:.2f}"
            f" | {row.encode / row.memcpy:.2f} ({row.target.encode}){encode}"
            f" | {row.decode:.2f} | {row.decode / row.memcpy:.2f} ({row.target.decode}){decode}"
            f" | {row.decode_with_digest:.2f} | {row.xxh3:.1f} | {row.memcpy:.1f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()

"""Which deltas a run of the benchmark is about: a user's own, synthetic ones, and a tiny model trained on the spot."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

from weightcast.measure import iid
from weightcast.measure.bench import Case
from weightcast.measure.deltasets import open_delta_set, read_step
from weightcast.measure.errors import MeasureError
from weightcast.measure.pairs import Pair, TensorFiles, read_pairs
from weightcast.measure.training import REGIMES, tiny_pairs

LEARNING_RATES = (1e-7, 1e-6, 3e-6)
OTHER_DTYPES = ("F16", "F32", "F8_E4M3", "F8_E5M2")
USUAL_STEPS = (4, 7)


def synthetic(count: int, seed: int) -> Iterator[Case]:
    """BF16 at three learning rates, as one tensor and as many; then other floats at 1e-6; ``count`` weights each."""
    for lr in LEARNING_RATES:
        name = f"i.i.d. lr {lr:.0e}".replace("e-0", "e-")
        drawn = iid.generate(lr, "BF16", count, seed)
        yield _case(name, drawn)
        yield Case(f"{name}, 1 MiB tensors and norms", list(in_small_tensors(drawn.pair)), iid.floor_bytes(drawn))
    for dtype in OTHER_DTYPES:
        yield _case(f"i.i.d. {dtype} lr 1e-6", iid.generate(1e-6, dtype, count, seed))


def _case(name: str, drawn: iid.Synthetic) -> Case:
    return Case(name, [drawn.pair], iid.floor_bytes(drawn))


def in_small_tensors(pair: Pair) -> Iterator[Pair]:
    """The same weights as layers of eight experts of 1 MiB, two norms and a bias, until they are used up."""
    for name, start, stop in _small_tensors(pair.new.size, (1 << 20) // pair.new.itemsize):
        yield Pair(name, pair.dtype, (stop - start,), pair.base[start:stop], pair.new[start:stop])


def _small_tensors(count: int, expert: int) -> Iterator[tuple[str, int, int]]:
    layer = [("input_layernorm.weight", 4096), ("mlp.gate.bias", 1024), ("post_attention_layernorm.weight", 4096)]
    layer += [(f"mlp.experts.{i}.up_proj.weight", expert) for i in range(8)]
    at = 0
    for number in itertools.count():
        for name, size in layer:
            if at == count:
                return
            start, at = at, min(at + size, count)
            yield f"model.layers.{number}.{name}", start, at


def tiny(seed: int) -> Iterator[Case]:
    """One optimiser step of the tiny policy in each regime."""
    for regime in REGIMES:
        yield Case(f"tiny model, {regime} 1->2", tiny_pairs(regime, step=2, seed=seed))


def delta_set(path: Path, steps: Iterable[int] = ()) -> Iterator[Case]:
    """The named steps of every regime that has them; without names, 4 and 7, or else the last."""
    deltas = open_delta_set(path)
    wanted = sorted(set(steps))
    found = False
    for regime, count in deltas.steps.items():
        chosen = [step for step in wanted or USUAL_STEPS if step <= count] or ([] if wanted else [count])
        for step in chosen:
            found = True
            yield Case(f"{regime} {step - 1}->{step}", read_step(deltas, regime, step))
    if not found:
        raise MeasureError(f"{path} has none of the steps {wanted}; it has {dict(deltas.steps)}")


def checkpoints(base: Path, new: Path, most_bytes: int) -> Case:
    """Two checkpoints of one model, from the first layer until ``most_bytes`` are taken."""
    taken: list[Pair] = []
    held = 0
    with TensorFiles(base) as before, TensorFiles(new) as after:
        for pair in read_pairs(before, after):
            if not pair.new.size:
                continue
            if taken and held + pair.nbytes > most_bytes:
                break
            taken.append(pair)
            held += pair.nbytes
    if not taken:
        raise MeasureError(f"{base} holds no weights")
    return Case(f"{base.name} -> {new.name}", taken)

"""Make real deltas: policy-gradient steps on a small language model, written as a folder that the benchmark reads.

    python -m bench.make_deltas OUT                 SmolLM2-135M, three regimes, 7 steps each: minutes a regime
    python -m bench.make_deltas OUT --tiny          a tiny model that is trained on the spot: seconds, no download
    weightcast bench codec --data OUT

The format is described in weightcast/measure/deltasets.py; the regimes and the optimiser step are in
weightcast/measure/training.py. The model comes out of a PyPI wheel (bench/smollm2.py), so no model hub is needed.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from itertools import islice
from math import prod
from pathlib import Path

from torch import nn

from bench import gguf, smollm2
from weightcast.measure.deltasets import Weights, write_base, write_step
from weightcast.measure.errors import MeasureError
from weightcast.measure.timing import one_thread
from weightcast.measure.training import REGIMES, Sums, Task, Training, tiny_policy, train

LAYERS = "3,21"
ROWS = 6144
CACHE = Path.home() / ".cache" / "weightcast"


def main(arguments: Sequence[str] | None = None) -> int:
    """Make what the command line says; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        with one_thread() if options.tiny else contextlib.nullcontext():
            _make(options)
    except MeasureError as error:
        print(f"make_deltas: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the folder to write; it must not hold deltas yet")
    parser.add_argument("--tiny", action="store_true", help="a tiny model instead of SmolLM2")
    parser.add_argument("--regime", action="append", choices=list(REGIMES), help="may be repeated; usually all")
    parser.add_argument("--steps", type=int, default=7, help="optimiser steps a regime (7)")
    parser.add_argument("--lr", type=float, default=1e-6, help="learning rate of AdamW (1e-6)")
    parser.add_argument("--seed", type=int, default=0, help="of dither, masters, prompts and answers (0)")
    parser.add_argument("--prompts", type=int, default=4, help="prompts a step (4)")
    parser.add_argument("--samples", type=int, default=4, help="answers a prompt (4)")
    parser.add_argument("--layers", default=LAYERS, help=f"layers to write, or 'all' ({LAYERS})")
    parser.add_argument(
        "--rows", type=int, default=ROWS, help=f"first rows of the embedding to write, 0 for all ({ROWS})"
    )
    parser.add_argument("--cache", type=Path, default=CACHE, help=f"where the wheel is kept ({CACHE})")
    return parser


def _make(options: argparse.Namespace) -> None:
    if options.steps < 1 or options.prompts < 1 or options.samples < 2 or not 0 < options.lr < 1:
        raise MeasureError("--steps and --prompts start at 1, --samples at 2, --lr lies between 0 and 1")
    if options.rows < 0 or not 0 <= options.seed < 1 << 32:
        raise MeasureError("--rows starts at 0, --seed lies between 0 and 2**32 - 1")
    if (options.out / "base.safetensors").exists():
        raise MeasureError(f"{options.out} holds deltas already: name another folder")
    layers = None if options.layers == "all" else _numbers(options.layers)
    model, task, note = _tiny(options.seed) if options.tiny else _smollm2(options)
    layers = None if options.tiny else layers
    for regime in options.regime or REGIMES:
        training = Training(regime, options.lr, options.seed, options.prompts, options.samples)
        started = time.monotonic()
        before: Weights | None = None
        for step, weights in enumerate(islice(train(model, task, training), options.steps + 1)):
            after = kept(weights, layers, options.rows)
            if before is None:
                write_base(options.out, after, f"{note}, lr {options.lr:g}, seed {options.seed}")
            else:
                changed = write_step(options.out, regime, step, before, after)
                share = 100 * changed / sum(bits.size for bits in after.bits.values())
                print(f"{regime} step {step}: {share:.4f} % changed, {time.monotonic() - started:.0f} s", flush=True)
            before = after


def kept(weights: Weights, layers: frozenset[int] | None, rows: int) -> Weights:
    """The part of ``weights`` to write: some layers, the first rows of the embedding, everything else."""
    bits, shapes = {}, {}
    for name, array in weights.bits.items():
        parts = name.split(".")
        if layers is not None and "layers" in parts and int(parts[parts.index("layers") + 1]) not in layers:
            continue
        shape = weights.shapes[name]
        if rows and "embed_tokens" in parts:
            shape = (min(rows, shape[0]), *shape[1:])
        bits[name], shapes[name] = array[: prod(shape)].copy(), shape
    return Weights(bits, shapes)


def _numbers(text: str) -> frozenset[int]:
    try:
        return frozenset(map(int, text.split(",")))
    except ValueError:
        raise MeasureError(f"--layers is 'all' or numbers with commas between, not {text!r}") from None


def _tiny(seed: int) -> tuple[nn.Module, Task, str]:
    return tiny_policy(seed), Sums(), "tiny model"


def _smollm2(options: argparse.Namespace) -> tuple[nn.Module, Task, str]:
    try:
        options.cache.mkdir(parents=True, exist_ok=True)
        raw = smollm2.fetch(options.cache)
    except OSError as error:
        raise MeasureError(f"the model cannot be kept in {options.cache}: {error}; name another --cache") from None
    file = gguf.parse(raw)
    return smollm2.load(file, options.seed), smollm2.words(file), "SmolLM2-135M-Instruct, 4-bit grid dithered"


if __name__ == "__main__":
    sys.exit(main())

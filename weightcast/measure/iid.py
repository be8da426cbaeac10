"""Synthetic deltas whose entropy is known: independent weights, independent updates, both rounded.

w ~ N(0, 0.02) in FP32; update = 0.6 lr clamp(N(0, 1), -1.5, 1.5); base = round(w), new = round(w + update). FP8 weights
are scaled first, as trainers do, so that the largest becomes the largest of the type.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import pi, sqrt

import numpy as np
import torch
from numpy.typing import NDArray

import codec
from codec import dtypes
from weightcast.measure.pairs import Pair
from weightcast.measure.steps import ordered

SIGMA = 0.02
_GAIN, _CLAMP = 0.6, 1.5
_TORCH = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}

Floats = NDArray[np.float64]

_NODES = 64  # of the quadrature over the update; 24 already give the same five digits
_FEW, _WIDE = 4, 24  # neighbours that a cell may reach: in small arrays, in larger ones; then the other way pays
_SAMPLED = 512  # of the cells that reach further, in which almost no weight lies, so many are worked out
_TAIL = 2.0**-40  # smaller weights, in units of the scale, are so rare that they cost nothing


@dataclass(frozen=True, slots=True, eq=False)
class Synthetic:
    """One synthetic delta, and the scale its weights were multiplied by."""

    pair: Pair
    lr: float
    scale: float


def generate(lr: float, dtype: str = "BF16", count: int = 1 << 24, seed: int = 0) -> Synthetic:
    """Draw ``count`` weights of ``dtype`` (BF16, F16, F32, F8_E4M3 or F8_E5M2) before and after an update."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(count, generator=generator) * SIGMA
    update = torch.randn(count, generator=generator).clamp_(-_CLAMP, _CLAMP) * (_GAIN * lr)
    scale = 1.0
    if dtypes.find(dtype).item_bytes == 1:
        scale = torch.finfo(_TORCH[dtype]).max / float(weight.abs().max())
    base = codec.to_bits((weight * scale).to(_TORCH[dtype]))
    new = codec.to_bits(((weight + update) * scale).to(_TORCH[dtype]))
    return Synthetic(Pair("weights", dtype, (count,), base, new), lr, scale)


def floor_bits(dtype: str, lr: float, scale: float = 1.0) -> float | None:
    """H(new | base) of the generator in bits a weight, by numerical integration; None for F32, which changes all over.

    No coder that sees one weight at a time can spend less on average.
    """
    if dtype == "F32":
        return None
    grid, edges = _grid(dtype, scale)
    positive = np.flatnonzero(~np.signbit(grid) & (grid < 8 * SIGMA) & (grid > _TAIL))  # the rest is a mirror image
    reach = _GAIN * _CLAMP * lr
    low = np.searchsorted(edges, edges[positive] - reach, side="right") - 1
    high = np.searchsorted(edges, edges[positive + 1] + reach, side="left")
    reached = high - low
    wide = reached > _WIDE
    few = reached <= _FEW
    nodes = _update_nodes(lr)
    narrow_bits = _narrow(edges, positive[few], nodes, _FEW) + _narrow(edges, positive[~few & ~wide], nodes, _WIDE)
    every = max(1, int(wide.sum()) // _SAMPLED)
    chosen = np.flatnonzero(wide)[every // 2 :: every]
    wide_bits = _wide(edges, positive[chosen], low[chosen], high[chosen], lr)
    return 2 * (narrow_bits + every * wide_bits)


def _grid(dtype: str, scale: float) -> tuple[Floats, Floats]:
    """All finite values of ``dtype`` in ascending order, unscaled, and the n + 1 edges between what rounds to them."""
    info = dtypes.find(dtype)
    codes = np.arange(1 << 8 * info.item_bytes, dtype=np.uint64).astype(info.bits)
    values = torch.from_numpy(codes.view(np.uint8)).view(_TORCH[dtype]).double().numpy() / scale
    values = values[np.argsort(ordered(codes), kind="stable")]
    values = values[np.isfinite(values)]
    return values, np.concatenate([[-np.inf], (values[:-1] + values[1:]) / 2, [np.inf]])


def _normal_cdf(x: Floats, sigma: float) -> Floats:
    # erf rather than the more exact ndtr: it is vectorised, and only differences of far more than 1e-16 matter here
    result: Floats = torch.erf(torch.from_numpy(np.ascontiguousarray(x)) / (sigma * sqrt(2))).numpy()
    return (1 + result) / 2


def _clamped_mass() -> float:
    """Probability that the clamp binds, on one side."""
    return float(_normal_cdf(np.array([-_CLAMP]), 1.0)[0])


def _update_nodes(lr: float) -> list[tuple[float, float]]:
    """The distribution of the update as (value, probability): Gauss-Legendre nodes, and the two values of the clamp."""
    x, w = np.polynomial.legendre.leggauss(_NODES)
    z = _CLAMP * x
    inner = _CLAMP * w * np.exp(-z * z / 2) / sqrt(2 * pi)
    mass = _clamped_mass()
    inner *= (1 - 2 * mass) / inner.sum()
    values = np.concatenate([z, [-_CLAMP, _CLAMP]]) * _GAIN * lr
    return list(zip(values.tolist(), [*inner.tolist(), mass, mass], strict=True))


def _narrow(edges: Floats, cells: NDArray[np.int64], nodes: list[tuple[float, float]], reach: int) -> float:
    """Sum of P(base) H(new | base) over ``cells`` that reach less than ``reach`` away: exact in w, quadrature in u."""
    below = _normal_cdf(edges, SIGMA)  # P(w < edge)
    to = np.clip(cells[:, None] + np.arange(-reach, reach + 1), 0, edges.size - 2)
    joint = np.zeros(to.shape)
    for update, probability in nodes:
        shifted = _normal_cdf(edges - update, SIGMA)  # P(w + update < edge)
        start = np.maximum(below[cells][:, None], shifted[to])
        stop = np.minimum(below[cells + 1][:, None], shifted[to + 1])
        joint += probability * np.maximum(stop - start, 0)
    return _entropy(joint)


def _wide(edges: Floats, cells: NDArray[np.int64], low: NDArray[np.int64], high: NDArray[np.int64], lr: float) -> float:
    """The same for weights so small that they reach many: exact in u, three nodes in w."""
    total = 0.0
    x, w = np.polynomial.legendre.leggauss(3)
    for cell, first, last in zip(cells.tolist(), low.tolist(), high.tolist(), strict=True):
        a, b = edges[cell], edges[cell + 1]
        weight = (a + b) / 2 + (b - a) / 2 * x
        mass = (b - a) / 2 * w * np.exp(-((weight / SIGMA) ** 2) / 2) / (SIGMA * sqrt(2 * pi))
        cdf = _update_cdf(edges[first : last + 1][:, None] - weight[None, :], lr) @ mass
        total += _entropy(np.diff(cdf)[None, :])
    return total


def _update_cdf(x: Floats, lr: float) -> Floats:
    unit = _GAIN * lr
    cdf = _normal_cdf(x, unit)
    return np.where(x < -_CLAMP * unit, 0.0, np.where(x >= _CLAMP * unit, 1.0, cdf))


def _entropy(joint: Floats) -> float:
    """Sum over rows of P(row) H(column | row), in bits."""
    rows = joint.sum(axis=1, keepdims=True)
    positive = joint > 0
    share = np.where(positive, joint, 1.0) / np.where(rows > 0, rows, 1.0)
    return -float((joint * np.where(positive, np.log2(share), 0.0)).sum())


def floor_bytes(synthetic: Synthetic) -> float | None:
    """The floor for all of ``synthetic`` in bytes."""
    bits = floor_bits(synthetic.pair.dtype, synthetic.lr, synthetic.scale)
    return None if bits is None else bits * synthetic.pair.new.size / 8

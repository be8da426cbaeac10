"""Promise: ulp_v1 comes within two per cent of the entropy of a delta given its old weights' exponents."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import codec
from codec import dtypes, ulp


def bf16(values):
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def draw(lr, seed, count=1 << 21, width=0.02, zeros=0.0):
    """Weights and what one optimiser step makes of them, in BF16."""
    rng = np.random.default_rng(seed)
    weights = rng.normal(0, width, count).astype(np.float32)
    weights[rng.random(count) < zeros] = 0
    update = 0.6 * lr * np.clip(rng.normal(0, 1, count), -1.5, 1.5)
    return bf16(weights), bf16(weights + update.astype(np.float32))


def entropy_bytes(base, new):
    """Ideal bytes: which weights change given the exponent, and by what step, in the order of values, given it."""
    exponent = (base >> 7 & 255).astype(np.int64)
    changed = base != new
    ordered = [np.where(a >> 15, -1 - (a & 0x7FFF).astype(np.int64), a.astype(np.int64)) for a in (base, new)]
    step = ordered[1] - ordered[0]
    bits = 0.0
    for e in np.unique(exponent):
        mine = exponent == e
        n, k = np.count_nonzero(mine), np.count_nonzero(mine & changed)
        counts = np.array([k, n - k, *np.unique(step[mine & changed], return_counts=True)[1]], np.float64)
        terms = counts * np.log2(counts, where=counts > 0, out=np.zeros_like(counts))
        bits += n * np.log2(n) - terms[0] - terms[1]
        bits += terms[0] - terms[2:].sum()
    return bits / 8


@pytest.mark.parametrize(("lr", "seed"), [(3e-7, 1), (1e-6, 2), (3e-6, 3)])
def test_near_the_entropy(lr, seed):
    base, new = draw(lr, seed)
    assert len(ulp.encode(base, new, "BF16")) < 1.02 * entropy_bytes(base, new)


def test_wherever_the_weights_lie():
    """Layers differ in scale; the classes follow the exponents."""
    for width in (1e-3, 0.3, 20):
        base, new = draw(1e-6 * width / 0.02, 4, count=1 << 20, width=width)
        assert len(ulp.encode(base, new, "BF16")) < 1.02 * entropy_bytes(base, new)


def test_weights_that_start_at_zero():
    """Their first update gives them an exponent and all their bits: 11 bits each is what there is to say."""
    base, new = draw(1e-6, 5, zeros=0.1)
    born = np.count_nonzero((base == 0) & (new != 0))
    rest = base != 0
    most = 1.02 * entropy_bytes(base[rest], new[rest]) + 11.5 * born / 8
    assert len(ulp.encode(base, new, "BF16")) < most


@pytest.mark.parametrize("dtype", ["F16", "F32", "F8_E4M3", "F8_E5M2"])
def test_smaller_than_general_methods(dtype):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(6)
    weights = rng.normal(0, 0.02, 1 << 19).astype(np.float32)
    update = (0.6e-6 * np.clip(rng.normal(0, 1, weights.size), -1.5, 1.5)).astype(np.float32)
    scale = 4000 if dtype == "F8_E4M3" else 1
    kind = {"F16": torch.float16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
    base, new = (dtypes.to_bits(torch.from_numpy(w * scale).to(kind[dtype])) for w in (weights, weights + update))
    ours = len(ulp.encode(base, new, dtype))
    others = [len(codec.encode_group(base, new, dtype, method=m).payload) for m in ("fields_v1", "xor_planes")]
    assert ours < 0.95 * min(others)


def test_nothing_to_say_takes_a_few_bytes():
    base = draw(1e-6, 7)[0]
    assert len(ulp.encode(base, base.copy(), "BF16")) == 4
    assert ulp.encode(None, base, "BF16") is None
    assert ulp.encode(base, base, "U16") is None


def test_threads_do_not_disturb_each_other():
    pairs = [draw(1e-6, seed, count=200_000) for seed in range(8)]
    alone = [ulp.encode(*pair, "BF16") for pair in pairs]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda pair: ulp.encode(*pair, "BF16"), pairs * 4))
        decoded = list(pool.map(lambda i: ulp.decode(pairs[i][0], alone[i], "BF16", 200_000), range(8)))
    assert together == alone * 4
    assert [change.digest for change in decoded] == [codec.digest(new) for _, new in pairs]

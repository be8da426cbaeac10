"""Promise: rows, columns or experts that stand still make a delta no larger, and "auto" finds what suits them."""

from __future__ import annotations

import numpy as np
import pytest

import codec
from codec import methods, reference_ulp, reference_ulp_sample, ulp
from weightcast.measure import iid

COUNT = 1 << 22
EXPERT = 1 << 19


def steps(lr, seed=1, count=COUNT):
    pair = iid.generate(lr, "BF16", count, seed=seed).pair
    return pair.base, pair.new


def size(base, new, method="auto"):
    return len(codec.encode_group(base, new, "BF16", method=method).payload)


def where(keep, base, new):
    return np.where(keep, new, base)


@pytest.mark.parametrize("columns", [256 * n for n in (2, 4, 8, 16, 32)])
@pytest.mark.parametrize("still", [True, False])
def test_columns_that_stand_still_are_not_taken_for_all(columns, still):
    """What is sampled must not always be the same columns."""
    base, new = steps(1e-6)
    part = where((np.arange(COUNT) % columns < 256) != still, base, new)
    share = 1 - 256 / columns if still else 256 / columns
    # A change takes about 6 bits, and log2(1 / share) more for not being among those that never move.
    assert size(base, part, "ulp_v1") <= 1.05 * size(base, new) * share * (1 + np.log2(1 / share) / 6)


@pytest.mark.parametrize("active", [1, 3, 8])
def test_experts_that_stand_still_cost_nothing(active):
    base, new = steps(1e-6, count=16 * EXPERT)
    moves = np.random.default_rng(2).permutation(16) < active
    part = where(np.repeat(moves, EXPERT), base, new)
    alone = sum(size(base[i : i + EXPERT], part[i : i + EXPERT]) for i in range(0, part.size, EXPERT))
    coded = codec.encode_group(base, part, "BF16")
    assert len(coded.payload) <= 1.01 * alone
    result = base.copy()
    codec.apply_change(result, codec.decode_group(base, coded.payload, "BF16", base.size))
    assert np.array_equal(result, part)


@pytest.mark.parametrize("share", [0.01, 0.05])
@pytest.mark.parametrize("moving", [0b111111, 0b000001, 0b010110, 0b100000])
def test_the_reference_chooses_the_same_chunks(share, moving):
    rng = np.random.default_rng(6)
    base = rng.integers(0, 1 << 16, 6 * EXPERT - 1000, dtype=np.uint16)
    moves = np.repeat([moving >> i & 1 == 1 for i in range(6)], EXPERT)[: base.size]
    new = base + (moves & (rng.random(base.size) < share)).astype(np.uint16)
    chosen = reference_ulp_sample.choose_chunk(base, new, reference_ulp.Fields(16, 8, 7))
    assert ulp.encode_counted(base, new, "BF16").body[1] == chosen
    assert ulp.encode_counted(base, new, "BF16", portable=True).body[1] == chosen
    assert (chosen < 22) == (moving != 0b111111)


@pytest.mark.parametrize(("columns", "share", "lr"), [(1024, 0.02, 1e-6), (4096, 0.01, 1e-6), (2048, 0.05, None)])
def test_rows_of_tokens_that_occurred(columns, share, lr):
    """An embedding's other rows have no gradient."""
    base, new = steps(lr or 1e-6)
    if lr is None:
        new = base + np.random.default_rng(3).choice(np.array([1, -1]), base.size).astype(np.uint16)
    rows = np.random.default_rng(4).random(COUNT // columns) < share
    part = where(np.repeat(rows, columns), base, new)
    assert size(base, part) <= 1.01 * min(size(base, part, name) for name in ("ulp_v1", "fields_v1"))
    assert size(base, part) < 0.95 * size(base, part, "ulp_v1")


@pytest.mark.parametrize("count", [256, 4096, 32768])
@pytest.mark.parametrize("kind", ["block", "runs", "independent"])
def test_of_a_small_delta_every_method_is_tried(count, kind):
    base, _ = steps(1e-6, count=count)
    at = np.arange(count)
    rng = np.random.default_rng(5)
    moves = {"block": at < count // 4, "runs": at // 32 % 4 == 0, "independent": rng.random(count) < 0.3}[kind]
    new = np.where(moves, base + np.uint16(1), base)
    bodies = [m.encode(base, new, "BF16") for m in methods.METHODS if m.name not in ("same", "raw")]
    assert size(base, new) == 1 + min(len(body) for body in bodies if body is not None)

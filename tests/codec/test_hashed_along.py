"""Promise: the digest that comes with a coded group is that of all its new bytes, whichever way the coder took."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import codec
from codec import ulp
from codec.dtypes import BY_NAME

FLOATS = tuple(name for name in BY_NAME if ulp.applies_to(name))
SAMPLED_N = 1 << 20
"""From 2**19 weights on the coder looks at a sample first."""
CHUNK_N = 1 << 22
"""Of a dense delta."""


def weights(count: int, seed: int = 0) -> np.ndarray:
    bits = np.random.default_rng(seed).normal(0, 0.02, count).astype(np.float32).view(np.uint32)
    return (bits >> 16).astype(np.uint16)


@given(st.data())
def test_any_pair(pairs, data):
    pair = data.draw(pairs())
    assert codec.encode_group(pair.base, pair.new, pair.dtype).digest == codec.digest(pair.new)


@given(st.data())
@pytest.mark.parametrize("portable", [False, True])
def test_any_pair_of_floats(pairs, portable, data):
    pair = data.draw(pairs(names=FLOATS))
    coded = ulp.encode_counted(pair.base, pair.new, pair.dtype, portable=portable, digest=True)
    assert coded.digest == codec.digest(pair.new)
    assert ulp.encode_counted(pair.base, pair.new, pair.dtype, portable=portable).body == coded.body


def test_nobody_hashes_who_was_not_asked_to():
    base = weights(1000)
    assert ulp.encode_counted(base, base, "BF16").digest is None


# What the sample sees is the first 256 weights of every 1024.
@pytest.mark.parametrize("changed", [[], [300], [SAMPLED_N - 1], [0, 70_000], [300, 5000, SAMPLED_N - 1]], ids=str)
@pytest.mark.parametrize("more", [0, 1, 77])
def test_changes_that_a_sample_misses_or_sees(changed, more):
    base = weights(SAMPLED_N + more)
    new = base.copy()
    new[changed] += 1
    coded = codec.encode_group(base, new, "BF16")
    assert coded.digest == codec.digest(new)
    assert coded.changed == len(changed)


@pytest.mark.parametrize("changed", [slice(0, None), slice(CHUNK_N, None), slice(0, CHUNK_N)], ids=str)
def test_several_chunks_of_which_some_are_unchanged(changed):
    base = weights(2 * CHUNK_N + 5000)
    new = base.copy()
    new[changed] += 1
    coded = ulp.encode_counted(base, new, "BF16", digest=True)
    assert coded.body[1] == 22
    assert coded.digest == codec.digest(new)


def test_weights_at_an_odd_address():
    base = np.frombuffer(b"\0" + weights(5000).tobytes(), np.uint16, offset=1)
    new = np.frombuffer(b"\0" + (weights(5000) + 1).tobytes(), np.uint16, offset=1)
    assert codec.encode_group(base, new, "BF16").digest == codec.digest(new.copy())

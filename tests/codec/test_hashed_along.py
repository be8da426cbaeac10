"""Promise: the digest that comes with a coded group is that of all its new bytes, whichever way the coder took."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import codec
from codec import methods, ulp
from codec._native import Digests
from codec.dtypes import BY_NAME
from codec.group import decode_fed

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
    digests = Digests(base=True, result=True)
    coded = ulp.encode_counted(pair.base, pair.new, pair.dtype, portable=portable, digests=digests)
    assert (digests.base(), digests.result()) == (codec.digest(pair.base), codec.digest(pair.new))
    assert ulp.encode_counted(pair.base, pair.new, pair.dtype, portable=portable) == coded


@given(st.data())
@pytest.mark.parametrize("method", [m.name for m in methods.METHODS])
def test_decoding_feeds_base_and_result_part_after_part(pairs, method, data):
    drawn = [data.draw(pairs(names=("BF16",))) for _ in range(3)]
    digests = Digests(base=True, result=True)
    for pair in drawn:
        payload = codec.encode_group(pair.base, pair.new, "BF16", method=method).payload
        change = decode_fed(pair.base, payload, "BF16", pair.new.size, digests)
        assert change.digest == b""
    base, new = (np.concatenate([getattr(pair, side) for pair in drawn]) for side in ("base", "new"))
    assert (digests.base(), digests.result()) == (codec.digest(base), codec.digest(new))


def test_a_digest_that_was_not_asked_for_is_not_there():
    with pytest.raises(ValueError, match="not asked for"):
        Digests(base=False, result=True).base()


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
    digests = Digests(base=True, result=True)
    assert ulp.encode_counted(base, new, "BF16", digests=digests).body[1] == 22
    assert (digests.base(), digests.result()) == (codec.digest(base), codec.digest(new))


def test_weights_at_an_odd_address():
    base = np.frombuffer(b"\0" + weights(5000).tobytes(), np.uint16, offset=1)
    new = np.frombuffer(b"\0" + (weights(5000) + 1).tobytes(), np.uint16, offset=1)
    assert codec.encode_group(base, new, "BF16").digest == codec.digest(new.copy())

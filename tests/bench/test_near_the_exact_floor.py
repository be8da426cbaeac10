"""Promise: on independent weights, whose entropy is known exactly, a payload is within one per cent of it."""

from __future__ import annotations

import pytest

import codec
from weightcast.measure import iid


@pytest.mark.parametrize("lr", [1e-7, 1e-6, 3e-6])
def test_within_a_hundredth_of_the_exact_floor(lr: float) -> None:
    synthetic = iid.generate(lr, seed=1)
    floor = iid.floor_bytes(synthetic)
    assert floor is not None
    payload = codec.encode_group(synthetic.pair.base, synthetic.pair.new, "BF16").payload
    assert floor < 1.005 * len(payload)
    assert len(payload) < 1.01 * floor

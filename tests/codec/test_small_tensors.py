"""Promise: in the groups that agents make, many small tensors cost at most 3 % more than one large one."""

from __future__ import annotations

import pytest

import codec
from weightcast.measure import iid
from weightcast.measure.cases import in_small_tensors
from weightcast.measure.pairs import Group, Pair, groups

MOST = 1.03


def cost(joined: list[Group]) -> int:
    """Bytes sent: payloads and digests."""
    coded = (codec.encode_group(group.base, group.new, group.dtype) for group in joined)
    return sum(len(one.payload) + len(one.digest) for one in coded)


@pytest.mark.parametrize("lr", [1e-7, 1e-6])
def test_experts_norms_and_biases_in_layers(lr: float) -> None:
    one = iid.generate(lr, "BF16", 1 << 24, seed=4).pair
    many = list(in_small_tensors(one))
    assert len(many) > 40
    assert cost(groups(many)) <= MOST * cost(groups([one]))


def test_experts_that_belong_to_no_layer() -> None:
    one = iid.generate(1e-7, "BF16", 1 << 24, seed=5).pair
    size = 1 << 19
    many = [
        Pair(f"experts.{i}.w", "BF16", (size,), one.base[i * size :][:size], one.new[i * size :][:size])
        for i in range(one.new.size // size)
    ]
    assert cost(groups(many)) <= MOST * cost(groups([one]))
    alone = [Group(pair.dtype, pair.base, pair.new) for pair in many]
    assert cost(alone) > 1.08 * cost(groups(many))  # why there are groups

"""A receipt reports exactly the groups that its rank owns, or is refused with the rank and the tensor."""

from __future__ import annotations

import json

import pytest

from weight_store.errors import FormatError
from weight_store.position import GENESIS, Position
from weight_store.receipt import BLOCK_BYTES, SHARD_MAGIC, Receipt, check_receipt, group_ranges

PARENT = Position(version=4, sha256="4" * 64)


def test_groups_are_found_from_sizes_alone(make) -> None:
    layout = make.layout(world_size=2, layers=3)
    opened = make.opened(layout, version=5, parent=PARENT)
    payloads = [b"abc", b"", b"defgh"]
    receipt = make.receipt(opened, layout, 1, payloads, full=(1,))
    shard = SHARD_MAGIC + b"".join(payloads)
    ranges = group_ranges(receipt, layout)
    assert [shard[r.offset : r.offset + r.size] for r in ranges] == payloads
    assert [r.group for r in ranges] == list(layout.owned(1))
    assert [r.full for r in ranges] == [False, True, False]
    assert [r.digest for r in ranges] == [receipt.digest(i) for i in range(3)]


def test_missing_groups_are_named(make) -> None:
    layout = make.layout(world_size=2, layers=3)
    receipt = make.receipt(make.opened(layout), layout, 1, [b"x"])
    with pytest.raises(
        FormatError, match=r"rank 1 reports 1 groups of 3 that it owns: layers.1.w1 \[0:2, 0:4\] is missing"
    ):
        check_receipt(receipt, layout)


def test_extra_groups_are_refused(make) -> None:
    layout = make.layout(world_size=2, layers=1)
    receipt = make.receipt(make.opened(layout), layout, 0, [b"x", b"y"])
    with pytest.raises(
        FormatError, match="rank 0 reports 2 groups of 1 that it owns: it reports groups it does not own"
    ):
        check_receipt(receipt, layout)
    nobody = make.receipt(make.opened(layout), layout, 5, [b"x"])
    with pytest.raises(FormatError, match="rank 5 reports 1 groups of 0"):
        check_receipt(nobody, layout)


def test_sizes_and_changes_are_bounded_by_the_group(make) -> None:
    layout = make.layout(world_size=1, layers=1)
    opened = make.opened(layout)
    check_receipt(make.receipt(opened, layout, 0, [b"x" * (16 + 4096)]), layout)
    with pytest.raises(
        FormatError, match=r"rank 0 claims 4113 bytes for the group of layers.0.w0, whose weights have 16"
    ):
        check_receipt(make.receipt(opened, layout, 0, [b"x" * (16 + 4097)]), layout)
    with pytest.raises(FormatError, match=r"rank 0 reports more changes than weights in the group of layers.0.w0"):
        check_receipt(make.receipt(opened, layout, 0, [b"x"], changed=(9,)), layout)


def test_a_rank_that_owns_nothing_sends_an_empty_shard(make) -> None:
    layout = make.layout(world_size=1)
    receipt = make.receipt(make.opened(layout), layout, 1, [])
    assert receipt.shard_bytes == len(SHARD_MAGIC)
    assert receipt.offsets == ()
    assert group_ranges(receipt, layout) == []


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"changed": [1]}, "columns of a receipt differ in length"),
        ({"digests": "00" * 16}, "columns of a receipt differ in length"),
        ({"digests": "0" * 65}, "digests"),
        ({"full": [2]}, "full names a group that is not there"),
        ({"full": [0, 0]}, "full names a group twice or out of order"),
        ({"full": [1, 0]}, "full names a group twice or out of order"),
        ({"extra_full": True, "full": [0]}, "an extra full has a group that is not full"),
        ({"shard_bytes": 41}, "shard_bytes is not the sum of its groups"),
        ({"blocks": ""}, "number of blocks does not fit shard_bytes"),
        ({"blocks": "00" * 64}, "number of blocks does not fit shard_bytes"),
        ({"nonce": "../../../../etc/"}, "nonce"),
        ({"fulls": [{"version": 5, "sha256": "0" * 64, "size": 1, "shard_bytes": 8}]}, "not older than this"),
        ({"fulls": [{"version": 2, "sha256": "0" * 64, "size": 1, "shard_bytes": 8}] * 2}, "names a version twice"),
        ({"fulls": [{"version": i, "sha256": "0" * 64, "size": 1, "shard_bytes": 8} for i in range(65)]}, "fulls"),
        ({"assets": [{"name": "config.json", "sha256": "0" * 64, "size": 1}] * 2}, "asset name appears twice"),
        ({"assets": [{"name": "../x", "sha256": "0" * 64, "size": 1}]}, "assets"),
        ({"assets": [{"name": "config.json", "sha256": "0" * 64, "size": (1 << 30) + 1}]}, "assets"),
    ],
)
def test_each_rule_of_a_receipt_is_kept(changed: dict[str, object], sentence: str, make) -> None:
    layout = make.layout(world_size=1, layers=2)
    opened = make.opened(layout, version=5, parent=PARENT)
    body = json.loads(make.receipt(opened, layout, 0, make.shard(layout, 0)).to_bytes())
    assert body["shard_bytes"] == 40
    with pytest.raises(FormatError, match=sentence):
        Receipt.parse(json.dumps(body | changed).encode())


def test_there_is_a_digest_for_every_block_begun(make) -> None:
    layout = make.layout(world_size=1, layers=1)
    opened = make.opened(layout, parent=GENESIS)
    for size, blocks in [(0, 1), (BLOCK_BYTES - 8, 1), (BLOCK_BYTES - 7, 2)]:
        receipt = make.receipt(opened, layout, 0, [bytes(size)])
        assert len(receipt.blocks) == 64 * blocks
        assert receipt.block_sha256(blocks) == ""


def test_groups_are_the_same_whoever_asks_for_them(make) -> None:
    """They are made when they are asked for, and kept: what is remembered of one is found again."""
    layout = make.layout()
    own = layout.owned(1)
    assert own
    assert all(layout.groups[group.index] is group for group in own)
    assert [group.index for rank in range(layout.world_size) for group in layout.owned(rank)] == [
        index for rank in range(layout.world_size) for index in layout.owned_indices.get(rank, [])
    ]
    assert [(group.elements, group.nbytes) for group in layout.groups] == list(layout.group_sizes)

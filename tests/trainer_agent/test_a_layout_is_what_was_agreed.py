"""A layout that changed in shared memory copies no piece to another place: it is refused, in a sentence."""

from __future__ import annotations

import time

import pytest

from tests.trainer_agent.silent import attached_desk
from trainer_agent.errors import SidecarFailed
from trainer_agent.messages import LayoutReady
from weight_store.layout import Layout
from weight_store.offer import Offer
from weight_store.records import sha256_hex

LAYOUT = Layout(
    world_size=1,
    names=("a", "b"),
    dtypes=("BF16",) * 2,
    itemsizes=(2,) * 2,
    shapes=((8,),) * 2,
    piece_tensor=(0, 1),
    piece_offsets=((0,),) * 2,
    piece_sizes=((8,),) * 2,
    group_owner=(0,),
    group_start=(0,),
)
OFFER = Offer(
    run_id="00000000-0000-4000-8000-000000000000",
    term=1,
    rank=0,
    world_size=1,
    names=LAYOUT.names,
    dtypes=LAYOUT.dtypes,
    itemsizes=LAYOUT.itemsizes,
    shapes=LAYOUT.shapes,
    offsets=LAYOUT.piece_offsets,
    sizes=LAYOUT.piece_sizes,
)


@pytest.mark.parametrize("found", ["as agreed", "one bit off", "gone"])
def test_the_trainer_uses_the_layout_that_was_agreed_and_no_other(tmp_path, found: str) -> None:
    desk, arena, tell = attached_desk(tmp_path)
    raw = LAYOUT.to_bytes()
    if found == "one bit off":
        at = raw.index(b'"b"') + 1
        wrong = raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]
        assert Layout.parse(wrong, key="layout").names == ("a", "c")
        arena.write("layout", wrong)
    elif found == "as agreed":
        arena.write("layout", raw)
    tell(LayoutReady(sha256=sha256_hex(raw)))
    try:
        if found == "as agreed":
            assert desk.settle(OFFER, time.monotonic()) == LAYOUT
        else:
            with pytest.raises(SidecarFailed, match="start the training job again"):
                desk.settle(OFFER, time.monotonic())
    finally:
        arena.remove()

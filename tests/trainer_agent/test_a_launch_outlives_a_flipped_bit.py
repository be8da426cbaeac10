"""One bit that flips, in what a rank reads from the bucket or in the layout that it keeps, ends no launch."""

from __future__ import annotations

import pytest

from tests.sim.network import Faults
from tests.trainer_agent.walk_jobs import WalkRank
from tests.trainer_agent.walk_world import SMALL
from tests.trainer_agent.walking import Walk, walk


async def publish(walk: Walk) -> None:
    walk.launch.publish(SMALL)
    assert await walk.until(lambda: walk.launch.idle, 60.0)
    assert [rank.handles[-1].error for rank in walk.launch.walkers] == [None]


@pytest.mark.parametrize("kind", ["head", "layout", "offer"])
def test_of_what_a_rank_reads_when_it_starts(kind: str) -> None:
    """Its sidecar may end at any of its effects: what it wrote is what the next one reads."""
    hit: list[int] = []

    def end_at(number: int) -> None:
        async def play(walk: Walk) -> None:
            walk.world.network.faults = Faults(wrong_bytes=1e-12)
            walk.world.misread_once = {kind}
            launch = walk.start_launch(world_size=1)
            await walk.until(lambda: bool(launch.walkers), 1.0, every_s=1e-4)
            launch.walkers[0].effects.set(number, after=True)
            await publish(walk)
            assert walk.launch is launch
            if not walk.world.misread_once:
                hit.append(number)

        walk(5, play=play)

    for number in range(1, 16):
        end_at(number)
    assert hit, "nobody has read one"


def flip(rank: WalkRank, at: int) -> None:
    layout = bytearray(rank.arena.files["layout"])
    layout[at % len(layout)] ^= 1 << at % 8
    rank.arena.files["layout"] = bytes(layout)


def test_of_the_layout_that_it_keeps() -> None:
    async def play(walk: Walk) -> None:
        launch = walk.start_launch(world_size=1)
        await publish(walk)
        (rank,) = launch.walkers
        whole = rank.arena.files["layout"]
        for at in range(7, len(whole), 97):
            flip(rank, at)
            rank.sidecar.kill()
            await publish(walk)
            assert rank.arena.files["layout"] == whole

    walk(5, play=play)

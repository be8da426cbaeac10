"""A replica that is given to another run: refused for as long as anything of the former one is there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout_agent import gate
from rollout_agent.errors import RunError
from tests.rollout_agent.courses import COURSES, course
from tests.rollout_agent.crashing import MODEL, STATE, World
from tests.rollout_agent.walk_checks import visible
from tests.rollout_agent.walk_disk import Wire

if TYPE_CHECKING:
    from tests.rollout_agent.walking import Walk


async def other_run(walk: Walk) -> None:
    """The bucket has a new run under the same name: whoever runs the agent empties its directories, one by one."""
    if walk.moved or walk.reading is not None or walk.harms or walk.spoilt:
        return
    walk.no_faults()
    walk.moved = True
    if walk.disk.inside is not None:
        walk.disk.leaves()
    await walk.attempt(walk.open.close())
    walk.replica = None
    world = course(COURSES + walk.chance.randrange(4), tmpfs=walk.tmpfs)
    await world.head(min(world.training.positions))
    roots = walk.chance.sample((MODEL, STATE), 2)
    taken = await _takes(walk, world)
    for root in roots:
        walk.note(f"   {root} emptied by hand")
        walk.disk.remove_tree(str(root), durably=True)
        taken = await _takes(walk, world)
    if not taken:
        # One was made again from the other.
        walk.clear()
        assert await _takes(walk, world)
    walk.world, walk.wire = world, Wire(world.store)
    walk.versions, walk.collected = sorted(world.training.positions), 0
    walk.shown = walk.kept = None
    walk.includes = {walk.include}
    await walk.reopen()


async def _takes(walk: Walk, world: World) -> bool:
    """An agent for the new run: it takes the directories, or says that they are another run's."""
    taken = True
    try:
        async with await world.open(walk.disk, include=walk.include) as replica:
            known = replica.run_id
            await replica.catch_up()
            assert known in (None, world.training.run_id), "took the directory of another run"
    except RunError as error:
        taken = False
        walk.note(f"   {type(error).__name__}: {str(error)[:100]}")
    whole = gate.holds(walk.disk, walk.places)
    if whole is not None:
        of = world if whole.run_id == world.training.run_id else walk.world
        visible(of, walk.disk, walk.places, [], {*walk.includes, walk.include})
    return taken

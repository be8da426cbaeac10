"""Hands in a model directory under a running agent: files edited, cut, replaced, removed; and bits that flip.

What a hand does changes the times of a file, what a bit does changes nothing that could be seen without reading.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from rollout_agent.places import CONFIG, INDEX
from tests.rollout_agent.simvolume import Inode, Volume
from tests.sim.agents import SimAgent
from tests.sim.disks import MODEL, PLACES

if TYPE_CHECKING:
    from tests.sim.chaos import Chaos


WAITS_S = 10.0
"""How long a hand waits for a version."""


def _body(data: bytearray, chance: random.Random) -> None:
    """One byte of a tensor, or of the text."""
    head = 8 + int.from_bytes(data[:8], "little")
    data[chance.randrange(head if head < len(data) else 0, len(data))] ^= 1 << chance.randrange(8)


def _head(data: bytearray, chance: random.Random) -> None:
    """One byte of what says where each tensor lies."""
    data[chance.randrange(min(len(data), 8 + int.from_bytes(data[:8], "little")))] ^= 1 << chance.randrange(8)


def _name(data: bytearray, chance: random.Random) -> None:
    """A tensor is called something else."""
    data[:] = data.replace(b"layers", b"leyers").replace(b"model_type", b"model_tipe").replace(b"norm", b"morn")


def _cut(data: bytearray, chance: random.Random) -> None:
    del data[chance.randrange(len(data)) :]


def _longer(data: bytearray, chance: random.Random) -> None:
    data += b"\0" * chance.randint(1, 100)


EDITS: tuple[Callable[[bytearray, random.Random], None], ...] = (_body, _head, _name, _cut, _longer)


def _someone(chaos: Chaos) -> SimAgent | None:
    """An agent that runs and shows a version."""
    shown = [agent for agent in chaos.world.agents if agent.shows]
    return chaos.chance.choice(shown) if shown else None


def _files(volume: Volume) -> list[str]:
    wanted = (".safetensors", INDEX, CONFIG)
    return [f"{MODEL}/{name}" for name, inode in volume.files_in(MODEL).items() if name.endswith(wanted) and inode.data]


def files_are_edited(chaos: Chaos) -> None:
    """Weights, the index or config.json: in place, by another file of the same name, or away."""
    agent, chance = _someone(chaos), chaos.chance
    if agent is None or not (files := _files(agent.disk.volume)):
        return
    volume, path = agent.disk.volume, chance.choice(files)
    agent.handled()
    if chance.random() < 0.2:
        volume.put(path, None)
        chaos.world.note(f"{agent.node}: {path} is removed")
        return
    edit, inode = chance.choice(EDITS), volume.names[path]
    data = bytearray(inode.data)
    edit(data, chance)
    if len(data) == len(inode.data) and chance.random() < 0.7:
        inode.data[:] = data
        inode.written = True
    else:
        volume.put(path, Inode(data, written=True))
    chaos.world.note(f"{agent.node}: {path} is edited: {edit.__name__[1:]}")


def weights_are_edited_as_a_version_comes(chaos: Chaos) -> None:
    """As soon as the next version is decided: while its weights are repaired the agent hears of another one."""
    world = chaos.world
    decided, until_s = len(world.model.decided), world.loop.time() + WAITS_S

    def look() -> None:
        if not world.chaotic or world.loop.time() > until_s:
            return
        if len(world.model.decided) > decided:
            _edit_weights(chaos)
        else:
            world.loop.call_later(0.05, look)

    look()


def _edit_weights(chaos: Chaos) -> None:
    agent = _someone(chaos)
    if agent is None or not (files := agent.disk.weight_files()):
        return
    path = f"{MODEL}/{chaos.chance.choice(files)}"
    agent.handled()
    inode = agent.disk.volume.names[path]
    _body(inode.data, chaos.chance)
    inode.written = True
    chaos.world.note(f"{agent.node}: {path} is edited as a version comes")


def private_directory_is_removed(chaos: Chaos) -> None:
    """``rm -r .weightcast``: marks, locks, and the agent's own records where those lie inside."""
    agent = _someone(chaos)
    if agent is None:
        return
    volume = agent.disk.volume
    agent.handled(records=True)
    private = str(PLACES.private)
    for path in [path for path in volume.names if path.startswith(f"{private}/")]:
        volume.put(path, None)
    agent.disk.locks.clear()
    volume.dirs -= {path for path in volume.dirs if f"{path}/".startswith(f"{private}/")}
    chaos.world.note(f"{agent.node}: {PLACES.private} is removed")


def weights_rot(chaos: Chaos) -> None:
    """A bit of the working files flips; engines that look into each file before they load it are all that helps."""
    agent, chance = _someone(chaos), chaos.chance
    if agent is None or not (files := agent.disk.weight_files()):
        return
    path = f"{MODEL}/{chance.choice(files)}"
    agent.handled(silently=True)
    chance.choice((_body, _head))(agent.disk.volume.names[path].data, chance)
    chaos.world.note(f"{agent.node}: a bit of {path} flips unseen")


FAULTS = (files_are_edited, weights_are_edited_as_a_version_comes, private_directory_is_removed, weights_rot)
RARE = ()

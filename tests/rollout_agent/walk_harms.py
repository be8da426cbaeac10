"""What hands and rot do to the files of one replica, whose agent may be running."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rollout_agent.places import CONFIG, INDEX, Places
from tests.rollout_agent.crashing import MODEL
from tests.rollout_agent.simvolume import Inode, Volume
from tests.rollout_agent.walk_disk import WalkDisk


@dataclass(frozen=True)
class Harm:
    """One file, and what happened to it. ``unseen``: nothing tells but reading it."""

    path: str
    what: str
    unseen: bool = False

    @property
    def model(self) -> bool:
        """Whether engines load this file."""
        return self.path.rpartition("/")[0] == str(MODEL)

    @property
    def owner(self) -> bool:
        """Whether it took away, or may have, by what a directory is known for an agent's."""
        return self._covers(Places.of(MODEL).owner)

    @property
    def told(self) -> bool:
        """Whether it took away the note that an engine was told."""
        return self._covers(Places.of(MODEL).told)

    def _covers(self, path: Path) -> bool:
        return str(path) == self.path or (self.path.endswith("/") and str(path).startswith(self.path))


def _flip(data: bytearray, chance: random.Random) -> None:
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def _swap(data: bytearray, chance: random.Random) -> None:
    data[:] = data.replace(b"layers", b"leyers").replace(b"tiny", b"tony")


def _cut(data: bytearray, chance: random.Random) -> None:
    del data[chance.randrange(len(data)) :]


def _longer(data: bytearray, chance: random.Random) -> None:
    data += bytes(chance.randint(1, 100))


EDITS: tuple[Callable[[bytearray, random.Random], None], ...] = (_flip, _flip, _flip, _swap, _cut, _longer)


def candidates(volume: Volume, places: Places) -> dict[str, list[str]]:
    """Files that may be harmed, by where they lie."""
    state, private = f"{places.state}/", f"{places.private}/"
    found: dict[str, list[str]] = {"model": [], "private": [], "new": [], "state": []}
    for path in sorted(volume.names):
        if not volume.names[path].data:
            continue
        if path.startswith(state):
            found["state"].append(path)
        elif path.startswith(f"{places.new}/"):
            found["new"].append(path)
        elif path == str(places.told):
            continue  # a promise to an engine, of which nothing else tells
        elif path.startswith(private):
            found["private"].append(path)
        elif path.endswith((".safetensors", INDEX, CONFIG, "tokenizer.json")):
            found["model"].append(path)
    return {where: paths for where, paths in found.items() if paths}


def harm(volume: Volume, places: Places, chance: random.Random) -> Harm | None:
    """Harm one file somewhere; None if there is none."""
    found = candidates(volume, places)
    if not found:
        return None
    weights = {"model": 6, "private": 1, "new": 1, "state": 4}
    where = chance.choices(list(found), [weights[where] for where in found])[0]
    path = chance.choice(found[where])
    inode = volume.names[path]
    if chance.random() < 0.15:
        volume.put(path, None)
        return Harm(path, "removed")
    edit = chance.choice(EDITS)
    data = bytearray(inode.data)
    edit(data, chance)
    same_size = len(data) == len(inode.data)
    if same_size and chance.random() < 0.4:
        inode.data[:] = data
        if len(inode.durable) == len(data):
            inode.durable = bytes(data)
        return Harm(path, f"rotted ({edit.__name__[1:]})", unseen=True)
    if same_size and chance.random() < 0.6:
        inode.data[:] = data
        inode.written = True
    else:
        # Also for what is cut: a map of it would be of another size, as :meth:`SimMap.in_place` says.
        volume.put(path, Inode(data, written=True))
    return Harm(path, f"edited ({edit.__name__[1:]})")


def remove(disk: WalkDisk, places: Places, chance: random.Random) -> Harm:
    """``rm -rf`` of what is the agent's own, or of a part of it, or of everything."""
    private = (places.private, places.new, places.hidden, places.private / "layouts", places.owner, places.told)
    path = chance.choice((*private, places.state, places.layouts, places.assets, places.private, places.model))
    disk.remove_tree(str(path))
    return Harm(str(path) if path in (places.owner, places.told) else f"{path}/", "removed with all in it")


def leave_in_new(volume: Volume, places: Places, chance: random.Random) -> Harm:
    """Somebody's or an older agent's files in ``new/``: of a name and a size that fit, or not."""
    weights = [p for p in sorted(volume.names) if p.startswith(f"{MODEL}/model-") and p.count("/") == 2]
    if weights and chance.random() < 0.7:
        source = chance.choice(weights)
        data = bytearray(volume.names[source].data)
        if chance.random() < 0.5 and data:
            _flip(data, chance)
        name = source.rpartition("/")[2]
    else:
        name, data = (
            chance.choice(("model-00001-of-00009.safetensors", "junk", "model-00001-of-00002.safetensors")),
            (bytearray(b"junk" * chance.randint(1, 300))),
        )
    path = f"{places.new}/{name}"
    volume.put(path, Inode(data, written=True))
    return Harm(path, "left there")

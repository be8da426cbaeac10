"""What a simulated disk holds: files and names, as the running system sees them and as a power loss would leave them.

At a power loss each directory keeps a prefix of its unsynced changes, and each 64-byte piece of a file that was not
synced is old or new as chance has it. A sync that fails leaves pieces clean that never reached the disk, as Linux does:
a later sync reports success and does not write them, unless they are stored to again.

Paths are strings: those of pathlib take many times as long to hash and to compare.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PIECE = 64


@dataclass
class Inode:
    data: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    written: bool = False
    """Whether something has been stored through the port since it was marked: what times of change would tell."""
    lost: set[int] = field(default_factory=set)
    """Numbers of the pieces that a failed sync left clean and not durable."""

    def stored(self, start: int, end: int) -> None:
        """Note that bytes were stored: their pieces are to be written again."""
        if self.lost and end > start:
            self.lost.difference_update(range(start // PIECE, (end - 1) // PIECE + 1))

    def reachable(self) -> bytes:
        """What the disk can have of it: all but the pieces that are lost."""
        new = bytes(self.data)
        old = self.durable.ljust(len(new), b"\0")
        for at in (number * PIECE for number in self.lost):
            new = new[:at] + old[at : min(at + PIECE, len(new))] + new[at + PIECE :]
        return new

    def lose(self, chance: random.Random) -> None:
        """Fail to sync: what is not durable is written or lost for good, often all of it."""
        old, new = self.durable.ljust(len(self.data), b"\0"), self.data
        share = chance.choice((0.5, 1.0, 1.0))
        for number in range(-(-len(new) // PIECE)):
            piece = slice(number * PIECE, (number + 1) * PIECE)
            if old[piece] != new[piece] and chance.random() < share:
                self.lost.add(number)
        self.durable = self.reachable()


@dataclass
class Volume:
    """The state that survives a process: names and inodes, and the changes that are not durable yet."""

    names: dict[str, Inode] = field(default_factory=dict)
    durable_names: dict[str, Inode] = field(default_factory=dict)
    dirs: set[str] = field(default_factory=lambda: {"/"})
    pending: list[tuple[frozenset[str], dict[str, Inode | None]]] = field(default_factory=list)
    boot: int = 1

    def files_in(self, path: Path) -> dict[str, Inode]:
        """The files of one directory by their names there, in order of these."""
        inside = begin_of(path)
        found = {name[len(inside) :]: inode for name, inode in self.names.items() if name.startswith(inside)}
        return {name: found[name] for name in sorted(found) if "/" not in name}

    def put(self, path: str, inode: Inode | None) -> None:
        """Have a name lead to ``inode``, or nowhere: not durable before its directory is synced."""
        change_names(self.names, {path: inode})
        self.pending.append((frozenset((parent_of(path),)), {path: inode}))

    def clone(self) -> Volume:
        """The same content, independent of this."""
        copies = {id(i): Inode(bytearray(i.data), i.durable, i.written, set(i.lost)) for i in self._inodes()}

        def same(names: Mapping[str, Inode | None]) -> dict[str, Any]:
            return {path: inode and copies[id(inode)] for path, inode in names.items()}

        pending = [(directories, same(names)) for directories, names in self.pending]
        return Volume(same(self.names), same(self.durable_names), set(self.dirs), pending, self.boot)

    def key(self) -> tuple[object, ...]:
        """Equal for volumes that no process can tell apart, nor two power losses with the same luck."""
        numbers: dict[int, int] = {}

        def same(names: Mapping[str, Inode | None]) -> tuple[object, ...]:
            return tuple(sorted((p, i and numbers.setdefault(id(i), len(numbers))) for p, i in names.items()))

        tables = (same(self.names), same(self.durable_names), tuple((d, same(n)) for d, n in self.pending))
        contents = {
            numbers[id(i)]: (bytes(i.data), i.durable, i.written, tuple(sorted(i.lost))) for i in self._inodes()
        }
        return (*tables, tuple(sorted(contents.items())), self.boot, tuple(sorted(self.dirs)))

    def _inodes(self) -> list[Inode]:
        tables: list[Mapping[str, Inode | None]] = [self.names, self.durable_names, *(n for _, n in self.pending)]
        return [inode for names in tables for inode in names.values() if inode is not None]


def begin_of(path: Path) -> str:
    """What the names of everything in a directory begin with."""
    return f"{path}/".replace("//", "/")


def parent_of(path: str) -> str:
    return path.rpartition("/")[0] or "/"


def change_names(names: dict[str, Inode], changed: Mapping[str, Inode | None]) -> None:
    for path, inode in changed.items():
        if inode is None:
            names.pop(path, None)
        else:
            names[path] = inode

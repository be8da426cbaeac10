"""The weight files of one directory, mapped: bases out of them, changes into them, digests over them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from codec import Change, digest
from codec.dtypes import Bits
from rollout_agent import segments
from rollout_agent.disk import Disk, Mapped
from rollout_agent.errors import DamagedFiles
from rollout_agent.filetable import FileTable
from rollout_agent.segments import Segments
from weight_store.layout import Group, Tensor


@dataclass(frozen=True, slots=True)
class Damage:
    """A group whose bytes are not what its digest says."""

    group: Group
    expected: bytes
    found: bytes

    def __str__(self) -> str:
        first, last = self.group.pieces[0], self.group.pieces[-1]
        return (
            f"group {self.group.index} ({first.tensor.name} {first.box} to {last.tensor.name} {last.box}) has digest "
            f"{self.found.hex()}, expected {self.expected.hex()}"
        )


def lost(disk: Disk, directory: Path, table: FileTable) -> list[str]:
    """Names of the table's files that are missing or have another size."""
    return [file.name for file in table.files if disk.size(directory / file.name) != file.size]


def misfits(disk: Disk, directory: Path, table: FileTable) -> list[str]:
    """Names of the table's files that are missing, have another size, or begin differently."""
    return [file.name for file in table.files if not _fits(disk, directory / file.name, file.head, file.size)]


def _fits(disk: Disk, path: Path, head: bytes, size: int) -> bool:
    if disk.size(path) != size:
        return False
    mapped = disk.map(path, writable=False)
    try:
        return bytes(mapped.data[: len(head)]) == head
    finally:
        mapped.close()


class Weights:
    """Mapped weight files of the sizes in ``table``. Reading is safe from many threads, stores to different groups too.

    Groups cover all of a file but its head, which says where each tensor lies: see :meth:`edited_heads`.
    """

    def __init__(self, disk: Disk, directory: Path, table: FileTable, *, writable: bool = True) -> None:
        wrong = lost(disk, directory, table)
        if wrong:
            raise DamagedFiles(f"{directory / wrong[0]} is missing, cut or not the file that was written here")
        self.table = table
        self.directory = directory
        self._maps: list[Mapped] = []
        self._segments: dict[int, tuple[Group, Segments]] = {}
        try:
            for file in table.files:
                self._maps.append(disk.map(directory / file.name, writable=writable))
        except BaseException:
            self.close()
            raise

    def base(self, group: Group) -> Bits:
        """The group's present bits, read-only; no copy where they are one contiguous range."""
        return segments.gather([mapped.data for mapped in self._maps], self.where(group), group)

    def digest(self, group: Group) -> bytes:
        """XXH3-128 of the group's present bytes."""
        return digest(self.base(group))

    def apply(self, group: Group, change: Change) -> None:
        """Store a change of a group."""
        for file, rows in segments.by_file(self.where(group)):
            mapped = self._maps[file]
            mapped.change(partial(segments.store, mapped.data, rows, group.itemsize, change))

    def copy_from(self, other: Weights, tensors: Iterable[Tensor]) -> None:
        """Copy the bytes of those ``tensors`` that both have."""
        for tensor in tensors:
            if tensor.name in other.table.places:
                mapped = self._maps[self.table.places[tensor.name].file]
                mapped.change(partial(np.copyto, self._bytes(tensor.name), other._bytes(tensor.name)))

    def copy_group(self, other: Weights, group: Group) -> None:
        """Copy the bytes of a group from files of the same table."""
        for file, rows in segments.by_file(self.where(group)):
            mapped, source = self._maps[file], other._maps[file]
            mapped.change(partial(segments.copy, mapped.data, source.data, rows, group.itemsize))

    def edited_heads(self, names: Collection[str] | None = None) -> tuple[str, ...]:
        """Names of those files (all, or those in ``names``) whose first bytes are not the table's."""
        pairs = zip(self.table.files, self._maps, strict=True)
        wanted = [(file, mapped) for file, mapped in pairs if names is None or file.name in names]
        return tuple(file.name for file, mapped in wanted if bytes(mapped.data[: len(file.head)]) != file.head)

    def write_heads(self, names: Collection[str]) -> None:
        """Make the first bytes of these files the table's again."""
        for file, mapped in zip(self.table.files, self._maps, strict=True):
            if file.name in names:
                head = np.frombuffer(file.head, np.uint8)
                mapped.change(partial(np.copyto, mapped.data[: len(file.head)], head))

    def files_of(self, group: Group) -> frozenset[str]:
        """Names of the files that the group has bytes in."""
        return frozenset(self.table.files[file].name for file in self.where(group)[:, 1].tolist())

    def _bytes(self, name: str) -> NDArray[np.uint8]:
        place = self.table.places[name]
        return self._maps[place.file].data[place.offset : place.offset + place.tensor.nbytes]

    def in_place(self) -> bool:
        """Whether the names in the directory still lead to the mapped files, whole."""
        return all(mapped.in_place() for mapped in self._maps)

    def sync(self) -> None:
        """Force all files to stable storage."""
        for _ in self.sync_each():
            pass

    def sync_each(self) -> Iterator[str]:
        """The same, a file at each step; yields its name."""
        for file, mapped in zip(self.table.files, self._maps, strict=True):
            mapped.sync()
            yield file.name

    def close(self) -> None:
        """Release the maps. Calling it twice is allowed."""
        for mapped in self._maps:
            mapped.close()
        self._maps = []

    def where(self, group: Group) -> Segments:
        """Where a group's elements lie. Found once for each group of the layout in use: each step needs it again."""
        known = self._segments.get(group.index)
        if known is None or known[0] is not group:
            known = self._segments[group.index] = group, segments.segments_of(group, self.table)
        return known[1]


def digests(weights: Weights, groups: Iterable[Group], pool: Executor) -> Iterator[tuple[Group, bytes]]:
    """Digest of each group's present bytes, in order, computed on all threads of ``pool``."""
    items = tuple(groups)
    yield from zip(items, pool.map(weights.digest, items), strict=True)


def find_damage(
    weights: Weights, groups: Sequence[Group], expected: Sequence[bytes], pool: Executor
) -> tuple[Damage, ...]:
    """The groups whose present bytes do not have the digests ``expected``, one for each group."""
    pairs = zip(digests(weights, groups, pool), expected, strict=True)
    return tuple(Damage(group, want, found) for (group, found), want in pairs if want != found)

"""Whether the files that an engine would load are the ones that were recorded: first by their stamps, then by digest.

Whoever holds the gate's lock may call this: engines at the gate, people, the agent. Nothing is changed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass

from rollout_agent import presence
from rollout_agent.disk import Disk, Stamp
from rollout_agent.errors import DamagedFiles
from rollout_agent.filetable import FileTable
from rollout_agent.places import INDEX, Places
from rollout_agent.state import State, Whole, kept_names, load, table_of
from rollout_agent.statedir import Held, has_layout, held_by, read_layout
from rollout_agent.weights import Damage, Weights, find_damage
from weight_store.layout import Group


@dataclass(frozen=True, slots=True)
class Content:
    """What a model directory should hold."""

    state: State
    held: Held

    @property
    def table(self) -> FileTable:
        """Which tensor lies in which file."""
        return table_of(self.held.layout, kept_names(self.state, self.held.layout), self.state.file_bytes)


@dataclass(frozen=True, slots=True)
class Findings:
    """``damage``: groups that are not what they should be; ``heads``: files that say something else of where tensors
    lie; ``misplaced``: other files that are absent or edited."""

    damage: tuple[Damage, ...] = ()
    heads: tuple[str, ...] = ()
    misplaced: tuple[str, ...] = ()

    @property
    def good(self) -> bool:
        """Whether everything is as it should be."""
        return not self.damage and not self.heads and not self.misplaced

    def sentences(self) -> list[str]:
        """One for each finding."""
        return [
            *(f"{name} is edited: its first bytes, which say where each tensor lies" for name in self.heads),
            *(str(item) for item in self.damage),
            *(f"{name} is absent or edited" for name in self.misplaced),
        ]


def loaded_files(held: Held, table: FileTable) -> tuple[str, ...]:
    """Names of all files that an engine loads: weights, index, assets."""
    return (*(file.name for file in table.files), INDEX, *(asset.name for asset in held.version.assets))


def stamps_of(disk: Disk, places: Places, names: Collection[str]) -> dict[str, Stamp | None]:
    """The present stamps of files of the model directory."""
    return {name: disk.stat(places.model / name) for name in names}


def touched(disk: Disk, places: Places, stamps: Mapping[str, Stamp]) -> frozenset[str]:
    """Names of files that do not have these stamps: written to, replaced, removed, or perhaps only handled."""
    return frozenset(name for name, found in stamps_of(disk, places, stamps).items() if found != stamps[name])


def recorded(disk: Disk, places: Places, whole: Whole | None = None) -> Content | None:
    """What ``digests.json`` says; None if it is not there or damaged, or is not about the version of ``whole``."""
    state = load(disk, places.digests, State)
    if state is None or (whole is not None and state.version.position != whole.position):
        return None
    layout = read_layout(disk, places.shown_layout(state.version.layout), state.version.layout)
    return Content(state, held_by(state, layout)) if layout is not None else None


def is_recorded(disk: Disk, places: Places) -> bool:
    """Whether :func:`recorded` would find something, which is not read for that."""
    state = load(disk, places.digests, State, quiet=True)
    return state is not None and has_layout(disk, places.shown_layout(state.version.layout), state.version.layout)


def groups_in(groups: Collection[Group], table: FileTable, names: Collection[str] | None) -> frozenset[int]:
    """Indices of the groups that have bytes in a file named; of all groups if ``names`` is None."""
    if names is None:
        return frozenset(group.index for group in groups)
    numbers = {number for number, file in enumerate(table.files) if file.name in names}
    return frozenset(g.index for g in groups if any(table.places[p.tensor.name].file in numbers for p in g.pieces))


def damaged(weights: Weights, held: Held, wanted: Collection[int], pool: Executor) -> tuple[Damage, ...]:
    """Those of the groups with an index in ``wanted`` whose bytes do not have the digest they should have."""
    pairs = [pair for pair in zip(held.groups, held.digests, strict=True) if pair[0].index in wanted]
    return find_damage(weights, [group for group, _ in pairs], [digest for _, digest in pairs], pool)


def compare(
    disk: Disk, places: Places, content: Content, pool: Executor, names: Collection[str] | None = None
) -> Findings:
    """Hash the files in ``names`` (None: all). Raises ``DamagedFiles`` if a weight file is missing or cut."""
    held, table = content.held, content.table
    weights = Weights(disk, places.model, table, writable=False)
    try:
        heads = weights.edited_heads(names)
        damage = damaged(weights, held, groups_in(held.groups, table, names), pool)
    finally:
        weights.close()
    misplaced = presence.misplaced(disk, places, held.version, table.index)
    return Findings(damage, heads, tuple(name for name in misplaced if names is None or name in names))


def faults(disk: Disk, places: Places, whole: Whole, pool: Executor, names: Collection[str] | None) -> list[str]:
    """The same for the version of ``whole``, as sentences; also if something is missing, or it cannot be told."""
    content = recorded(disk, places, whole)
    if content is None:
        return [f"{places.digests} and the layout beside it do not say what version {whole.position} should be"]
    try:
        return compare(disk, places, content, pool, names).sentences()
    except DamagedFiles as error:
        return [str(error)]

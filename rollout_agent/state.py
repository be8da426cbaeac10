"""The small records beside the weights: whose directory it is, what it holds, from where logs are replayed.

Each file is one line with the SHA-256 of the rest, then a canonical record: bit rot is noticed, and then the file
counts as absent, for everything in it can be found again from the bucket and the weights.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, ClassVar, Self, TypeVar

from pydantic import Field, StringConstraints, model_validator

from rollout_agent.disk import Disk, Stamp, write_file
from rollout_agent.filetable import FILE_BYTES, FileTable, plan_files
from rollout_agent.places import CHECKPOINT
from rollout_agent.selection import wanted_groups
from weight_store.errors import FormatError
from weight_store.head import Term
from weight_store.layout import Group, Layout
from weight_store.offer import TensorName
from weight_store.position import Position
from weight_store.receipt import DIGEST_BYTES, Asset, AssetName, Hex
from weight_store.records import MAX_COLUMNS_BYTES, Count, Part, Record, Sha256, Uuid, sha256_hex

_LOG = logging.getLogger(__name__)

CheckpointName = Annotated[str, StringConstraints(pattern=rf"^(?:{CHECKPOINT})?$")]


class Version(Part):
    """One version of a run as a replica needs to know it; ``layout`` names the layout its groups are cut by."""

    position: Position
    term: Term
    step: Count
    layout: Sha256
    assets: tuple[Asset, ...] = Field(default=(), max_length=256)


class Owner(Record):
    """``owner.json``: the run that a model directory belongs to, and which files in it are assets of a version.

    It never names less than there are: also where every other record is damaged none stays that the next version lacks.
    """

    FORMAT: ClassVar[str] = "weightcast.replica-owner"

    run: str
    run_id: Uuid
    assets: tuple[AssetName, ...] = Field(default=(), max_length=4096)
    state: str = Field(default="", description="the state directory that it was kept with last; unknown if empty")


class Whole(Record):
    """``whole.json``: what the directory holds. Worth nothing in another boot, when unsynced pages may be gone.

    ``stamps``: of each file that an engine loads, taken when its content was last known to be right. A mark without
    any (of an older release) counts for nothing.
    """

    FORMAT: ClassVar[str] = "weightcast.replica-whole"

    run: str
    run_id: Uuid
    position: Position
    step: Count
    boot_id: str
    stamps: dict[str, Stamp] = Field(default={}, description="by name in the model directory")


class Serving(Record):
    """``serving.json``: the version that the engine confirmed last, in which boot."""

    FORMAT: ClassVar[str] = "weightcast.replica-serving"

    run_id: Uuid
    position: Position
    boot_id: str


class Told(Record):
    """``told.json``: the version that an engine was told of, in which boot; there only until it has answered."""

    FORMAT: ClassVar[str] = "weightcast.replica-told"

    run_id: Uuid
    position: Position
    boot_id: str


class Syncing(Record):
    """``syncing.json``: files beside it are being synced, or failed to be, in this boot."""

    FORMAT: ClassVar[str] = "weightcast.replica-syncing"

    boot_id: str


class State(Record):
    """``state.json``, ``pending.json`` and ``digests.json``: complete files and what they hold.

    ``include``: the patterns given; ``selected``: the tensors kept because of them, empty for all. ``digests``:
    XXH3-128 of each kept group, in layout order. ``checkpoint``: directory of the copy that survives a reboot, empty
    if the working files do so themselves.
    """

    FORMAT: ClassVar[str] = "weightcast.replica-state"

    run: str
    run_id: Uuid
    version: Version
    include: tuple[str, ...] = ()
    selected: tuple[TensorName, ...] = ()
    file_bytes: Annotated[int, Field(gt=0)] = FILE_BYTES
    digests: Hex
    checkpoint: CheckpointName = ""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.digests) % (2 * DIGEST_BYTES):
            raise ValueError("digests are not a whole number of digests")
        return self


def kept_names(state: State, layout: Layout) -> frozenset[str]:
    """Names of the tensors that the state's files hold."""
    return frozenset(state.selected or layout.names)


def kept_groups(state: State, layout: Layout) -> tuple[Group, ...]:
    """The groups of ``layout`` that the state's files hold, in order."""
    return wanted_groups(layout, kept_names(state, layout)) if state.selected else layout.groups


def table_of(layout: Layout, selected: frozenset[str], file_bytes: int) -> FileTable:
    """The files for the selected tensors of a layout."""
    return plan_files((t for t in layout.tensors if t.name in selected), layout.aliases, file_bytes=file_bytes)


_R = TypeVar("_R", bound=Record)


def save(disk: Disk, path: Path, record: Record) -> None:
    """Write a record atomically and durably."""
    write_file(disk, path, seal(record))


def seal(record: Record) -> bytes:
    """The bytes under which a record is kept locally."""
    data = record.to_bytes()
    return sha256_hex(data).encode() + b"\n" + data


def load(disk: Disk, path: Path, kind: type[_R], *, quiet: bool = False) -> _R | None:
    """Read a record; None if it is absent or (said in the log unless ``quiet``) unreadable."""
    data = disk.read(path, max_bytes=MAX_COLUMNS_BYTES)
    if data is None:
        return None
    level = logging.DEBUG if quiet else logging.WARNING
    digest, _, body = data.partition(b"\n")
    if sha256_hex(body).encode() != digest:
        _LOG.log(level, "%s is damaged: it does not have the SHA-256 in its first line; going on without it", path)
        return None
    try:
        return kind.parse(body, key=str(path))
    except FormatError as error:
        _LOG.log(level, "%s; going on without it", error)
        return None

"""What a state of the small world consists of: tuples of small numbers, and the records that the numbers stand for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from weight_store.layout import Layout
from weight_store.manifest import Manifest
from weight_store.position import GENESIS, Position
from weight_store.receipt import SHARD_MAGIC, Receipt
from weight_store.records import Record, sha256_hex
from weight_store.version import Abort, Open

RANKS = 2
RUN_ID = "00000000-0000-4000-8000-000000000001"
NONCE = "0" * 16
NONE = 0
STRAY = Position(version=0, sha256="f" * 64)
"""What rank 1 encodes against when it is out of step."""
LAYOUT = Layout(
    world_size=RANKS,
    names=("a", "b"),
    dtypes=("BF16",) * 2,
    itemsizes=(2,) * 2,
    shapes=((1,),) * 2,
    piece_tensor=(0, 1),
    piece_offsets=((0,),) * 2,
    piece_sizes=((1,),) * 2,
    group_owner=(0, 1),
    group_start=(0, 1),
)
LAYOUT_SHA256 = sha256_hex(LAYOUT.to_bytes())


class VersionState(NamedTuple):
    """One version number: numbers of its records, 0 where there is none."""

    opened: int = NONE
    register: int = NONE
    receipts: tuple[int, ...] = (NONE,) * RANKS
    aborted_aside: int = NONE  # only where a mutation puts aborts beside the register


class Bucket(NamedTuple):
    head: int
    versions: tuple[VersionState, ...]


class Task(NamedTuple):
    """A request. ``term`` is also the launch that has it; ``ordinal`` counts the publications of a term, or is the rank
    that withdraws.
    """

    kind: str
    term: int = 0
    ordinal: int = 0
    expired: bool = False


class Reading(NamedTuple):
    """A coordinator about to look for an object of ``version`` that was not there when it last could have."""

    task: Task
    head: int
    version: int
    opened: int = NONE
    given_up: int = NONE


class Writing(NamedTuple):
    """A coordinator about to write ``step``, decided on the head, opening and register that ``at`` has."""

    step: int
    at: Reading
    register: int = NONE


Doing = Reading | Writing | None
"""What a coordinator is at: it waits between two accesses to the bucket, or has no request."""

World = tuple[int, tuple[int, ...]]
"""A bucket and what each coordinator is doing, by number and in order: coordinators are interchangeable."""


class Violation(AssertionError):
    """An invariant does not hold; the message has the shortest way there."""


@dataclass(slots=True)
class Numbers:
    """Gives each distinct record a number from 1 on."""

    records: list[Record] = field(default_factory=list)
    known: dict[bytes, int] = field(default_factory=dict)

    def of(self, record: Record) -> int:
        key = record.to_bytes()
        if key not in self.known:
            self.records.append(record)
            self.known[key] = len(self.records)
        return self.known[key]

    def __getitem__(self, number: int) -> Record:
        return self.records[number - 1]


@dataclass(slots=True)
class Mutation:
    """What the modelled store and loop do wrong; the decisions are mutated by patching their module."""

    unconditional_head: bool = False
    overwriting_registers: bool = False
    aborts_aside: bool = False
    trusting_own_write: bool = False


def with_version(bucket: Bucket, version: int, state: VersionState) -> Bucket:
    versions = bucket.versions
    return bucket._replace(versions=(*versions[: version - 1], state, *versions[version:]))


def told(task: Task) -> str:
    if task.kind == "settle":
        return "settle after expiry" if task.expired else "settle"
    if task.kind == "withdraw":
        return f"withdraw for rank {task.ordinal}"
    return f"{task.kind} {f'publication {task.ordinal} of ' if task.kind == 'open' else 'for '}term {task.term}"


def plain(record: Manifest | Abort) -> Manifest | Abort:
    """Aborts of one version are alike: reason and sentence are for people."""
    if isinstance(record, Manifest):
        return record
    return record.model_copy(update={"reason": "expired", "detail": "", "missing": ()})


def make_receipt(opened: Open, rank: int, parent: Position) -> Receipt:
    return Receipt(
        run_id=RUN_ID,
        version=opened.version,
        rank=rank,
        parent=parent,
        layout=opened.layout,
        nonce=f"{rank:016x}",
        shard_bytes=len(SHARD_MAGIC) + 2,
        sizes=(2,),
        changed=(1,),
        digests="00" * 16,
        full=(0,) if opened.parent == GENESIS else (),
        blocks="00" * 32,
    )

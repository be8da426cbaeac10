"""What may be deleted, and why: a pure function of what the bucket says. When in doubt it is kept.

Facts are read in the order listing, control, head, then by key. All proofs below rest on things that never turn back:
the floor, the head's term and version, and a manifest's ``full_version`` only grow; registers and receipts are
created once. So a proof stays valid however late the deletion arrives, whoever else collects meanwhile. Of layouts and
assets there is no such proof: a launch that finds one there names it again, at any time. They stay with their run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from weight_store.errors import FormatError
from weight_store.head import Head
from weight_store.keys import ParsedKey, parse_key
from weight_store.manifest import Manifest
from weight_store.store import Entry, UnfinishedUpload

State = Literal["sealed", "dead", "undecided", "unknown"]

UNKNOWN_OBJECT = "not an object of weightcast"


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of a version number, and how that is known."""

    state: State
    why: str


@dataclass(frozen=True, slots=True)
class Facts:
    """What the bucket says about a run.

    ``floor``: the oldest version to keep, 0 until the raise has aged. ``now_s``: the store's clock. ``fates``: of every
    version from the floor on that has an object. ``nonces``: of the receipts (by version, rank, extra full) of ranks
    with several shards.
    """

    head: Head
    manifest: Manifest | None
    floor: int
    now_s: float
    min_age_s: float
    entries: tuple[Entry, ...]
    uploads: tuple[UnfinishedUpload, ...]
    fates: Mapping[int, Fate]
    nonces: Mapping[tuple[int, int, bool], str]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether one object, or the parts of one unfinished ``upload``, may be deleted, and why (not)."""

    key: str
    size: int
    delete: bool
    why: str
    upload: UnfinishedUpload | None = None


def judge(facts: Facts) -> list[Verdict]:
    """Return a verdict on every object of the listing and every unfinished upload, in the order of the listing."""
    receipts = {
        (parsed.version, parsed.rank, parsed.extra_full)
        for entry in facts.entries
        if (parsed := _parsed(entry.key)) is not None and parsed.kind == "receipt"
    }
    verdicts = [
        _aged(
            facts, Verdict(entry.key, entry.size, *_judge(facts, _parsed(entry.key), entry, receipts)), entry.modified_s
        )
        for entry in facts.entries
    ]
    return verdicts + [
        _aged(facts, Verdict(found.key, 0, *_judge_upload(facts, _parsed(found.key)), found), found.started_s)
        for found in facts.uploads
    ]


def _parsed(key: str) -> ParsedKey | None:
    try:
        return parse_key(key)
    except FormatError:
        return None


def _aged(facts: Facts, verdict: Verdict, written_s: float) -> Verdict:
    age_s = facts.now_s - written_s
    if not verdict.delete or age_s >= facts.min_age_s:
        return verdict
    why = f"younger than {facts.min_age_s:g} s by the store's clock ({verdict.why})"
    return Verdict(verdict.key, verdict.size, False, why, verdict.upload)


def _judge(
    facts: Facts, parsed: ParsedKey | None, entry: Entry, receipts: set[tuple[int | None, int | None, bool]]
) -> tuple[bool, str]:
    if parsed is None:
        return False, UNKNOWN_OBJECT
    if parsed.kind == "offer":
        return _judge_offer(facts, parsed.term or 0)
    if parsed.kind in {"layout", "asset"}:
        return False, f"a later launch may name this {parsed.kind} again"
    if parsed.version is None:
        return False, "the run itself"
    if parsed.version < facts.floor:
        return True, f"below the floor {facts.floor}"
    fate = facts.fates.get(parsed.version, Fate("unknown", "nothing is known of it"))
    if fate.state == "dead":
        if parsed.kind in {"open", "manifest"}:
            return False, "keeps a dead number from being used again"
        return True, f"version {parsed.version} is dead: {fate.why}"
    if fate.state != "sealed":
        return False, f"version {parsed.version} is {fate.state}: {fate.why}"
    return _judge_kept(facts, parsed, receipts)


def _judge_kept(
    facts: Facts, parsed: ParsedKey, receipts: set[tuple[int | None, int | None, bool]]
) -> tuple[bool, str]:
    """An object of a sealed version from the floor on: only signs, and shards that no receipt names, are dead."""
    version, rank = parsed.version or 0, parsed.rank or 0
    if parsed.kind == "sign":
        return True, f"version {version} is sealed and needs no more signs of life"
    where = version, rank, parsed.extra_full
    if parsed.kind == "shard":
        named = facts.nonces.get(where)
        if named is not None and named != parsed.nonce:
            return True, f"an attempt that lost: the receipt of rank {rank} names shard {named}"
        if parsed.extra_full and where not in receipts and version <= _full_version(facts):
            return True, f"a full that was never finished, and version {_full_version(facts)} has a newer one"
    return False, f"version {version} is sealed and not below the floor"


def _judge_offer(facts: Facts, term: int) -> tuple[bool, str]:
    if term < facts.head.term:
        return True, f"term {term} is over"
    return False, f"term {term} is the present one"


def _judge_upload(facts: Facts, parsed: ParsedKey | None) -> tuple[bool, str]:
    if parsed is None or parsed.kind != "shard" or parsed.version is None:
        return False, UNKNOWN_OBJECT
    version = parsed.version
    if version < facts.floor:
        return True, f"unfinished, below the floor {facts.floor}"
    fate = facts.fates.get(version, Fate("unknown", "nothing is known of it"))
    if fate.state == "dead":
        return True, f"unfinished, version {version} is dead: {fate.why}"
    if fate.state == "sealed":
        if not parsed.extra_full:
            return True, f"unfinished, version {version} was sealed without it"
        if version <= _full_version(facts):
            return True, f"an unfinished full, and version {_full_version(facts)} has a newer one"
    return False, f"perhaps still being sent: version {version} is {fate.state}"


def _full_version(facts: Facts) -> int:
    """Newest version with a visible full: an extra full of this or an older one can become visible no more."""
    return facts.manifest.full_version if facts.manifest is not None else 0

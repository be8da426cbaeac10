"""What was seen of a store, and what that means. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Reply = Literal["done", "precondition", "refused"]
"""How a conditional write ended: carried out, its condition did not hold (412, 409), or not possible at all."""

Kind = Literal["full", "create-only", "unquoted-etag", "racy", "ignored", "refused"]
State = Literal["ok", "warning", "failed"]

MAX_SKEW_S = 900.0
"""Amazon's limit: signatures whose time differs by more are refused."""
WARN_SKEW_S = 60.0

MEANING: dict[Kind, str] = {
    "full": (
        "full compare-and-set, also among racing writers: any number of coordinators and trainers may share it, and no "
        "version is lost or decided twice"
    ),
    "create-only": (
        "objects are created once, but not compared before they are replaced: versions are decided once, yet two "
        "coordinators, or two launches of a run, can overwrite each other's head"
    ),
    "unquoted-etag": (
        "it compares an ETag only without its quotes, which no S3 client leaves out (old Ceph RGW does this): the head "
        "can be created and never moved"
    ),
    "racy": (
        "conditional writes hold one at a time, but two that race can both succeed: two writers could both believe "
        "that they decided a version"
    ),
    "ignored": (
        "the conditions of conditional writes are ignored: what exists is overwritten without a word, so two writers "
        "could both believe that they decided a version"
    ),
    "refused": "conditional writes are refused: nothing of weightcast can be written",
}
_SINGLE = (
    "if you must stay on it: one coordinator with --single-writer, never two launches of a run at a time, and no "
    "proxy that repeats requests"
)


@dataclass(frozen=True, slots=True)
class Conditional:
    """How conditional writes ended, one at a time and in races.

    ``create_new``, ``create_again``: of a key that was free, then taken. ``replace_current``, ``replace_stale``,
    ``replace_missing``: with the present ETag, an old one, and of a key that is free. ``unquoted_current``,
    ``unquoted_stale``: without quotes, tried where the present ETag was not recognised. ``create_winners``,
    ``replace_winners``: successes in each race of ``writers``. ``counted``: of ``increments`` by compare-and-set.
    """

    create_new: Reply
    create_again: Reply | None = None
    replace_current: Reply | None = None
    replace_stale: Reply | None = None
    replace_missing: Reply | None = None
    unquoted_current: Reply | None = None
    unquoted_stale: Reply | None = None
    writers: int = 0
    create_winners: tuple[int, ...] = ()
    replace_winners: tuple[int, ...] = ()
    increments: int = 0
    counted: int = 0


@dataclass(frozen=True, slots=True)
class Multipart:
    """``early``: visible before it was completed. ``again``: completing a second upload to the same key."""

    completed: bool
    early: bool
    again: Reply
    intact: bool


@dataclass(frozen=True, slots=True)
class Observations:
    """All that was seen. None: not tried on this kind of store, or not possible.

    ``stale``: what a read from another connection did not see right after a write. ``ranges``: what came back wrong.
    ``checks_md5``, ``checks_crc32``: whether a body with a wrong one was refused. ``skew_s``: the store's clock less
    this machine's (seconds). Throughputs in bytes a second.
    """

    conditional: Conditional
    stale: tuple[str, ...] = ()
    ranges: tuple[str, ...] = ()
    lists: bool = True
    multipart: Multipart | None = None
    checks_md5: bool | None = None
    checks_crc32: bool | None = None
    skew_s: float | None = None
    upload_rate: float | None = None
    download_rate: float | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the diagnosis."""

    name: str
    state: State
    sentence: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """``safe``: any number of writers may use the store. ``verdict``: what to do, in plain words."""

    kind: Kind
    safe: bool
    verdict: str
    checks: tuple[Check, ...]


def classify(seen: Conditional) -> Kind:
    """Return the kind of store by its conditional writes alone."""
    if seen.create_new != "done" or seen.create_again == "refused":
        return "refused"
    if seen.create_again == "done":
        return "ignored"
    if any(winners > 1 for winners in seen.create_winners):
        return "racy"
    if seen.replace_current == "done" and seen.replace_stale == "precondition":
        lost = seen.counted != seen.increments
        return "racy" if lost or any(winners > 1 for winners in seen.replace_winners) else "full"
    if seen.unquoted_current == "done" and seen.unquoted_stale == "precondition":
        return "unquoted-etag"
    return "create-only"


def advice(kind: Kind, seen: Conditional) -> str:
    """What is safe on a store of this kind, and what to do."""
    if kind == "full":
        return f"safe: {MEANING[kind]}"
    if kind == "refused" or not can_move_head(seen):
        more = "" if kind in {"refused", "unquoted-etag"} else ", and replacing with If-Match does not work at all"
        return f"unusable: {MEANING[kind]}{more}; use another store, or a newer release of it"
    return f"not safe: {MEANING[kind]}; use another store, or a newer release of it; {_SINGLE}"


def can_move_head(seen: Conditional) -> bool:
    """Whether a single writer gets along: it needs replacing with the present ETag to work, safe or not."""
    return seen.create_new == "done" and seen.replace_current == "done"


def diagnose(seen: Observations) -> Diagnosis:
    """Say what the observations mean."""
    kind = classify(seen.conditional)
    checks = [
        _conditional_check(kind, seen.conditional),
        *_missing_check(seen.conditional),
        _check("read after write", seen.stale, "every write was seen at once from another connection"),
        _check("ranges", seen.ranges, "ranged reads return exactly what was asked"),
        _list_check(seen.lists),
        *_multipart_check(seen.multipart),
        *_checksum_check("Content-MD5", seen.checks_md5),
        *_checksum_check("CRC32", seen.checks_crc32),
        *_skew_check(seen.skew_s),
        *_rate_check("upload", seen.upload_rate),
        *_rate_check("download", seen.download_rate),
    ]
    failed = [check.name for check in checks[1:] if check.state == "failed"]
    verdict = advice(kind, seen.conditional)
    if failed and kind == "full":
        verdict = f"unusable: {' and '.join(failed)} failed, see above; use another store, or a newer release of it"
    return Diagnosis(kind, kind == "full" and not failed, verdict, tuple(checks))


def _conditional_check(kind: Kind, seen: Conditional) -> Check:
    sentence = MEANING[kind]
    winners = (*seen.create_winners, *seen.replace_winners)
    if winners:
        sentence += (
            f" ({len(winners)} races of {seen.writers} writers, at most {max(winners)} won; "
            f"{seen.counted} of {seen.increments} increments counted)"
        )
    return Check("conditional writes", "ok" if kind == "full" else "failed", sentence)


def _missing_check(seen: Conditional) -> list[Check]:
    if seen.replace_missing != "done":
        return []
    sentence = "If-Match creates an object that is not there: a control object deleted by hand may come back"
    return [Check("replacing what is gone", "warning", sentence)]


def _check(name: str, faults: tuple[str, ...], good: str) -> Check:
    return Check(name, "failed", "; ".join(faults)) if faults else Check(name, "ok", good)


def _list_check(lists: bool) -> Check:
    if lists:
        return Check("listing", "ok", "objects are listed right after they were written")
    return Check("listing", "warning", "listings lag behind: 'weightcast gc' may refuse to work; nothing else lists")


def _multipart_check(seen: Multipart | None) -> list[Check]:
    if seen is None:
        return []
    name = "multipart uploads"
    if not seen.completed:
        return [Check(name, "failed", "an upload in parts could not be completed: no shard above one part can be sent")]
    if seen.early:
        return [
            Check(name, "failed", "parts are visible before the upload is completed: a reader could take half a shard")
        ]
    if not seen.intact:
        return [Check(name, "failed", "what was uploaded in parts does not read back the same")]
    if seen.again != "precondition":
        sentence = (
            "completing an upload ignores If-None-Match: harmless for shards, whose names are never used twice, but "
            "two writers of one key are not told apart"
        )
        return [Check(name, "warning", sentence)]
    return [Check(name, "ok", "visible when completed, created once, and read back the same")]


def _checksum_check(name: str, checked: bool | None) -> list[Check]:
    if checked is None:
        return []
    if checked:
        return [Check(name, "ok", "a body with a wrong one is refused")]
    sentence = (
        "a body with a wrong one is accepted: damage on the way is found by readers, later, through our own digests"
    )
    return [Check(name, "warning", sentence)]


def _skew_check(skew_s: float | None) -> list[Check]:
    if skew_s is None:
        return []
    sentence = f"the store's clock is {abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} this machine's"
    if abs(skew_s) > MAX_SKEW_S:
        more = f"beyond {MAX_SKEW_S:.0f} s S3 refuses what is signed with it, so the store's time is used; set up NTP"
        return [Check("clock", "warning", f"{sentence}: {more}")]
    if abs(skew_s) > WARN_SKEW_S:
        return [Check("clock", "warning", f"{sentence}: set up NTP before it grows")]
    return [Check("clock", "ok", sentence if abs(skew_s) >= 1 else "the clocks agree")]


def _rate_check(name: str, rate: float | None) -> list[Check]:
    return [] if rate is None else [Check(name, "ok", f"{rate / 1e6:.0f} MB/s")]

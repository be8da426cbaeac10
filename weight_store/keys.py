"""Every key of the bucket is built and parsed here, and nowhere else. The grammar is in LAYOUT.md.

Numbers have a fixed width, so a LIST is in chain order; nothing but garbage collection lists a run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from weight_store.errors import FormatError

_RUN = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?")
_KEY = re.compile(
    r"(?P<run>[a-z0-9._-]+)/"
    r"(?:(?P<single>head|control)\.json"
    r"|layouts/(?P<layout>[0-9a-f]{64})"
    r"|assets/(?P<asset>[0-9a-f]{64})"
    r"|terms/(?P<term>\d{8})/(?P<offer>\d{5})\.offer"
    r"|v/(?P<version>\d{12})/(?:(?P<register>open|manifest)\.json"
    r"|signs/(?P<sign>\d{8})"
    r"|(?P<full>full/)?(?P<rank>\d{5})(?:-(?P<nonce>[0-9a-f]{16})\.shard|\.json)))",
    re.ASCII,  # \d alone also matches the digits of other scripts
)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NONCE = re.compile(r"[0-9a-f]{16}")


@lru_cache(maxsize=64)
def check_run(run: str) -> str:
    """Return ``run`` if it is a valid slug (1 to 63 of ``a-z 0-9 . _ -``, no ``..``); ``FormatError`` otherwise."""
    if not _RUN.fullmatch(run) or ".." in run:
        raise FormatError(
            f"{run[:80]!r} is not a run name: use 1 to 63 lower-case letters, digits, '.', '_' or '-', "
            "starting and ending with a letter or digit"
        )
    return run


def _digits(number: int, width: int, what: str) -> str:
    if not 0 <= number < 10**width:
        raise FormatError(f"{what} {number} does not fit the {width} digits that a key has for it")
    return f"{number:0{width}d}"


def _term(term: int) -> str:
    return _digits(term, 8, "term")


def _version(version: int) -> str:
    return _digits(version, 12, "version")


def _rank(rank: int) -> str:
    return _digits(rank, 5, "rank")


def _hex(text: str, pattern: re.Pattern[str], what: str) -> str:
    if not pattern.fullmatch(text):
        raise FormatError(f"{text[:80]!r} is not {what}")
    return text


def head_key(run: str) -> str:
    """Key of the one mutable pointer of a run."""
    return f"{check_run(run)}/head.json"


RUNS_PREFIX = "_runs/"
"""One empty marker a run, so that runs can be listed without listing their objects."""


def run_marker_key(run: str) -> str:
    """Key of the marker that a run exists: for people, and for coordinators that start. No decision rests on it."""
    return f"{RUNS_PREFIX}{check_run(run)}"


GC_PREFIX = "_gc/"
"""Short-lived objects by which garbage collection learns the store's clock. No run's name starts with ``_``."""
DOCTOR_PREFIX = "_doctor/"
"""What ``weightcast doctor`` writes and removes."""


def control_key(run: str) -> str:
    """Key of per-region targets and the retention floor."""
    return f"{check_run(run)}/control.json"


def layout_key(run: str, sha256: str) -> str:
    """Key of an immutable layout, named by the SHA-256 of its JSON."""
    return f"{check_run(run)}/layouts/{_hex(sha256, _SHA256, 'a SHA-256')}"


def asset_key(run: str, sha256: str) -> str:
    """Key of config.json, a tokenizer file or another small file, named by its SHA-256."""
    return f"{check_run(run)}/assets/{_hex(sha256, _SHA256, 'a SHA-256')}"


def offer_key(run: str, term: int, rank: int) -> str:
    """Key of the boxes that ``rank`` offers in ``term``."""
    return f"{check_run(run)}/terms/{_term(term)}/{_rank(rank)}.offer"


def open_key(run: str, version: int) -> str:
    """Key of the record that opens a version."""
    return f"{check_run(run)}/v/{_version(version)}/open.json"


def manifest_key(run: str, version: int) -> str:
    """Key of the decision register of a version: a manifest or an abort."""
    return f"{check_run(run)}/v/{_version(version)}/manifest.json"


def sign_key(run: str, version: int, number: int) -> str:
    """Key of the ``number``-th sign of life of a version that takes long."""
    return f"{check_run(run)}/v/{_version(version)}/signs/{_digits(number, 8, 'sign')}"


def shard_key(run: str, version: int, rank: int, nonce: str, *, extra_full: bool = False) -> str:
    """Key of one rank's shard; the nonce keeps attempts apart. ``extra_full`` for the later full of a position."""
    name = f"{_rank(rank)}-{_hex(nonce, _NONCE, 'a nonce of 16 hex digits')}.shard"
    return f"{check_run(run)}/v/{_version(version)}/{'full/' if extra_full else ''}{name}"


def receipt_key(run: str, version: int, rank: int, *, extra_full: bool = False) -> str:
    """Key of one rank's receipt."""
    return f"{check_run(run)}/v/{_version(version)}/{'full/' if extra_full else ''}{_rank(rank)}.json"


@dataclass(frozen=True, slots=True)
class ParsedKey:
    """What a key says. ``kind``: run (a marker), head, control, layout, asset, offer, open, manifest, sign, shard or
    receipt."""

    kind: str
    run: str
    sha256: str = ""
    term: int | None = None
    version: int | None = None
    rank: int | None = None
    nonce: str = ""
    extra_full: bool = False
    sign: int | None = None


@lru_cache(maxsize=4096)
def parse_key(key: str) -> ParsedKey:
    """Exact inverse of the builders above; ``FormatError`` for anything else."""
    if key.startswith(RUNS_PREFIX):
        return ParsedKey("run", check_run(key.removeprefix(RUNS_PREFIX)))
    match = _KEY.fullmatch(key)
    if match is None:
        raise FormatError(f"{key[:120]!r} is not a key of the weightcast layout")
    found = match.groupdict()
    run = check_run(found["run"])
    if found["single"]:
        return ParsedKey(found["single"], run)
    if found["layout"] or found["asset"]:
        kind = "layout" if found["layout"] else "asset"
        return ParsedKey(kind, run, sha256=found["layout"] or found["asset"])
    if found["term"]:
        return ParsedKey("offer", run, term=int(found["term"]), rank=int(found["offer"]))
    version = int(found["version"])
    if found["register"]:
        return ParsedKey(found["register"], run, version=version)
    if found["sign"]:
        return ParsedKey("sign", run, version=version, sign=int(found["sign"]))
    kind = "shard" if found["nonce"] else "receipt"
    extra_full = found["full"] is not None
    return ParsedKey(
        kind, run, version=version, rank=int(found["rank"]), nonce=found["nonce"] or "", extra_full=extra_full
    )

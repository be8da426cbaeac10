"""What the sidecar must still know after it was killed: which slot is the base, at which position. One small file.

Everything else it finds again: the trainer repeats what is undecided, the bucket says what was decided.

The file begins with the SHA-256 of the rest. Without it a flipped bit would name another slot, or a full that is not
there, and no digest further on would tell.
"""

from __future__ import annotations

import logging
from typing import Annotated, ClassVar

from pydantic import Field, StringConstraints

from weight_store.errors import FormatError
from weight_store.position import Position
from weight_store.receipt import DIGEST_BYTES, FullRef
from weight_store.records import Count, Part, Record, Sha256, Uuid, sha256_hex

_log = logging.getLogger(__name__)

STATE_FILE = "state.json"
SLOTS = 2

Slot = Annotated[int, Field(ge=0, lt=SLOTS)]
Digests = Annotated[str, StringConstraints(pattern=rf"^(?:[0-9a-f]{{{2 * DIGEST_BYTES}}})*$")]


def _digest(digests: str, entry: int) -> bytes:
    return bytes.fromhex(digests[32 * entry : 32 * (entry + 1)])


class Base(Part):
    """A slot holds exactly the weights of ``position``. ``digests``: XXH3-128 of each owned group, as in receipts."""

    slot: Slot
    position: Position
    ordinal: Count | None = None
    digests: Digests

    def digest(self, entry: int) -> bytes:
        """Digest of the rank's ``entry``-th group."""
        return _digest(self.digests, entry)


class Waiting(Part):
    """A slot holds publication ``ordinal``, copied and not sealed. ``digests``: of its groups, taken after the copy."""

    slot: Slot
    ordinal: Count
    digests: Digests

    def digest(self, entry: int) -> bytes:
        """Digest of the rank's ``entry``-th group."""
        return _digest(self.digests, entry)


class State(Record):
    """``state.json`` in the arena, replaced atomically.

    ``waiting``: what was copied last, so that a later sidecar too knows whether its memory still holds that.
    ``full_due``: an extra full of this base is being uploaded; it is begun again after a crash. ``fulls`` are those of
    this rank that are durable and not yet visible through a manifest.
    """

    FORMAT: ClassVar[str] = "weightcast.sidecar-state"

    run_id: Uuid
    layout: Sha256
    base: Base | None = None
    waiting: Waiting | None = None
    full_due: Base | None = None
    fulls: tuple[FullRef, ...] = ()


def seal(state: State) -> bytes:
    """The file's content."""
    data = state.to_bytes()
    return sha256_hex(data).encode() + b"\n" + data


def unseal(data: bytes) -> State | None:
    """What :func:`seal` was given; None, and a line in the log, for anything else."""
    digest, _, body = data.partition(b"\n")
    if sha256_hex(body).encode() != digest:
        _log.warning("the sidecar's %s is damaged: what it said is read from the bucket again", STATE_FILE)
        return None
    try:
        return State.parse(body, key=STATE_FILE)
    except FormatError as error:
        _log.warning("%s; what it said is read from the bucket again", error)
        return None

"""The life of one publication in the sidecar, as a table. Pure: the loop in sidecar.py carries it out.

::

    OPENING ──Observed──▶ SENDING ──Sent──▶ AWAITING ──Observed──▶ SEALED or FAILED
     ▲   │  ╲              ▲   │               ▲
     │   │   ▶ REBUILDING ─┘   │               │ its receipt is there
     │   │          │  │       │               │
     ├───┼─Interrupted─┼───────┤               │
         └───────── Refused ───┴────────▶ WITHDRAWING ──Observed, GivenUp, Refused──▶ FAILED

What is refused before a version is known, or because nobody waits for it any more, fails at once. OPENING asks for the
version, or, once it is known, looks at it: after an interruption it may have been decided. A version is never opened
twice for one publication: when it was aborted, the other ranks have gone on. WITHDRAWING says that this rank will
never send its shard, so that they need not wait; a receipt that is there all the same, from before a restart, counts,
and then the decision is awaited: as long as the coordinator knows of the version, whatever else it says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from coordinator import errors as remote
from coordinator.wire import VersionAnswer
from trainer_agent.decisions import source_for
from trainer_agent.state import Base


class Phase(StrEnum):
    """What the loop does next; the last two are final."""

    OPENING = "opening"
    REBUILDING = "rebuilding"
    SENDING = "sending"
    AWAITING = "awaiting"
    WITHDRAWING = "withdrawing"
    SEALED = "sealed"
    FAILED = "failed"


FINAL = frozenset({Phase.SEALED, Phase.FAILED})
UNWANTED = frozenset({remote.Fenced.code, remote.UnknownVersion.code, remote.UnknownRun.code, remote.WrongRun.code})
"""Refusals that say that nobody waits for the version any more."""


@dataclass(frozen=True, slots=True)
class Observed:
    """The coordinator told the version's state."""

    answer: VersionAnswer


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """The base was made from the bucket, or (None) cannot be."""

    base: Base | None


@dataclass(frozen=True, slots=True)
class Sent:
    """Shard and receipt are durable."""


@dataclass(frozen=True, slots=True)
class Interrupted:
    """Store or coordinator failed for a while, or a decision was heard of: the version is to be looked at."""


@dataclass(frozen=True, slots=True)
class Refused:
    """This publication cannot go on. ``code`` as in errors.py."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class GivenUp:
    """The version will never be sealed by this rank's doing: an abort of it is in the bucket, or it is long over."""


SessionEvent = Observed | Rebuilt | Sent | Interrupted | Refused | GivenUp


@dataclass(frozen=True, slots=True)
class Progress:
    """One publication. ``base`` is what the sidecar holds; ``source`` is set from SENDING on, ``failure`` from
    WITHDRAWING on.
    """

    ordinal: int
    step: int
    slot: int
    base: Base | None
    phase: Phase = Phase.OPENING
    version: int | None = None
    answer: VersionAnswer | None = None
    source: Literal["full", "delta"] | None = None
    failure: Refused | None = None


class IllegalTransition(RuntimeError):
    """The loop handed over an event that its phase does not have: a defect, never a consequence of input."""


def advance(progress: Progress, event: SessionEvent) -> Progress:
    """The next state. Raises ``IllegalTransition`` for an event that the table does not have."""
    try:
        rule = TRANSITIONS[progress.phase, type(event)]
    except KeyError:
        raise IllegalTransition(f"{type(event).__name__} in phase {progress.phase}") from None
    return rule(progress, event)


def _observe(progress: Progress, event: SessionEvent) -> Progress:
    if not isinstance(event, Observed):
        raise IllegalTransition(str(event))
    answer = event.answer
    known = replace(progress, version=answer.version, answer=answer)
    if answer.state == "sealed":
        return replace(known, phase=Phase.SEALED)
    if answer.state == "aborted":
        aborted = _aborted(answer)
        over = aborted.code == remote.Fenced.code
        return replace(known, phase=Phase.FAILED, failure=aborted if over else progress.failure or aborted)
    if progress.phase in (Phase.AWAITING, Phase.WITHDRAWING):
        return replace(known, phase=Phase.AWAITING)
    return _begin(known, answer)


def _aborted(answer: VersionAnswer) -> Refused:
    # A version that was fenced tells of its whole launch: the next publication would only be told so then.
    fenced = answer.reason.startswith(f"{remote.Fenced.code}:")
    code = remote.Fenced.code if fenced else remote.VersionAborted.code
    return Refused(code, f"version {answer.version} was given up: {answer.reason}")


def _begin(progress: Progress, answer: VersionAnswer) -> Progress:
    source = source_for(progress.base, answer.parent)
    if source == "rebuild":
        return replace(progress, phase=Phase.REBUILDING, source=None)
    return replace(progress, phase=Phase.SENDING, source=source)


def _rebuilt(progress: Progress, event: SessionEvent) -> Progress:
    if not isinstance(event, Rebuilt):
        raise IllegalTransition(str(event))
    source: Literal["full", "delta"] = "full" if event.base is None else "delta"
    return replace(progress, base=event.base, phase=Phase.SENDING, source=source)


def _to(phase: Phase) -> Callable[[Progress, SessionEvent], Progress]:
    return lambda progress, _: replace(progress, phase=phase)


def _refuse(progress: Progress, event: SessionEvent) -> Progress:
    if not isinstance(event, Refused):
        raise IllegalTransition(str(event))
    if progress.version is None or progress.phase is Phase.AWAITING or event.code in UNWANTED:
        return replace(progress, phase=Phase.FAILED, failure=event)
    return replace(progress, phase=Phase.WITHDRAWING, failure=event)


def _fail(progress: Progress, event: SessionEvent) -> Progress:
    """Nobody takes the withdrawal. What began it is the reason, unless the whole launch is over."""
    if isinstance(event, Refused) and event.code == remote.Fenced.code:
        return replace(progress, phase=Phase.FAILED, failure=event)
    return replace(progress, phase=Phase.FAILED)


TRANSITIONS: dict[tuple[Phase, type[SessionEvent]], Callable[[Progress, SessionEvent], Progress]] = {
    (Phase.OPENING, Observed): _observe,
    (Phase.OPENING, Refused): _refuse,
    (Phase.REBUILDING, Rebuilt): _rebuilt,
    (Phase.REBUILDING, Interrupted): _to(Phase.OPENING),
    (Phase.REBUILDING, Refused): _refuse,
    (Phase.SENDING, Sent): _to(Phase.AWAITING),
    (Phase.SENDING, Interrupted): _to(Phase.OPENING),
    (Phase.SENDING, Refused): _refuse,
    (Phase.AWAITING, Observed): _observe,
    (Phase.AWAITING, Interrupted): _to(Phase.AWAITING),
    (Phase.AWAITING, Refused): _refuse,
    (Phase.WITHDRAWING, Observed): _observe,
    (Phase.WITHDRAWING, Interrupted): _to(Phase.AWAITING),
    (Phase.WITHDRAWING, GivenUp): _to(Phase.FAILED),
    (Phase.WITHDRAWING, Refused): _fail,
}

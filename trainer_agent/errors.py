"""What can go wrong on the trainer's side, grouped by what the caller does about it.

::

    TrainerError
    ├── Misuse                 fix the call; raised at the first publication whatever ``strict`` says
    │   ├── InvalidPieces      a piece has no valid name, shape, dtype or box
    │   └── PiecesChanged      the pieces differ from those of the first publication of this launch
    ├── LayoutRefused          the ranks' pieces do not fit together, or differ from the run's earlier tensors
    ├── ArenaTooSmall          make room in shared memory
    ├── Fenced                 another launch took the run over: stop this one
    ├── PublicationFailed      this version will not come to be; the next publication goes on
    │   ├── VersionAborted     it was opened and then given up (a rank withdrew or was silent, a receipt refused)
    │   ├── WeightsDamaged     the copy in shared memory changed while it waited to be sent
    │   └── StillUndecided     an earlier one is still undecided, and waiting for it would hold up training
    ├── SidecarFailed          the sidecar cannot run, or ended again and again
    ├── SetupRefused           store, coordinator or run as given cannot work: fix them; raised at the start
    └── Unreachable            store, coordinator or another rank did not answer in time at the start

Each class has a stable ``code`` (append only). Outside the first publication none of them is raised from ``publish``
unless ``strict`` is set: they are found in ``handle.error`` and in the log.
"""

from __future__ import annotations


class TrainerError(Exception):
    """Base of every error of this package; never raised itself."""

    code = "trainer"


class Misuse(TrainerError):
    """The Publisher was called in a way that cannot work."""

    code = "misuse"


class InvalidPieces(Misuse):
    """A piece has no valid name, shape, dtype or box."""

    code = "invalid-pieces"


class PiecesChanged(Misuse):
    """A tensor was added, is missing, was reshaped or changed dtype since the first publication of this launch."""

    code = "pieces-changed"


class LayoutRefused(TrainerError):
    """All ranks' pieces together make no layout, or not that of the run."""

    code = "layout"


class ArenaTooSmall(TrainerError):
    """Shared memory has no room for two copies of the rank's part of the weights."""

    code = "arena-too-small"


class Fenced(TrainerError):
    """Another launch of the trainer took the run over; this one can never publish again."""

    code = "fenced"


class PublicationFailed(TrainerError):
    """This publication did not become a version; the next one goes on from the same base."""

    code = "publication-failed"


class VersionAborted(PublicationFailed):
    """The version was opened and then given up; the sentence says why."""

    code = "version-aborted"


class WeightsDamaged(PublicationFailed):
    """The copy in shared memory no longer is what was copied: something wrote to it, or the memory is faulty."""

    code = "weights-damaged"


class StillUndecided(PublicationFailed):
    """An earlier publication has been undecided for so long that this one was dropped instead of waiting."""

    code = "still-undecided"


class SidecarFailed(TrainerError):
    """The sidecar process cannot be started, or ended again and again."""

    code = "sidecar-failed"


class SetupRefused(TrainerError):
    """The bucket does not exist or refuses, the coordinator refuses, an argument is wrong; the sentence says which."""

    code = "setup-refused"


class Unreachable(TrainerError):
    """Store, coordinator or another rank did not answer in time; the next publication tries again."""

    code = "unreachable"


_REPORTED = (
    LayoutRefused,
    ArenaTooSmall,
    Fenced,
    VersionAborted,
    WeightsDamaged,
    StillUndecided,
    SidecarFailed,
    Misuse,
)


def by_code(code: str, message: str, *, starting: bool = False) -> TrainerError:
    """The error that the sidecar reported. Another package's code is ``PublicationFailed``, at the start
    ``SetupRefused``.
    """
    other = SetupRefused if starting else PublicationFailed
    found: type[TrainerError] = next((kind for kind in _REPORTED if kind.code == code), other)
    return found(message)

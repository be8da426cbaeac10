"""What the coordinator answers when it cannot do as asked, grouped by what the caller does about it.

::

    CoordinatorError
    ├── TryAgain                       nothing is wrong for good: the same request later, with backoff
    │   ├── CoordinatorUnreachable     no connection, no answer in time, or an answer that is not ours
    │   ├── BucketUnavailable          the coordinator cannot reach the object store
    │   ├── VersionUndecided           an earlier publication must be decided first
    │   ├── TermPending                rank 0 of this launch has not taken the run over yet
    │   ├── ReceiptMissing             the reported receipt is not in the bucket
    │   ├── TooSlow                    the body did not come in time
    │   └── TooBusy                    writers keep interfering, or too many agents report
    ├── Fenced                         a newer launch owns the run: this trainer stops publishing for good
    ├── Refused                        the request is at fault: change it
    │   ├── BadRequest                 a body or parameter is malformed
    │   ├── BodyTooLarge               the body is larger than any request needs to be
    │   ├── UnknownRoute               no such address
    │   ├── MethodNotAllowed           the address exists, the method does not
    │   ├── TokenRequired              no token, or one that is not known (any more)
    │   ├── ScopeMissing               the token is known, but not for this
    │   ├── WrongHost                  a coordinator without tokens was asked under another name than this machine's
    │   ├── ForeignPage                a browser sent this for a page of another origin
    │   ├── WrongMediaType             a body that does not say that it is JSON
    │   ├── UnknownRun                 no such run in the bucket
    │   ├── UnknownTerm                the run never had this term
    │   ├── UnknownVersion             no such version (any more)
    │   ├── LayoutRefused              the offers make no layout, or the tensors of the run changed
    │   ├── PublicationConflict        ranks disagree on what they publish
    │   ├── PublicationPassed          this publication was decided long ago
    │   ├── VersionAborted             the version was given up
    │   └── WrongRun                   the run was replaced by another one of the same name
    └── Broken                         a person must act
        ├── BucketRefused              permission, credentials or bucket of the coordinator
        ├── BucketDamaged              an object of the bucket is not what its key promises
        ├── CannotListen               address, certificate or missing tokens keep it from starting (never over HTTP)
        ├── TokenFileRefused           a file of tokens, or of a token, cannot be used (never over HTTP)
        └── InternalFault              a defect in the coordinator; its log has the traceback

Every class has a stable ``code`` (append only) and the HTTP ``status`` under which it travels. The client raises the
class whose code a problem body names.
"""

from __future__ import annotations

from collections.abc import Iterator


class CoordinatorError(Exception):
    """Base of every error of this package. The sentence says what was wrong, where, and what to do."""

    code = "coordinator"
    status = 500


class TryAgain(CoordinatorError):
    """The same request may succeed later."""

    code = "try-again"
    status = 503


class CoordinatorUnreachable(TryAgain):
    """Raised by the client alone: nothing that speaks the coordinator's API answered."""

    code = "coordinator-unreachable"


class BucketUnavailable(TryAgain):
    """The object store does not answer the coordinator (now)."""

    code = "store-unavailable"


class VersionUndecided(TryAgain):
    """One version of a run is undecided at a time; the earlier one comes first."""

    code = "version-undecided"
    status = 409


class TermPending(TryAgain):
    """The head does not carry this launch (yet)."""

    code = "term-pending"
    status = 409


class ReceiptMissing(TryAgain):
    """A rank reported a receipt that the bucket does not hold."""

    code = "receipt-missing"
    status = 409


class TooBusy(TryAgain):
    """Too many writers or agents at once."""

    code = "too-busy"


class TooSlow(TryAgain):
    """The body did not come in time."""

    code = "too-slow"
    status = 408


class Fenced(CoordinatorError):
    """The term is over: another launch took the run."""

    code = "fenced"
    status = 409


class Refused(CoordinatorError):
    """The request can never succeed as it is."""

    code = "refused"
    status = 400


class BadRequest(Refused):
    """A body or parameter does not have the form that the API prescribes."""

    code = "bad-request"
    status = 422


class BodyTooLarge(Refused):
    """Refused before the body is held in memory."""

    code = "body-too-large"
    status = 413


class UnknownRoute(Refused):
    """The API has no such address."""

    code = "unknown-route"
    status = 404


class MethodNotAllowed(Refused):
    """The address does not take this method."""

    code = "method-not-allowed"
    status = 405


class TokenRequired(Refused):
    """The route takes a token, and the request has none that the coordinator knows."""

    code = "token-required"
    status = 401


class ScopeMissing(Refused):
    """The token is known, but has no scope that this takes."""

    code = "scope-missing"
    status = 403


class WrongHost(Refused):
    """A coordinator without tokens answers only requests that name its own machine as their host."""

    code = "wrong-host"
    status = 421


class ForeignPage(Refused):
    """A browser sent this for a page of another origin, which may look at most."""

    code = "foreign-page"
    status = 403


class WrongMediaType(Refused):
    """The body does not say that it is JSON."""

    code = "wrong-media-type"
    status = 415


class UnknownRun(Refused):
    """The bucket has no head for this run."""

    code = "unknown-run"
    status = 404


class UnknownTerm(Refused):
    """The run has not reached this term."""

    code = "unknown-term"
    status = 404


class UnknownVersion(Refused):
    """The version was never opened, or was deleted by retention."""

    code = "unknown-version"
    status = 404


class LayoutRefused(Refused):
    """The ranks' boxes do not tile the tensors, or the tensors differ from the run's."""

    code = "layout"
    status = 422


class PublicationConflict(Refused):
    """Ranks of one term give the same ordinal different contents."""

    code = "publication-conflict"
    status = 409


class PublicationPassed(Refused):
    """A later publication of the same term is sealed already."""

    code = "publication-passed"
    status = 409


class VersionAborted(Refused):
    """The version exists, but was given up."""

    code = "version-aborted"
    status = 409


class WrongRun(Refused):
    """The caller holds another run of the same name."""

    code = "wrong-run"
    status = 409


class Broken(CoordinatorError):
    """Nothing that the caller does helps."""

    code = "broken"


class BucketRefused(Broken):
    """The store refuses the coordinator: bucket, keys, permission or conditional writes."""

    code = "store-refused"


class BucketDamaged(Broken):
    """An object in the bucket is malformed, altered, or contradicts another."""

    code = "bucket-damaged"


class CannotListen(Broken):
    """The coordinator cannot start on this address, or not safely."""

    code = "cannot-listen"


class TokenFileRefused(Broken):
    """A file of tokens, or of one token or certificate, is missing, malformed or open to others."""

    code = "token-file"


class InternalFault(Broken):
    """A defect; details are in the log, never in the answer."""

    code = "internal"


def _leaves(root: type[CoordinatorError]) -> Iterator[type[CoordinatorError]]:
    yield root
    for child in root.__subclasses__():
        yield from _leaves(child)


def error_for(code: str, status: int, detail: str) -> CoordinatorError:
    """The error that a problem body describes; an unknown code (a newer coordinator) goes by its status."""
    known = {kind.code: kind for kind in _leaves(CoordinatorError)}
    if code in known:
        return known[code](detail)
    if status in (429, 502, 503, 504):
        return TryAgain(detail)
    return Refused(detail) if 400 <= status < 500 else Broken(detail)

"""What trainer ranks call: take a run over, report offers, open versions, report receipts."""

from __future__ import annotations

from fastapi import APIRouter

from coordinator.errors import (
    BadRequest,
    BucketUnavailable,
    Fenced,
    LayoutRefused,
    PublicationConflict,
    PublicationPassed,
    ReceiptMissing,
    TermPending,
    UnknownRun,
    UnknownTerm,
    UnknownVersion,
    VersionUndecided,
    WrongRun,
)
from coordinator.problems import responses
from coordinator.routes.parameters import RankNumber, RunName, Service, TermNumber, VersionNumber, Wait, WorldSizeQuery
from coordinator.wire import (
    LayoutAnswer,
    OfferReport,
    OpenRequest,
    ProgressReport,
    ReceiptReport,
    TermAnswer,
    TermRequest,
    VersionAnswer,
    WithdrawalReport,
)

router = APIRouter(prefix="/v1/runs/{run}", tags=["trainers"])


@router.post(
    "/terms",
    summary="Take a run over",
    responses=responses(Fenced, WrongRun, TermPending, BadRequest, BucketUnavailable),
)
async def take_over(run: RunName, request: TermRequest, service: Service) -> TermAnswer:
    """Start a term of the run for a launch of a training job, creating the run if it is new.

    Rank 0 asks with `takeover` true: the term grows by one and every earlier trainer is fenced. Asking again with the
    same launch gives the same term. With `expected_term`, the term seen before asking (0: no run), the run is taken
    over from that term only: a request that comes late is told who was quicker. Other ranks ask with `takeover` false
    and wait up to `wait_s` for their launch.
    """
    return await service.take_over(run, request)


@router.put(
    "/terms/{term}/offers/{rank}",
    summary="Report that an offer is in the bucket",
    responses=responses(Fenced, UnknownRun, UnknownTerm, LayoutRefused, BucketUnavailable),
)
async def report_offer(
    run: RunName, term: TermNumber, rank: RankNumber, report: OfferReport, service: Service
) -> LayoutAnswer:
    """Take note of the boxes that one rank offers. The answer has the layout once all ranks have offered.

    Offers that make no layout (overlaps, holes, contradictions, tensors unlike the run's) are refused with the tensor
    and the ranks by name, to every rank alike.
    """
    return await service.report_offer(run, term, rank, report)


@router.get(
    "/terms/{term}/layout",
    summary="The layout of a term",
    responses=responses(Fenced, UnknownRun, UnknownTerm, LayoutRefused, BucketUnavailable),
)
async def layout(
    run: RunName, term: TermNumber, world_size: WorldSizeQuery, service: Service, wait: Wait = 0
) -> LayoutAnswer:
    """Return the SHA-256 of the layout, or the ranks whose offers are missing after `wait` seconds."""
    return await service.layout(run, term, world_size, wait)


@router.post(
    "/versions",
    summary="Open a version",
    responses=responses(
        Fenced,
        WrongRun,
        VersionUndecided,
        PublicationConflict,
        PublicationPassed,
        UnknownRun,
        UnknownTerm,
        LayoutRefused,
        BucketUnavailable,
    ),
)
async def open_version(run: RunName, request: OpenRequest, service: Service) -> VersionAnswer:
    """Assign a version to the publication (term, step, ordinal) and fix its parent: the head.

    Every rank asks and all get the same version. One version of a run is undecided at a time; `version-undecided`
    means that an earlier publication must be decided first. A publication is opened once: asked again after it was
    aborted, the answer says so, and the step is published anew as the next publication.
    """
    return await service.open_version(run, request)


@router.put(
    "/versions/{version}/receipts/{rank}",
    summary="Report that a receipt is in the bucket",
    responses=responses(Fenced, WrongRun, ReceiptMissing, UnknownRun, UnknownVersion, BadRequest, BucketUnavailable),
)
async def report_receipt(
    run: RunName, version: VersionNumber, rank: RankNumber, report: ReceiptReport, service: Service
) -> VersionAnswer:
    """Take note that a rank's shard and receipt are durable; the last report seals the version.

    The report only makes sealing quicker: receipts are also found in the bucket. An answer with state `aborted` means
    that the version was given up before; its `reason` says why.
    """
    return await service.report_receipt(run, version, rank, report)


@router.put(
    "/versions/{version}/progress/{rank}",
    summary="Report that an upload moves",
    responses=responses(Fenced, WrongRun, UnknownRun, UnknownTerm, UnknownVersion, BadRequest, BucketUnavailable),
)
async def report_progress(
    run: RunName, version: VersionNumber, rank: RankNumber, report: ProgressReport, service: Service
) -> VersionAnswer:
    """Take note that a rank still works on its shard: bytes moved since it last said so.

    An undecided version expires when there was no sign of life for a while: its opening, a receipt, or this, which a
    slow upload repeats every few seconds. A rank that has nothing new to report must not call it.
    """
    return await service.report_progress(run, version, rank, report)


@router.put(
    "/versions/{version}/withdrawals/{rank}",
    summary="Report that a shard will not come",
    responses=responses(Fenced, WrongRun, UnknownRun, UnknownTerm, UnknownVersion, BadRequest, BucketUnavailable),
)
async def withdraw(
    run: RunName, version: VersionNumber, rank: RankNumber, report: WithdrawalReport, service: Service
) -> VersionAnswer:
    """Give an undecided version up, since a rank cannot send its shard: a full disk, a bucket that refuses it.

    Other ranks need not wait until it expires; the answer's `reason` names the rank, the code and the sentence. A rank
    whose receipt is in the bucket has nothing to withdraw: the version stays as it is. Idempotent.
    """
    return await service.withdraw(run, version, rank, report)

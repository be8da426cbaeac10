"""What everybody may ask: runs, versions, the head, events."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import StreamingResponse

from coordinator.errors import (
    BadRequest,
    BucketUnavailable,
    UnknownRun,
    UnknownVersion,
    VersionAborted,
    VersionUndecided,
)
from coordinator.events import EventId
from coordinator.guard import while_admitted
from coordinator.problems import responses
from coordinator.routes.parameters import RunName, Service, VersionNumber, Wait
from coordinator.wire import HeadAnswer, RunAnswer, VersionAnswer
from weight_store.records import MAX_VERSION

router = APIRouter(prefix="/v1/runs", tags=["readers"])

_EVENT_STREAM = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""Proxies (nginx reads the second header) must pass events on as they come."""


@router.get("", summary="All runs", responses=responses(BucketUnavailable))
async def runs(service: Service) -> list[RunAnswer]:
    """Return every run of the bucket, in order of name."""
    return await service.runs()


@router.get("/{run}", summary="One run", responses=responses(UnknownRun, BucketUnavailable))
async def run(run: RunName, service: Service) -> RunAnswer:
    """Return the run's head, the version that is being decided if there is one, and its regions."""
    return await service.run(run)


@router.get("/{run}/versions", summary="Versions, newest first", responses=responses(UnknownRun, BucketUnavailable))
async def versions(
    run: RunName,
    service: Service,
    limit: Annotated[int, Query(description="How many at most.", ge=1, le=500)] = 50,
    before: Annotated[
        int | None, Query(description="Only versions below this one (for paging).", ge=1, le=MAX_VERSION)
    ] = None,
) -> list[VersionAnswer]:
    """Return the newest versions, aborted ones included, as far as the bucket still has them."""
    return await service.versions(run, limit, before)


@router.get(
    "/{run}/versions/{version}",
    summary="One version",
    responses=responses(UnknownRun, UnknownVersion, BucketUnavailable),
)
async def version(run: RunName, version: VersionNumber, service: Service, wait: Wait = 0) -> VersionAnswer:
    """Return a version's state (undecided, sealed, aborted), parent, sizes, receipts and regions.

    With `wait` the answer comes once the version is decided, or after that many seconds.
    """
    return await service.version(run, version, wait)


@router.get(
    "/{run}/versions/{version}/manifest",
    summary="The manifest of a version",
    response_class=Response,
    responses={
        200: {
            "content": {"application/json": {}},
            "description": "The manifest, byte for byte; its ETag is its SHA-256.",
        },
        **responses(UnknownRun, UnknownVersion, VersionUndecided, VersionAborted, BucketUnavailable),
    },
)
async def manifest(run: RunName, version: VersionNumber, service: Service) -> Response:
    """Return the manifest as it lies in the bucket. It never changes."""
    data, position = await service.manifest(run, version)
    headers = {"ETag": f'"{position.sha256}"', "Cache-Control": "public, max-age=31536000, immutable"}
    return Response(data, media_type="application/json", headers=headers)


@router.get("/{run}/head", summary="The head", responses=responses(UnknownRun, BucketUnavailable))
async def head(
    run: RunName,
    service: Service,
    after: Annotated[
        int | None, Query(description="Wait until the head is past this version.", ge=0, le=MAX_VERSION)
    ] = None,
    wait: Wait = 0,
) -> HeadAnswer:
    """Return where the head is; with `after`, once it is past that version or `wait` seconds are over."""
    return await service.head(run, after, wait)


@router.get(
    "/{run}/events",
    summary="Events as they happen (SSE)",
    response_class=StreamingResponse,
    responses={
        200: {"content": {"text/event-stream": {}}, "description": "Events for ever, with keep-alive comments."},
        **responses(UnknownRun, BadRequest, BucketUnavailable),
    },
)
async def events(
    run: RunName,
    service: Service,
    request: Request,
    last_event_id: Annotated[str | None, Header(description="Resume after this event.", max_length=64)] = None,
    after: Annotated[str | None, Query(description="As Last-Event-ID, for a first connection.", max_length=64)] = None,
) -> StreamingResponse:
    """Stream `opened`, `sealed` and `aborted` (data: the version), `regions` (counts for the head) and `gap`.

    Ids are places in the life of the run, `<version>.<1 opened, 2 decided>`: a client resumes with `Last-Event-ID` at
    any coordinator. Without one the stream begins with the sealing of the head. `gap` says that what happened up to the
    id in `until` is not sent again: list the versions. The stream ends when its token is revoked, at the next event
    or comment.
    """
    wanted = last_event_id or after
    event_id = EventId.parse(wanted) if wanted else None
    if wanted and event_id is None:
        raise BadRequest("Last-Event-ID is not an id of this stream: <version>.1 or <version>.2")
    chunks = while_admitted(request, await service.events(run, event_id))
    return StreamingResponse(chunks, media_type="text/event-stream", headers=_EVENT_STREAM)

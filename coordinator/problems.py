"""Errors as RFC 9457 problem bodies: one table from exceptions to what a client is told."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from coordinator import access
from coordinator.errors import (
    BadRequest,
    BodyTooLarge,
    BucketDamaged,
    BucketRefused,
    BucketUnavailable,
    CoordinatorError,
    InternalFault,
    LayoutRefused,
    MethodNotAllowed,
    TooBusy,
    TooSlow,
    TryAgain,
    UnknownRoute,
)
from coordinator.wire import Problem
from weight_store.errors import (
    FormatError,
    LayoutError,
    ObjectNotFound,
    PreconditionFailed,
    StoreRefused,
    StoreUnavailable,
    WeightStoreError,
)

logger = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
MAX_BODY_BYTES = 64 << 10
"""The largest real request (an agent's heartbeat) has about 2 KB."""
BODY_TIMEOUT_S = 20.0
"""A body of that size takes longer than this only from somebody who wants it to."""

_KINDS: tuple[tuple[type[WeightStoreError], type[CoordinatorError]], ...] = (
    (StoreUnavailable, BucketUnavailable),
    (StoreRefused, BucketRefused),
    (PreconditionFailed, TooBusy),
    (ObjectNotFound, BucketDamaged),  # what may be missing is handled where it is read
    (LayoutError, LayoutRefused),
    (FormatError, BucketDamaged),
    (WeightStoreError, BucketDamaged),
)


def from_store_error(error: WeightStoreError) -> CoordinatorError:
    """The coordinator's error for one of the bucket, with the same sentence."""
    kind = next(ours for theirs, ours in _KINDS if isinstance(error, theirs))
    return kind(str(error))


def problem_response(error: CoordinatorError, headers: dict[str, str] | None = None) -> JSONResponse:
    """The problem body of an error. ``type`` is about:blank, so ``title`` is HTTP's own phrase (RFC 9457, 4.2.1)."""
    problem = Problem(title=HTTPStatus(error.status).phrase, status=error.status, detail=str(error), code=error.code)
    headers = dict(headers or {})
    if isinstance(error, TryAgain):
        headers.setdefault("Retry-After", "1")
    return JSONResponse(problem.model_dump(), error.status, headers, MEDIA_TYPE)


def responses(*kinds: type[CoordinatorError]) -> dict[int | str, dict[str, Any]]:
    """OpenAPI's description of the problems that a route answers with."""
    found: dict[int | str, dict[str, Any]] = {}
    for kind in kinds:
        line = f"`{kind.code}`: {(kind.__doc__ or '').strip()}"
        entry = found.setdefault(kind.status, {"description": "", "content": {MEDIA_TYPE: {"schema": _PROBLEM}}})
        entry["description"] = f"{entry['description']}\n\n{line}".strip()
    return found


_PROBLEM = Problem.model_json_schema()


def install(app: FastAPI) -> None:
    """Make every error of the app a problem body."""
    app.add_exception_handler(CoordinatorError, _on_coordinator_error)
    app.add_exception_handler(WeightStoreError, _on_store_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_defect)


async def _on_coordinator_error(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, CoordinatorError):
        return await _on_defect(request, error)
    return problem_response(error)


async def _on_store_error(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, WeightStoreError):
        return await _on_defect(request, error)
    ours = from_store_error(error)
    logger.warning("%s %s: %s", request.method, _path(request), error)
    return problem_response(ours)


async def _on_invalid(request: Request, error: Exception) -> JSONResponse:
    """Say where and what; never repeat the input, which may be megabytes or secret."""
    if not isinstance(error, RequestValidationError):
        return await _on_defect(request, error)
    found = error.errors()
    told = [f"{'.'.join(str(part) for part in item['loc'][:6])}: {item['msg']}"[:300] for item in found[:3]]
    more = f" (and {len(found) - 3} more)" if len(found) > 3 else ""
    return problem_response(BadRequest(f"{'; '.join(told)}{more}"))


def _path(request: Request) -> str:
    """Where the request went, as far as sentences show it. ``request.url`` trips over queries that are no UTF-8."""
    return str(request.scope["path"])[:200]


async def _on_http(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, HTTPException):
        return await _on_defect(request, error)
    path = _path(request)
    if error.status_code == HTTPStatus.NOT_FOUND:
        return problem_response(UnknownRoute(f"there is nothing at {path}: the API is described at /docs"))
    if error.status_code == BodyTooLarge.status:
        return problem_response(too_large())
    if error.status_code == TooSlow.status:
        return problem_response(_too_slow(), {"Connection": "close"})
    headers = dict(error.headers or {})
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        # The framework names the methods of the first route of this address alone.
        headers = {"Allow": access.allowed(request.scope["path"])}
        return problem_response(
            MethodNotAllowed(f"{path} does not take {request.method}: the API is described at /docs"), headers
        )
    return problem_response(BadRequest(str(error.detail)), headers)


async def _on_defect(request: Request, error: Exception) -> JSONResponse:
    logger.error("%s %s failed", request.method, _path(request), exc_info=error)
    return problem_response(InternalFault("the coordinator has a defect here; its log has the details"))


def too_large() -> BodyTooLarge:
    """What a body that is too large is answered with."""
    return BodyTooLarge(f"the body has more than {MAX_BODY_BYTES} bytes; no request of this API is that large")


def _too_slow() -> TooSlow:
    return TooSlow(f"the body did not come within {BODY_TIMEOUT_S:g} s: send it at once")

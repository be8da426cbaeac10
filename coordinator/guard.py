"""What stands before the routes: asks for a token, and lets no page of elsewhere use a browser. Pure ASGI.

It answers before anything of the body is read, and decides by the table in access.py alone, so that a route of the
application that the table does not name cannot be reached.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from coordinator import access
from coordinator.checking import StoreCheck
from coordinator.errors import BucketUnavailable, CoordinatorError, MethodNotAllowed, ScopeMissing, TokenRequired
from coordinator.problems import problem_response
from coordinator.tokens import TokenFile

_Headers = list[tuple[bytes, bytes]]
_STILL = "weightcast.still_admitted"
"""Where a request's scope holds what says whether it would be admitted now."""


class Guard:
    """Middleware that admits a request if its token may use the route, or without ``tokens`` everybody.

    ``local_only``: nobody who addresses another machine than this one. Whoever it is, a browser must not send it for
    a page of another origin, and its body must be JSON. Before ``check`` has passed nothing gets through to the store.
    """

    def __init__(
        self, app: ASGIApp, tokens: TokenFile | None, *, local_only: bool = False, check: StoreCheck | None = None
    ) -> None:
        self._app = app
        self._check = check
        self._tokens = tokens
        self._local_only = local_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer with what is missing."""
        if scope["type"] == "http":
            try:
                self._admit(scope)
            except CoordinatorError as error:
                await problem_response(error, _headers(error, scope["path"]))(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _admit(self, scope: Scope) -> None:
        headers: _Headers = scope["headers"]
        method, path, host = scope["method"], scope["path"], _one(headers, b"host")
        if self._local_only:
            access.check_local(host)
        needed = access.needed(method, path)
        if self._tokens is not None and needed is not access.OPEN:
            self._check_token(self._tokens, headers, needed)
            scope[_STILL] = functools.partial(self._check_token, self._tokens, headers, needed)
        origin, site = _all(headers, b"origin"), _all(headers, b"sec-fetch-site")
        access.check_sender(method, path, host=host, origin=origin, site=site)
        if _has_body(headers):
            access.check_media_type(_all(headers, b"content-type"))
        if self._check is not None and not self._check.passed:
            _check_needs_no_store(needed, path, self._check.reason)

    @staticmethod
    def _check_token(tokens: TokenFile, headers: _Headers, needed: access.Scope) -> None:
        scheme, _, token = _one(headers, b"authorization").partition(" ")
        access.check(needed, tokens.held(token.strip()) if scheme.lower() == "bearer" else None)


async def while_admitted(request: Request, chunks: AsyncIterator[str]) -> AsyncIterator[str]:
    """Yield what ``chunks`` yields until the token that the request came with may no longer be used for it."""
    check: Callable[[], None] = request.scope.get(_STILL, lambda: None)
    async for chunk in chunks:
        try:
            check()
        except (TokenRequired, ScopeMissing):
            return
        yield chunk


def _check_needs_no_store(needed: access.Scope | None, path: str, reason: str) -> None:
    if needed is not access.OPEN:
        raise BucketUnavailable(f"nothing is read or decided before the store was found fit for it: {reason}")
    if path == "/readyz":  # anybody may ask this, and the reason names bucket and endpoint
        raise BucketUnavailable("the object store was not found fit yet; the coordinator's log says why")


def _one(headers: _Headers, name: bytes) -> str:
    """A header's value; empty if it is missing or, which no client of ours does, given twice."""
    values = [value for key, value in headers if key == name]
    return values[0].decode("latin-1") if len(values) == 1 else ""


def _all(headers: _Headers, name: bytes) -> str:
    """A header's values in one: two make what none of them is alone."""
    return ", ".join(value.decode("latin-1") for key, value in headers if key == name)


def _has_body(headers: _Headers) -> bool:
    return any(
        key == b"transfer-encoding" or (key == b"content-length" and value.strip(b"0 ") != b"")
        for key, value in headers
    )


def _headers(error: CoordinatorError, path: str) -> dict[str, str]:
    if isinstance(error, MethodNotAllowed):
        return {"Allow": access.allowed(path)}
    if isinstance(error, TokenRequired):
        return {"WWW-Authenticate": 'Bearer realm="weightcast"'}
    if isinstance(error, ScopeMissing):
        return {"WWW-Authenticate": 'Bearer realm="weightcast", error="insufficient_scope"'}
    return {}
